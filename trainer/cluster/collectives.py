"""Sums over the processes of a run: of gradients, and of a few numbers on which the processes agree.

N replicas of a synchronous strategy train as one replica with N batches. Keras 3 clips the gradients of each
replica before it sums them, accumulates them where TensorFlow forbids an exchange, asks one of them if they
are finite, and counts a smaller last batch as much as a full one. Here the sum comes first, exact and once
for each update (`keras_internals` replaces methods of optimizers).

Periodic averaging (local SGD: Stich, "Local SGD converges fast and communicates little", 2019) is another
algorithm, to be chosen explicitly: each replica takes steps of its own, and every few, weights are averaged.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import ClusterError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster.cluster import ClusterConfig
from shardline.trainer.cluster.peers import Health
from shardline.trainer.cluster.ring import Numbers, Ring, make_ring, on_one_machine
from shardline.trainer.keras_compat import keras_internals
from shardline.trainer.keras_compat.keras_internals import Gradients, Variables
from shardline.trainer.keras_compat.tensorflow_internals import SumBuffers, assign_in_replica

#: Returns the sums of gradients, of the same shapes on each replica, inside of one; they may travel in a
#: shorter type.
Summation = Callable[[Gradients], Gradients]

# Numbers of an array from which on it is sent from where it lies: fewer are copied, which costs less.
_MIN_UNCOPIED = 1 << 14
_UNIX_RING = "own Unix ring"


class Collectives:
    """Sums over the processes of a strategy. Every process must call the same methods in the same order."""

    def __init__(self, strategy: tf.distribute.Strategy, process: int = 0, processes: int = 1) -> None:
        """Takes the number of this process, and how many there are, of a strategy for several."""
        self.process, self.processes = 0, 1
        self._sum: Callable[[tf.Tensor], tf.Tensor] | None = None
        if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return
        self.process, self.processes = process, processes

        def share(values: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            # The first replica of each process speaks for it.
            first = tf.equal(context.replica_id_in_sync_group % len(strategy.extended.worker_devices), 0)
            own = tf.where(first, values, tf.zeros_like(values))
            return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)], autograph=False)  # type: ignore[untyped-decorator]
        def total(values: tf.Tensor) -> tf.Tensor:
            return strategy.experimental_local_results(strategy.run(share, args=(values,)))[0]

        self._sum = total

    def total(self, values: Sequence[float]) -> list[float]:
        """Returns each value's float64 sum over all processes; one counts once, whatever its replicas."""
        own = [float(value) for value in values]
        if self._sum is None:
            return own
        return [float(value) for value in self._sum(tf.constant(own, tf.float64)).numpy()]

    def gather_values(self, values: Sequence[float]) -> list[list[float]]:
        """Returns the values of each process, by its number; as many on each."""
        rows = np.zeros((self.processes, len(values)))
        rows[self.process] = values
        found: list[list[float]] = np.array(self.total(rows.ravel().tolist())).reshape(rows.shape).tolist()
        return found

    def gather_bytes(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Returns the data of each process, by its number; `sizes` are their lengths in bytes."""
        if self._sum is None:
            return [data]
        # Four bytes make a whole number that float64 holds exactly, as its sum with zeros.
        width = -(-max(sizes) // 4)
        own = np.frombuffer(data.ljust(4 * width, b"\0"), "<u4")
        rows = np.zeros((self.processes, width))
        rows[self.process] = own
        told = self._sum(tf.constant(rows.ravel(), tf.float64)).numpy().reshape(rows.shape).astype("<u4")
        return [row.tobytes()[:size] for row, size in zip(told, sizes, strict=True)]

    def barrier(self) -> None:
        """Returns only after all processes have come here."""
        self.total([0.0])


def make_summation(
    settings: TrainSettings, strategy: tf.distribute.Strategy, cluster: ClusterConfig
) -> Summation:
    """Returns how this run's gradients are summed. A collective."""
    compressed = "none" if settings.averaging_steps else settings.gradient_compression
    wire = tf.float32 if compressed == "none" else tf.as_dtype(compressed)
    if strategy.num_replicas_in_sync == 1:
        return TensorFlowSummation(wire)
    devices, asked = strategy.extended.worker_devices, settings.communication
    kind = "GPU" if "GPU" in devices[0].upper() else "CPU"
    between = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    # Between processes of one CPU each; between GPUs there is NCCL.
    if between and len(devices) == 1 and (asked == "tcp" or (asked == "auto" and kind == "CPU")):
        unix = asked == "auto" and on_one_machine(cluster)
        check = Health(cluster, settings.peer_timeout).check
        ring = make_ring(cluster, Collectives(strategy).total, check, unix=unix)
        if ring is not None:
            # To convert costs more than to send where no network is between (benchmarks/RESULTS.md).
            _announce(settings, strategy, cluster, _UNIX_RING if unix else "own TCP ring")
            return RingSummation(ring, tf.float32 if unix else wire)
        if asked == "tcp":
            raise ClusterError(
                "communication tcp cannot be had: the replicas do not reach each other on free ports; "
                "open the ports between them, or use auto"
            )
        if cluster.is_chief:
            progress.report(
                "train", "replicas cannot reach each other on free ports: gradients go through gRPC"
            )
    inside = "TensorFlow's ring (gRPC)" if between else "sums in this process"
    nccl = kind == "GPU" and not (between and asked == "ring")
    _announce(settings, strategy, cluster, "NCCL" if nccl else inside)
    return TensorFlowSummation(wire)


def _announce(
    settings: TrainSettings, strategy: tf.distribute.Strategy, cluster: ClusterConfig, way: str
) -> None:
    """Says once, on the chief, how the replicas exchange."""
    count = strategy.num_replicas_in_sync
    if not cluster.is_chief:
        return
    kind = "GPU" if "GPU" in strategy.extended.worker_devices[0].upper() else "CPU"
    what = "averaged weights" if settings.averaging_steps else "gradients"
    asked = "none" if settings.averaging_steps else settings.gradient_compression
    wire = "float32, which costs less within a machine than" if way == _UNIX_RING else "as"
    shorter = f", {wire} {asked}" if asked != "none" else ""
    progress.report("train", f"{what}: {way} between {count} {kind}s{shorter}")


class TensorFlowSummation:
    """Sums by the strategy's own collectives; float32 gradients travel, and are added up, as `wire`."""

    def __init__(self, wire: tf.DType = tf.float32) -> None:
        self._wire = wire

    def __call__(self, gradients: Gradients) -> Gradients:
        """Returns the sums, in the order of the gradients."""
        sent = [tf.cast(one, self._wire) if _is_dense(one) else one for one in gradients]
        summed = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, sent)
        pairs = zip(summed, gradients, strict=True)
        return [tf.cast(total, tf.float32) if _is_dense(own) else total for total, own in pairs]


