"""Sums over the processes of a run: of gradients, and of a few numbers on which the processes agree.

Gradients travel through TensorFlow's own collectives, or between CPUs through a ring of sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from shardline.trainer import progress
from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.health import Health
from shardline.trainer.cluster.ring import Numbers, Ring, Spans, make_ring, on_one_machine
from shardline.trainer.errors import ClusterError
from shardline.trainer.keras_internals import Gradients
from shardline.trainer.settings import TrainSettings
from shardline.trainer.tensorflow_internals import SumBuffers


class Summation(Protocol):
    """Sums over all replicas; called inside a replica, with values of the same shapes on each."""

    def __call__(self, gradients: Gradients) -> Gradients:
        """Returns the sums of gradients, which may travel in a shorter type."""

    def mean(self, values: Gradients) -> Gradients:
        """Returns the means of dense float values, exact where all are equal: weights travel as they are."""


# Numbers of an array from which on it is sent from where it lies: fewer are copied, which costs less.
_LARGE = 1 << 14
_UNIX = "own Unix ring"
# The exponent of a float32, and what the largest float16 may become: a sum that is bounded by twice it fits.
_EXPONENT_BITS, _HALF = 0x7F800000, 2.0**14


class Collectives:
    """Sums over the processes of a strategy. Every process must call the same methods in the same order."""

    def __init__(self, strategy: tf.distribute.Strategy, process: int = 0, processes: int = 1) -> None:
        """Takes the number of this process, and how many there are, of a strategy for several."""
        self.process, self.processes = 0, 1
        self._sum: Callable[[tf.Tensor], tf.Tensor] | None = None
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            self.process, self.processes = process, processes
            self._sum = _sum_over_processes(strategy)

    def total(self, values: Sequence[float]) -> list[float]:
        """Returns each value's float64 sum over all processes; one counts once, whatever its replicas."""
        own = [float(value) for value in values]
        if self._sum is None:
            return own
        return [float(value) for value in self._sum(tf.constant(own, tf.float64)).numpy()]

    def table(self, values: Sequence[float]) -> list[list[float]]:
        """Returns the values of each process, by its number; as many on each."""
        width = len(values)
        padded = [0.0] * (width * self.processes)
        padded[self.process * width : (self.process + 1) * width] = values
        told = self.total(padded)
        return [told[start : start + width] for start in range(0, len(told), width)]

    def gather(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
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
    if strategy.num_replicas_in_sync == 1:
        return TensorFlowSummation(wire)
    if _uses_ring(settings, strategy):
        unix = settings.communication == "auto" and on_one_machine(cluster)
        check = Health(cluster, settings.peer_timeout).check
        ring = make_ring(cluster, Collectives(strategy).total, check, unix=unix)
        if ring is not None:
            # To convert costs more than to send where no network is between (benchmarks/RESULTS.md).
            _announce(settings, strategy, cluster, _UNIX if unix else "own TCP ring")
            return RingSummation(ring, tf.float32 if unix else wire)
        if settings.communication == "tcp":
            raise ClusterError(
                "communication tcp cannot be had: the replicas do not reach each other on free ports; "
                "open the ports between them, or use auto"
            )
        if cluster.is_chief:
            progress.say("train", "replicas cannot reach each other on free ports: gradients go through gRPC")
    nccl = "GPU" in strategy.extended.worker_devices[0].upper() and settings.communication != "ring"
    _announce(settings, strategy, cluster, "NCCL" if nccl else "TensorFlow's ring (gRPC)")
    return TensorFlowSummation(wire)


def _announce(settings: TrainSettings, strategy: tf.distribute.Strategy, cluster: Cluster, way: str) -> None:
    """Says once, on the chief, how the replicas exchange."""
    count = strategy.num_replicas_in_sync
    if not cluster.is_chief:
        return
    kind = "GPU" if "GPU" in strategy.extended.worker_devices[0].upper() else "CPU"
    what = "averaged weights" if settings.averaging_steps else "gradients"
    asked = settings.gradient_compression
    wire = "float32, which costs less within a machine than" if way == _UNIX else "as"
    shorter = f", {wire} {asked}" if asked != "none" and not settings.averaging_steps else ""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        way = "NCCL" if kind == "GPU" else "sums in this process"
    progress.say("train", f"{what}: {way} between {count} {kind}s{shorter}")


def _uses_ring(settings: TrainSettings, strategy: tf.distribute.Strategy) -> bool:
    """Whether one replica lives in each of several processes, on a CPU; between GPUs there is NCCL."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    devices: tuple[str, ...] = strategy.extended.worker_devices
    if len(devices) > 1:
        return False
    return settings.communication == "tcp" or (settings.communication == "auto" and "CPU" in devices[0])


class TensorFlowSummation:
    """Sums by the strategy's own collectives; float32 gradients travel, and are added up, as `wire`."""

    def __init__(self, wire: tf.DType = tf.float32) -> None:
        self._wire = wire

    def __call__(self, gradients: Gradients) -> Gradients:
        """Returns the sums, in the order of the gradients."""
        context, wire = tf.distribute.get_replica_context(), self._wire
        dense = [gradient for gradient in gradients if _is_dense(gradient)]
        scales = _common_scales(dense) if wire == tf.float16 else [1.0] * len(dense)
        scale = iter(scales)
        sent = [tf.cast(one * next(scale), wire) if _is_dense(one) else one for one in gradients]
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, sent)
        scale = iter(scales)
        return [
            tf.cast(total, tf.float32) / next(scale) if _is_dense(own) else total
            for total, own in zip(summed, gradients, strict=True)
        ]

    def mean(self, values: Gradients) -> Gradients:
        """Returns the means: in float64 the sum of equal float32 values, divided, is that value."""
        context = tf.distribute.get_replica_context()
        wide = [tf.cast(value, tf.float64) for value in values]
        means = context.all_reduce(tf.distribute.ReduceOp.MEAN, wide)
        return [tf.cast(mean, value.dtype) for mean, value in zip(means, values, strict=True)]


