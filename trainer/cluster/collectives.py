"""What the processes of a run tell each other besides gradients: sums of a few numbers, and barriers.

The connections of a ring: each process to the next one, on ports of their own.

How the gradients of all replicas are summed: by TensorFlow's collectives, or over a ring of sockets.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context  # the one way to ask for a peer's health

from shardline.trainer import progress
from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.ring import Array, LostPeerError, Ring
from shardline.trainer.settings import TrainSettings


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


# Seconds until a connection that cannot be made counts as forbidden.
_TIMEOUT_S = 15.0
_GREETING = struct.Struct("!II")


def make_ring(cluster: Cluster, together: Collectives, check: Callable[[], None]) -> Ring | None:
    """Connects the processes that train; each must call it at the same point.

    Ports are the system's choice, and are told to the others, with a random word by which a connection is
    known to be theirs, through TensorFlow's own collectives.

    Args:
        cluster: This process's place.
        together: How the processes agree.
        check: Raises when a peer is no longer there.

    Returns:
        The ring; None, on every process, where one of them cannot reach the next one.
    """
    names = list(cluster.addresses)[: cluster.num_workers]
    rank, size = names.index(cluster.name), len(names)
    with _listener() as listener:
        own = (listener.getsockname()[1], secrets.randbits(32))
        ports, words = _share(together, own, rank, size)
        following = (rank + 1) % size
        host = cluster.addresses[names[following]].rpartition(":")[0].strip("[]")
        made: list[socket.socket] = []
        with contextlib.suppress(OSError):
            made.append(socket.create_connection((host, ports[following]), timeout=_TIMEOUT_S))
            made[0].sendall(_GREETING.pack(rank, words[following]))
            made.append(_accepted(listener, _GREETING.pack((rank - 1) % size, own[1])))
    if together.total([len(made)])[0] < 2 * size:
        for connection in made:
            connection.close()
        return None
    to_next, from_previous = made
    return Ring(rank, size, to_next, from_previous, check)


def _listener() -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual)


def _share(
    together: Collectives, own: Sequence[int], rank: int, size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns every process's port and word, in the order of their ranks."""
    table = [0.0] * (2 * size)
    table[2 * rank : 2 * rank + 2] = own
    numbers = [int(value) for value in together.total(table)]
    return tuple(numbers[0::2]), tuple(numbers[1::2])


def _accepted(listener: socket.socket, greeting: bytes) -> socket.socket:
    """Returns the connection that begins with the greeting; any other is closed.

    Raises:
        OSError: When there is none in time.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            if connection.recv(len(greeting), socket.MSG_WAITALL) == greeting:
                return connection
        connection.close()


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
