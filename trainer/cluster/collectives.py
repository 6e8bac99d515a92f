"""Sums over the processes of a run: of gradients, and of a few numbers on which the processes agree.

Gradients travel through TensorFlow's own collectives, or between CPUs through a ring of sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import tensorflow as tf

from shardline.trainer import progress
from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.ring import LostPeerError, Ring, make_ring
from shardline.trainer.keras_internals import Gradients
from shardline.trainer.settings import TrainSettings
from shardline.trainer.tensorflow_internals import SumBuffers, check_peer

#: Returns the sums over all replicas; called inside a replica, with the same gradients on each.
Summation = Callable[[Gradients], Gradients]

_HEALTH_TIMEOUT_MS = 5000


class Collectives:
    """Sums over the processes of a strategy. Every process must call the same methods in the same order."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._sum: Callable[[tf.Tensor], tf.Tensor] | None = None
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            self._sum = _sum_over_processes(strategy)

    def total(self, values: Sequence[float]) -> list[float]:
        """Returns each value's float64 sum over all processes; one counts once, whatever its replicas."""
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


def make_summation(settings: TrainSettings, strategy: tf.distribute.Strategy, cluster: Cluster) -> Summation:
    """Returns how this run's gradients are summed. A collective."""
    compressed = settings.gradient_compression
    wire = tf.float32 if compressed == "none" else tf.as_dtype(compressed)
    if _uses_ring(settings, strategy):
        ring = make_ring(cluster, Collectives(strategy).total, lambda: _check_peers(cluster))
        if ring is not None:
            return RingSummation(ring, wire)
        if cluster.is_chief:
            progress.say("train", "replicas cannot reach each other on free ports: gradients go through gRPC")
    return lambda gradients: sum_by_tensorflow(gradients, wire)


def _uses_ring(settings: TrainSettings, strategy: tf.distribute.Strategy) -> bool:
    """Whether one replica lives in each of several processes, on a CPU; between GPUs there is NCCL."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    devices: tuple[str, ...] = strategy.extended.worker_devices
    if len(devices) > 1 or strategy.num_replicas_in_sync == 1:
        return False
    return settings.communication == "tcp" or (settings.communication == "auto" and "CPU" in devices[0])


def _check_peers(cluster: Cluster) -> None:
    """Asks whether every peer's own TensorFlow answers, as one that is only slow does."""
    for kind, hosts in cluster.tasks.items():
        for index in range(len(hosts)):
            task = f"/job:{kind}/replica:0/task:{index}"
            try:
                check_peer(task, _HEALTH_TIMEOUT_MS)
            except tf.errors.OpError as error:
                raise LostPeerError(f"no answer from {task}: {error.message}") from None


def sum_by_tensorflow(gradients: Gradients, wire: tf.DType = tf.float32) -> Gradients:
    """Sums gradients with the strategy's own collective; float32 travels, and is added, as `wire`."""
    context = tf.distribute.get_replica_context()
    sent = [tf.cast(gradient, wire) if _is_dense(gradient) else gradient for gradient in gradients]
    summed = context.all_reduce(tf.distribute.ReduceOp.SUM, sent)
    return [
        tf.cast(total, tf.float32) if _is_dense(own) else total
        for total, own in zip(summed, gradients, strict=True)
    ]


def _is_dense(gradient: tf.Tensor | tf.IndexedSlices) -> bool:
    return isinstance(gradient, tf.Tensor) and gradient.dtype == tf.float32


class RingSummation:
    """Sums float32 gradients over a ring of sockets, and the few others through TensorFlow."""

    def __init__(self, ring: Ring, wire: tf.DType) -> None:
        self._ring = ring
        self._wire = wire.as_numpy_dtype
        self._buffers = SumBuffers()

    def __call__(self, gradients: Gradients) -> Gradients:
        """Returns the sums, in the order of the gradients."""
        dense = [gradient for gradient in gradients if _is_dense(gradient)]
        rest = [gradient for gradient in gradients if not _is_dense(gradient)]
        totals: list[Any] = []
        if dense:
            summed = tf.numpy_function(self._sum, dense, [tf.float32] * len(dense))
            totals = [tf.ensure_shape(one, own.shape) for one, own in zip(summed, dense, strict=True)]
        others: list[Any] = []
        if rest:
            with tf.control_dependencies(totals):
                own = [tf.identity(gradient) for gradient in rest]
            others = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)
        sums, other_sums = iter(totals), iter(others)
        return [next(sums if _is_dense(gradient) else other_sums) for gradient in gradients]

    def _sum(self, *gradients: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        flat, places = self._buffers.lay_out(gradients)
        for gradient, place in zip(gradients, places, strict=True):
            place[...] = gradient
        self._ring.sum(flat, self._wire)
        return places
