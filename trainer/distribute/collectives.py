"""Collectives: sums of gradients and of a few numbers over the processes of a run.

N replicas of a synchronous strategy train as one replica with N batches. Keras 3 clips the gradients of each
replica before it sums them, accumulates them where TensorFlow forbids an exchange, checks only one replica's
for overflow, and weighs a smaller last batch like a full one. Here gradients are summed first, exactly and
once for each update (`keras_internals` replaces methods of optimizers).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import ClusterError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster import ClusterConfig
from shardline.trainer.distribute.peers import Health
from shardline.trainer.distribute.ring import Numbers, Ring, make_ring
from shardline.trainer.keras_compat import keras_internals, tensorflow_internals
from shardline.trainer.keras_compat.keras_internals import Gradients, Variables

# Smallest array, in numbers, that is sent without a copy; copying smaller ones costs less.
_MIN_UNCOPIED = 1 << 14
# Bytes of all processes that are gathered at a time.
_GATHERED_BYTES = 1 << 22


class Collectives:
    """Sums over the processes of a strategy. Every process must call the same methods in the same order."""

    def __init__(self, strategy: tf.distribute.Strategy, process: int = 0, processes: int = 1) -> None:
        """Takes this process's number and the number of processes; both count for a multi-worker strategy."""
        self.process, self.processes = 0, 1
        self._sum: Callable[[tf.Tensor], tf.Tensor] | None = None
        if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return
        self.process, self.processes = process, processes

        def share(values: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            # Only the first replica of each process contributes.
            first = tf.equal(context.replica_id_in_sync_group % len(strategy.extended.worker_devices), 0)
            own = tf.where(first, values, tf.zeros_like(values))
            return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)], autograph=False)  # type: ignore[untyped-decorator]
        def total(values: tf.Tensor) -> tf.Tensor:
            return strategy.experimental_local_results(strategy.run(share, args=(values,)))[0]

        self._sum = total

    def total(self, values: Sequence[float]) -> list[float]:
        """Returns each value's float64 sum over all processes, however many replicas each has."""
        own = [float(value) for value in values]
        if self._sum is None:
            return own
        return [float(value) for value in self._sum(tf.constant(own, tf.float64)).numpy()]

    def gather_values(self, values: Sequence[float]) -> list[list[float]]:
        """All-gather: returns the values of each process, by its number; all have the same count."""
        rows = np.zeros((self.processes, len(values)))
        rows[self.process] = values
        table: list[list[float]] = np.array(self.total(rows.ravel().tolist())).reshape(rows.shape).tolist()
        return table

    def gather_bytes(self, data: bytes) -> list[bytearray]:
        """All-gather in parts: returns the data of each process, by its number."""
        if self._sum is None:
            return [bytearray(data)]
        sizes = [int(row[0]) for row in self.gather_values([len(data)])]
        gathered = [bytearray() for _ in sizes]
        # Four bytes make an integer that float64 holds exactly, also summed with zeros.
        part = max(1, _GATHERED_BYTES // (4 * self.processes)) * 4
        for start in range(0, max(sizes), part):
            own = data[start : start + part]
            rows = np.zeros((self.processes, -(-min(part, max(sizes) - start) // 4)))
            rows[self.process] = np.frombuffer(own.ljust(4 * rows.shape[1], b"\0"), "<u4")
            total = self._sum(tf.constant(rows.ravel(), tf.float64)).numpy().reshape(rows.shape)
            for received, row, size in zip(gathered, total, sizes, strict=True):
                received += row.astype("<u4").tobytes()[: max(0, size - start)]
        return gathered

    def barrier(self) -> None:
        """Returns after all processes have called it."""
        self.total([0.0])


def make_summation(
    settings: TrainSettings, strategy: tf.distribute.Strategy, cluster: ClusterConfig
) -> Summation:
    """Returns the summation of this run's gradients. A collective."""
    requested = settings.communication
    summation: Summation = TensorFlowSummation()
    if strategy.num_replicas_in_sync == 1:
        return summation
    devices = strategy.extended.worker_devices
    kind = "GPU" if "GPU" in devices[0].upper() else "CPU"
    multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    transport = "TensorFlow's ring (gRPC)" if multi_worker else "sums in this process"
    if kind == "GPU" and not (multi_worker and requested == "ring"):
        transport = "NCCL"
    # The ring is for processes of one CPU each; GPUs have NCCL.
    if multi_worker and len(devices) == 1 and (requested == "tcp" or (requested == "auto" and kind == "CPU")):
        unix = requested == "auto" and bool(cluster.own_host)
        check = Health(cluster, settings.peer_timeout).check_peers
        ring = make_ring(cluster, Collectives(strategy).total, check, unix=unix)
        if ring is not None:
            transport = "own Unix ring" if unix else "own TCP ring"
            summation = RingSummation(ring)
        elif requested == "tcp":
            raise ClusterError(
                "communication tcp is not possible: the replicas cannot reach each other on free ports; "
                "open the ports between them, or use auto"
            )
        elif cluster.is_chief:
            progress.report(
                "train", "replicas cannot reach each other on free ports: gradients go through gRPC"
            )
    if cluster.is_chief:
        between = f"between {strategy.num_replicas_in_sync} {kind}s"
        progress.report("train", f"gradients: {transport} {between}")
    return summation


class TensorFlowSummation:
    """Summation by the strategy's own collectives.

    Attributes:
        single_steps: Whether it has been traced for sparse gradients, whose number of rows may not change
            within a call (`CompleteInstanceFromInitializedIRec` in
            tensorflow/core/common_runtime/collective_param_resolver_local.cc).
    """

    single_steps = False

    def __call__(self, gradients: Gradients) -> Gradients:
        """Returns the sums, in the order of the gradients."""
        self.single_steps |= any(isinstance(each, tf.IndexedSlices) for each in gradients)
        context = tf.distribute.get_replica_context()
        sums: Gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        return sums


class RingSummation:
    """Summation of float32 gradients over a ring of sockets, and of the few others through TensorFlow.

    Rows of sparse gradients are joined over the ring, as they are in one batch of all.
    """

    single_steps = False

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._buffers = tensorflow_internals.SumBuffers()

    def __call__(self, gradients: Gradients) -> Gradients:
        """Returns the sums, in the order of the gradients."""
        kinds = [
            2 if isinstance(each, tf.IndexedSlices) else int(each.dtype == tf.float32) for each in gradients
        ]
        others, dense, sparse = (
            [gradient for gradient, kind in zip(gradients, kinds, strict=True) if kind == wanted]
            for wanted in range(3)
        )
        sums: list[Any] = [[], self._through_ring(dense) if dense else [], []]
        with tf.control_dependencies(sums[1]):
            if sparse:
                sums[2] = self._gather(sparse)
            if others:
                own = [tf.identity(gradient) for gradient in others]
                sums[0] = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)
        by_kind = list(map(iter, sums))
        return [next(by_kind[kind]) for kind in kinds]

    def _gather(self, slices: Sequence[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
        own = [part for each in slices for part in (each.values, each.indices)]
        gathered = tensorflow_internals.numpy_function(self._ring.gather, own, [part.dtype for part in own])
        parts = [
            tf.ensure_shape(all_, [None, *one.shape[1:]]) for all_, one in zip(gathered, own, strict=True)
        ]
        pairs = zip(parts[::2], parts[1::2], slices, strict=True)
        return [tf.IndexedSlices(values, indices, each.dense_shape) for values, indices, each in pairs]

    def _through_ring(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        sums = tensorflow_internals.numpy_function(self._sum, values, [tf.float32] * len(values))
        return [tf.ensure_shape(total, own.shape) for total, own in zip(sums, values, strict=True)]

    def _sum(self, *arrays: Numbers) -> list[Numbers]:
        flat, views = self._buffers.lay_out(arrays)
        uncopied = []
        for array, view in zip(arrays, views, strict=True):
            if array.size < _MIN_UNCOPIED:
                view[...] = array
            else:
                uncopied.append(((view.ctypes.data - flat.ctypes.data) // flat.itemsize, array.ravel()))
        self._ring.sum(flat, uncopied)
        return views


#: Sums gradients of the same shapes over all replicas, called inside one; joins rows of sparse gradients.
Summation: TypeAlias = TensorFlowSummation | RingSummation


class GradientExchange:
    """Exact gradient exchange in every optimizer of a model. With one replica it does nothing."""

    def __init__(self, model: keras.Model, summation: Summation) -> None:
        """Patches the optimizers of a model built in its strategy's scope; refuses float8 weights."""
        self._local = threading.local()
        self._sum = summation
        self._replicas: int = model.distribute_strategy.num_replicas_in_sync
        if self._replicas > 1:
            keras_internals.refuse_float8(model)
        for optimizer in keras_internals.optimizers(model):
            keras_internals.before_apply(optimizer, functools.partial(self._prepare, optimizer))
            keras_internals.before_gradient(optimizer, self._weigh)
            if optimizer.built:
                self._patch(optimizer)

    @contextlib.contextmanager
    def weighted(self, share: tf.Tensor) -> Iterator[None]:
        """Multiplies this replica's gradients by its share of the batch while the context lasts.

        The share is the float32 scalar `local examples / examples of all replicas`: a batch divided into 5
        and 4 examples gives the gradients of the whole batch of 9, for losses that are means over a replica's
        batch (`replicas.exact_losses`). A share of 0 makes gradients 0, even NaN.
        """
        self._local.share, self._local.weighed = share, set()
        try:
            yield
        finally:
            self._local.share = None

    def _weigh(self, optimizer: keras.Optimizer, loss: tf.Tensor) -> tf.Tensor:
        """Multiplies the loss instead of its gradients, since it is one number."""
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
            self._patch(optimizer)

        if not optimizer.built and variables is not None:
            # An optimizer that only train_step knows: variables are created outside the replicas.
            tf.distribute.get_replica_context().merge_call(build)
        if self._replicas > 1:
            gradients = list(map(_as_in_one_batch, gradients))
        share = getattr(self._local, "share", None)
        if share is None or self._replicas == 1:
            return gradients
        weight = tf.sign(share) if id(optimizer) in self._local.weighed else share
        own = [gradient for gradient in gradients if gradient is not None]

        def times(values: tf.Tensor) -> tf.Tensor:
            return tf.math.multiply_no_nan(values, tf.cast(weight, values.dtype))

        # A weight of 1 costs nothing.
        same, scaled = (
            (lambda: list(map(tf.identity, own))),
            (lambda: [_on_values(times, gradient) for gradient in own]),
        )
        weighted = iter(tf.cond(tf.equal(weight, 1.0), same, scaled))
        return [None if gradient is None else next(weighted) for gradient in gradients]

    def _patch(self, optimizer: keras.Optimizer) -> None:
        if self._replicas > 1:
            for inner in keras_internals.inner_optimizers(optimizer):
                keras_internals.exchange_before_clipping(inner, self._sum)
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                keras_internals.agree_on_finite(optimizer, self._replicas)


def _as_in_one_batch(gradient: Any) -> Any:
    """Makes the gradient of embedded positions dense, of which one replica's batch has one row for each.

    The rows of all replicas would be one too many: Keras squares each, where Adam should square their sum.
    """
    same = isinstance(gradient, tf.IndexedSlices) and tensorflow_internals.is_same_for_examples(
        gradient.indices
    )
    return tf.convert_to_tensor(gradient) if same else gradient


def _on_values(
    function: Callable[[tf.Tensor], tf.Tensor], gradient: tf.Tensor | tf.IndexedSlices
) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def replica_merger(strategy: tf.distribute.Strategy, model: keras.Model) -> Callable[[], list[str]]:
    """Returns a collective that sets variables that each replica has for itself to their mean.

    These are BatchNormalization's moving statistics, which Keras 3 updates on each replica alone, and would
    save from the first; and accumulated gradients. It returns the names of all others that differed, which
    layers of a program's own have assigned; of numbers that are not floats each replica keeps its own.
    """
    if strategy.num_replicas_in_sync == 1:
        return list
    weights = [each for each in model.non_trainable_weights if _is_number(tf.as_dtype(each.dtype))]
    layers = keras_internals.all_layers(model)
    normal = [each for each in layers if isinstance(each, keras.layers.BatchNormalization)]
    averaged = {id(variable) for layer in normal for variable in layer.non_trainable_variables}

    def merge() -> tf.Tensor:
        local = [*weights, *keras_internals.accumulators(model)]
        if not local:
            return tf.zeros(0)
        # identity: a variable's read has no device in a graph, and the exchange needs one.
        own = [tf.identity(tf.convert_to_tensor(variable)) for variable in local]
        wide = [tf.cast(value, tf.float64) for value in own]  # keeps the mean of equal values exact
        context, operations = tf.distribute.get_replica_context(), tf.distribute.ReduceOp
        means = [
            tf.cast(mean, value.dtype)
            for mean, value in zip(context.all_reduce(operations.MEAN, wide), own, strict=True)
        ]
        for variable, mean in zip(local, means, strict=True):
            if keras.backend.is_float_dtype(variable.dtype):
                variable.assign(mean)
        pairs = zip(weights, own, means, strict=False)
        differs = [tf.reduce_any(value != mean) for each, value, mean in pairs if id(each) not in averaged]
        if not differs:
            return tf.zeros(0)
        return context.all_reduce(operations.SUM, tf.cast(tf.stack(differs), tf.float32))

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def merge_all() -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(merge))[0]

    names = [each.path for each in weights if id(each) not in averaged]
    return lambda: [name for name, count in zip(names, merge_all().numpy(), strict=True) if count]


def _is_number(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)
