"""How the gradients of all replicas are summed: by TensorFlow's collectives, or over a ring of sockets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context  # the one way to ask for a peer's health

from shardline.trainer import progress
from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.collectives import Collectives, make_ring
from shardline.trainer.cluster.ring import Array, LostPeerError, Ring
from shardline.trainer.settings import TrainSettings

Gradients = list[tf.Tensor | tf.IndexedSlices]
#: Returns the sums over all replicas; called inside a replica, with the same gradients on each.
Summation = Callable[[Gradients], Gradients]

# TensorFlow takes over an array that begins here, and copies any other (EIGEN_MAX_ALIGN_BYTES).
_ALIGN = 64
_HEALTH_TIMEOUT_MS = 5000


def make_summation(settings: TrainSettings, strategy: tf.distribute.Strategy, cluster: Cluster) -> Summation:
    """Returns how this run's gradients are summed. A collective."""
    compressed = settings.gradient_compression
    wire = tf.float32 if compressed == "none" else tf.as_dtype(compressed)
    if _uses_ring(settings, strategy):
        ring = make_ring(cluster, Collectives(strategy), lambda: _check_peers(cluster))
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


def sum_by_tensorflow(gradients: Gradients, wire: tf.DType = tf.float32) -> Gradients:
    """Sums gradients with the strategy's own collective.

    Args:
        gradients: Of one replica.
        wire: In which type float32 gradients travel, and are added up.
    """
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
        """Takes the ring.

        Args:
            ring: Over the processes of the run, one replica each.
            wire: In which type the numbers travel.
        """
        self._ring = ring
        self._wire = wire.as_numpy_dtype
        self._rooms = _Rooms()

    def __call__(self, gradients: Gradients) -> Gradients:
        """Returns the sums, in the order of the gradients."""
        dense = [i for i, gradient in enumerate(gradients) if _is_dense(gradient)]
        rest = [i for i, gradient in enumerate(gradients) if not _is_dense(gradient)]
        summed: dict[int, Any] = {}
        if dense:
            own = [gradients[i] for i in dense]
            totals = tf.numpy_function(self._sum, own, [tf.float32] * len(own))
            for i, gradient, total in zip(dense, own, totals, strict=True):
                summed[i] = tf.ensure_shape(total, gradient.shape)
        if rest:
            context = tf.distribute.get_replica_context()
            with tf.control_dependencies([summed[i] for i in dense]):
                others = [tf.identity(gradients[i]) for i in rest]
            totals = context.all_reduce(tf.distribute.ReduceOp.SUM, others)
            summed |= dict(zip(rest, totals, strict=True))
        return [summed[i] for i in range(len(gradients))]

    def _sum(self, *gradients: Array) -> list[Array]:
        flat, parts = _lay_out(gradients, self._rooms)
        for gradient, part in zip(gradients, parts, strict=True):
            part[...] = gradient
        self._ring.sum(flat, self._wire)
        return parts


class _Rooms:
    """Memory for sums: used again, since the kernel is slow to hand out new pages, once nobody holds it."""

    # What refers to an array that only the list knows: the list, and the question itself.
    _FREE = 2

    def __init__(self) -> None:
        self._rooms: list[Array] = []

    def take(self, size: int) -> Array:
        """Returns float32 (size,) that is nobody's: TensorFlow takes sums over, and may keep them."""
        rooms = self._rooms
        for index in range(len(rooms)):
            if rooms[index].size == size and sys.getrefcount(rooms[index]) == self._FREE:
                return rooms[index]
        rooms.append(np.empty(size, np.float32))
        return rooms[-1]


def _lay_out(gradients: tuple[Array, ...], rooms: _Rooms) -> tuple[Array, list[Array]]:
    """Returns an array with room for all gradients, and the place of each in it."""
    width = _ALIGN // 4
    starts, end = [], 0
    for gradient in gradients:
        starts.append(end)
        end += -(-gradient.size // width) * width
    room = rooms.take(end + width)
    first = (-room.ctypes.data % _ALIGN) // 4
    flat = room[first : first + end]
    parts = []
    for gradient, start in zip(gradients, starts, strict=True):
        parts.append(flat[start : start + gradient.size].reshape(gradient.shape))
        flat[start + gradient.size : start + -(-gradient.size // width) * width] = 0
    return flat, parts


def _check_peers(cluster: Cluster) -> None:
    """Asks TensorFlow whether every peer's own TensorFlow answers; one that is only slow does.

    Raises:
        LostPeerError: When one does not.
    """
    for kind, hosts in cluster.tasks.items():
        for index in range(len(hosts)):
            task = f"/job:{kind}/replica:0/task:{index}"
            try:
                eager_context.context().check_collective_ops_peer_health(task, _HEALTH_TIMEOUT_MS)
            except tf.errors.OpError as error:
                raise LostPeerError(f"no answer from {task}: {error.message}") from None