def _common_scales(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns a power of two for each gradient with which no sum over replicas overflows float16."""
    if not gradients:
        return []
    largest = tf.stack([tf.reduce_max(tf.abs(one), keepdims=False) for one in gradients])
    bounds = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, largest)
    powers = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(bounds, tf.int32), _EXPONENT_BITS), tf.float32)
    # Finite both ways; of what is not finite nothing can be kept.
    scales = tf.where(tf.math.is_finite(bounds), _HALF / tf.clip_by_value(powers, 2.0**-100, 2.0**120), 1.0)
    each: list[tf.Tensor] = tf.unstack(scales)
    return each


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
            totals = self._through_ring(dense, lambda flat, own: self._ring.sum(flat, self._wire, own))
        others: list[Any] = []
        if rest:
            with tf.control_dependencies(totals):
                own = [tf.identity(gradient) for gradient in rest]
            others = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)
        sums, other_sums = iter(totals), iter(others)
        return [next(sums if _is_dense(gradient) else other_sums) for gradient in gradients]

    def mean(self, values: Gradients) -> Gradients:
        """Returns the means; those that are not float32 go through TensorFlow."""
        dense = [value for value in values if _is_dense(value)]
        rest = [value for value in values if not _is_dense(value)]
        means = self._through_ring(dense, self._ring.mean) if dense else []
        with tf.control_dependencies(means):
            own = [tf.identity(value) for value in rest]
        ours, others = iter(means), iter(TensorFlowSummation().mean(own) if own else [])
        return [next(ours if _is_dense(value) else others) for value in values]

    def _through_ring(
        self, values: Sequence[tf.Tensor], combine: Callable[[Numbers, Spans], None]
    ) -> list[tf.Tensor]:
        def run(*arrays: Numbers) -> list[Numbers]:
            flat, places = self._buffers.lay_out(arrays)
            own = []
            for array, place in zip(arrays, places, strict=True):
                if array.size < _LARGE:
                    place[...] = array
                else:
                    own.append(((place.ctypes.data - flat.ctypes.data) // flat.itemsize, array.ravel()))
            combine(flat, own)
            return places

        combined = tf.numpy_function(run, values, [tf.float32] * len(values))
        return [tf.ensure_shape(one, own.shape) for one, own in zip(combined, values, strict=True)]