def exact_means(values: Gradients) -> Gradients:
    """Returns means over the replicas, inside of one; in float64, so that those of equal values stay so."""
    wide = [tf.cast(value, tf.float64) for value in values]
    means = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, wide)
    return [tf.cast(mean, value.dtype) for mean, value in zip(means, values, strict=True)]


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
        totals: list[Any] = self._through_ring(dense) if dense else []
        others: list[Any] = []
        if rest:
            with tf.control_dependencies(totals):
                own = [tf.identity(gradient) for gradient in rest]
            others = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)
        sums, other_sums = iter(totals), iter(others)
        return [next(sums if _is_dense(gradient) else other_sums) for gradient in gradients]

    def _through_ring(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        def run(*arrays: Numbers) -> list[Numbers]:
            flat, places = self._buffers.lay_out(arrays)
            own = []
            for array, place in zip(arrays, places, strict=True):
                if array.size < _MIN_UNCOPIED:
                    place[...] = array
                else:
                    own.append(((place.ctypes.data - flat.ctypes.data) // flat.itemsize, array.ravel()))
            self._ring.sum(flat, self._wire, own)
            return places

        combined = tf.numpy_function(run, values, [tf.float32] * len(values))
        return [tf.ensure_shape(one, own.shape) for one, own in zip(combined, values, strict=True)]


class GradientExchange:
    """Makes every optimizer of a model exchange gradients exactly. With one replica it does nothing."""

    def __init__(self, model: keras.Model, summation: Summation) -> None:
        """Prepares the optimizers of a model built in its strategy's scope; float8 weights are refused."""
        self._local = threading.local()
        self._sum = summation
        self._replicas: int = model.distribute_strategy.num_replicas_in_sync
        if self._replicas > 1:
            keras_internals.refuse_float8(model)
        for optimizer in keras_internals.optimizers(model):
            keras_internals.before_apply(optimizer, functools.partial(self._prepare, optimizer))
            keras_internals.before_gradient(optimizer, self._weigh)
            if optimizer.built:
                self._adopt(optimizer)

    @contextlib.contextmanager
    def weighted(self, share: tf.Tensor) -> Iterator[None]:
        """Multiplies this replica's gradients by its share while the context lasts, around its `train_step`.

        With the float32 scalar `local examples / examples of all replicas` a batch divided into 5 and 4
        examples gives the gradients of the whole batch of 9, for losses that are means over a replica's batch
        (`replica_losses.exact_losses`). With 0, of no examples, gradients count nothing even when NaN.
        """
        self._local.share, self._local.weighed = share, set()
        try:
            yield
        finally:
            self._local.share = None

    def _weigh(self, optimizer: keras.Optimizer, loss: tf.Tensor) -> tf.Tensor:
        """Multiplies the loss in place of its gradients: it is one number, and they are many."""
        share = getattr(self._local, "share", None)
        if share is None or self._replicas == 1:
            return loss
        self._local.weighed.add(id(optimizer))
        return loss * tf.cast(share, loss.dtype)

    def _prepare(
        self, optimizer: keras.Optimizer, gradients: Gradients, variables: Variables | None
    ) -> Gradients:
        def build(strategy: tf.distribute.Strategy) -> None:
            with tf.init_scope(), strategy.scope():
                optimizer.build(list(variables or ()))
            self._adopt(optimizer)

        if not optimizer.built and variables is not None:
            # Of one that only train_step knows: variables are made outside the replicas.
            tf.distribute.get_replica_context().merge_call(build)
        share = getattr(self._local, "share", None)
        if share is None or self._replicas == 1:
            return gradients
        weight = tf.sign(share) if id(optimizer) in self._local.weighed else share
        own = [gradient for gradient in gradients if gradient is not None]

        def times(values: tf.Tensor) -> tf.Tensor:
            return tf.math.multiply_no_nan(values, tf.cast(weight, values.dtype))

        # A weight of 1 costs nothing.
        same, changed = (
            (lambda: list(map(tf.identity, own))),
            (lambda: [_on_values(times, one) for one in own]),
        )
        done = iter(tf.cond(tf.equal(weight, 1.0), same, changed))
        return [None if gradient is None else next(done) for gradient in gradients]

    def _adopt(self, optimizer: keras.Optimizer) -> None:
        if self._replicas > 1:
            for inner in keras_internals.inner_optimizers(optimizer):
                keras_internals.exchange_before_clipping(inner, self._sum)
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                keras_internals.agree_on_finite(optimizer, self._replicas)


def _on_values(
    function: Callable[[tf.Tensor], tf.Tensor], gradient: tf.Tensor | tf.IndexedSlices
) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def own_gradients(replicas: int) -> Summation:
    """Returns, in place of a sum, a replica's own gradients: they are weighted by its share of a step."""
    return lambda gradients: [_on_values(lambda values: values * replicas, one) for one in gradients]


def average(strategy: tf.distribute.Strategy, variables: Variables, mean: Summation) -> None:
    """Gives every replica the mean of variables that each has for itself; to be called inside a replica."""
    assign_in_replica(strategy, [variable.value for variable in variables], mean(_values(variables)))


def replica_merger(
    strategy: tf.distribute.Strategy, model: keras.Model, *, weights: bool = False
) -> Callable[[], None]:
    """Returns a collective that gives every replica the mean of what each keeps for itself.

    Keras 3 updates BatchNormalization's moving statistics on every replica alone and would save those of the
    first; gradients that are being accumulated are each replica's own, too; and with `weights` (periodic
    averaging) the weights and the optimizers' slots.
    """
    if strategy.num_replicas_in_sync == 1:
        return lambda: None

    def merge() -> None:
        kept = _floats([*model.non_trainable_weights, *keras_internals.accumulators(model)])
        if kept:
            for variable, mean in zip(kept, exact_means(_values(kept)), strict=True):
                variable.assign(mean)
        if weights:
            states = [one for each in keras_internals.optimizers(model) for one in each.variables]
            slots = [one for one in _floats(states) if one.shape]
            average(strategy, [*model.trainable_variables, *slots], exact_means)

    merge_all: Callable[[], None] = tf.function(lambda: strategy.run(merge), autograph=False)
    return merge_all


def _floats(variables: Variables) -> list[keras.Variable]:
    return [variable for variable in variables if keras.backend.is_float_dtype(variable.dtype)]


def _values(variables: Variables) -> Gradients:
    # identity: a variable's own read has no device in a graph, and the exchange asks for one.
    return [tf.identity(tf.convert_to_tensor(variable)) for variable in variables]
