"""What the processes of a run tell each other besides gradients: sums of a few numbers, and barriers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf


class Collectives:
    """Sums over the processes of a strategy. Every process must call the same methods in the same order."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        """Wraps the strategy; only one that spans several processes communicates."""
        self._sum: Callable[[tf.Tensor], tf.Tensor] | None = None
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            self._sum = _sum_over_processes(strategy)

    def total(self, values: Sequence[float]) -> list[float]:
        """Returns each value summed over all processes, the same on every process.

        A process counts once, however many local replicas it has. The sums are made in float64.
        """
        own = [float(value) for value in values]
        if self._sum is None:
            return own
        return [float(value) for value in self._sum(tf.constant(own, tf.float64)).numpy()]

    def barrier(self) -> None:
        """Returns only after all processes have come here."""
        self.total([0.0])


def _sum_over_processes(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor]:
    def share(values: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        local = len(strategy.extended.worker_devices)
        # The first replica of each process speaks for it.
        first = tf.equal(context.replica_id_in_sync_group % local, 0)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(first, values, tf.zeros_like(values)))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)], autograph=False)  # type: ignore[untyped-decorator]
    def total(values: tf.Tensor) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(share, args=(values,)))[0]

    summed: Callable[[tf.Tensor], tf.Tensor] = total
    return summed
