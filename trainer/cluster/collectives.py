"""What the processes of a run tell each other besides gradients: sums of a few numbers, and barriers.

The connections of a ring: each process to the next one, on ports of their own.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.ring import Ring


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
