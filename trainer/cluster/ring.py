"""Ring all-reduce: sums of large arrays over the processes of a cluster, through plain TCP connections.

TensorFlow's own collective moves bytes through gRPC, at about a quarter of the speed of a socket, and pays
with the very cores that train. Here each process sends to the next one and receives from the one before:
2 (N - 1) / N times the array with N processes, the least that is possible (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009). Each part is added up in one place and in
a fixed order, so that all processes get the same bits, every time.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import math
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.meeting import received

# What is received is added up in pieces that stay in a core's own cache (256 KiB of float32).
_PIECE = 1 << 16
# Parts begin at a multiple of a cache line.
_ALIGN = 16
# Bytes that are received at once, at most.
_BUFFER = 4 << 20
# Seconds without a byte until it is asked whether the others are still there, and until a connection that
# cannot be made counts as forbidden.
_PATIENCE_S, _TIMEOUT_S = 5.0, 15.0
# Seconds for a connection that was made to bring its greeting, which is sent at once.
_GREETING_S = 2.0

_HEADER = struct.Struct("!QQ")  # before each array: number of the call, size of the array
_GREETING = struct.Struct("!QQ")  # what is proven at the start of a connection: rank, number of the receiver
# Before each part that travels as float16: the exponent of the power of two by which it was multiplied. Its
# largest number becomes less than 2 ** 15, and the factor and its inverse are finite as float32.
_EXPONENT = struct.Struct("!i")
_HALF_EXPONENT, _FINITE = 15, 126

#: Puts together, in place of the first, a part's numbers here and the total of `count - 1` other processes.
Combine = Callable[..., object]


class LostPeerError(ConnectionError):
    """A neighbour has ended, or does not send what it should."""


class Ring:
    """This process's place in the ring. All processes must make the same calls in the same order.

    It takes over connections to process `rank + 1` and from `rank - 1` of `size`, at least 2. `check` is
    called after some seconds of silence, again and again, with the time (`time.monotonic()`) at which the
    wait began, and raises when a peer is no longer there.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        to_next: socket.socket,
        from_previous: socket.socket,
        check: Callable[[float], None] = lambda began: None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._to_next = to_next
        self._from_previous = from_previous
        self._check = check
        self._calls = 0
        self._lock = threading.Lock()
        self._scratch = np.empty(_PIECE, np.float32)
        for connection in (to_next, from_previous):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # SO_SNDBUF and SO_RCVBUF stay as they are: once set, the kernel tunes them no more.

    def sum(self, values: npt.NDArray[Any], wire: Any = np.float32) -> None:
        """Replaces a contiguous float32 (n,) by its sum over all processes; n is the same everywhere.

        `wire` is the type in which the numbers travel: float32, which is exact, or a shorter float type; they
        are added up in float32 in any case. Each part that travels as float16 has a power of two of its own,
        by which nothing finite overflows.
        """
        self._reduce(values, np.dtype(wire), lambda into, piece, count: np.add(into, piece, out=into))

    def mean(self, values: npt.NDArray[Any]) -> None:
        """Replaces a contiguous float32 (n,) by its mean over all processes; equal values stay as they are.

        A sum of equal values, divided, would not: three times a float32 is rounded.
        """

        def mix(into: npt.NDArray[Any], piece: npt.NDArray[Any], count: int) -> None:
            np.subtract(into, piece, out=into)
            np.divide(into, np.float32(count), out=into)
            np.add(into, piece, out=into)

        self._reduce(values, np.dtype(np.float32), mix)

    def _reduce(self, values: npt.NDArray[Any], wire: np.dtype[Any], combine: Combine) -> None:
        # What is not finite is the optimizer's affair.
        with self._lock, np.errstate(all="ignore"):
            self._meet(values.size)
            size = -(-values.size // (self._size * _ALIGN)) * _ALIGN
            parts = [values[index * size : (index + 1) * size] for index in range(self._size)]
            for step in range(self._size - 1):
                out = parts[(self._rank - step) % self._size]
                into = parts[(self._rank - step - 1) % self._size]
                self._move(_packed(out, wire), into, wire, functools.partial(combine, count=step + 2))
            own = parts[(self._rank + 1) % self._size]
            if wire != np.float32:
                _unpack(_packed(own, wire), own, wire)  # as the others will have it
            for step in range(self._size - 1):
                out, into = (parts[(self._rank - step - ahead) % self._size] for ahead in (-1, 0))
                self._move(_packed(out, wire), into, wire, None)

    def close(self) -> None:
        """Ends the connections."""
        self._to_next.close()
        self._from_previous.close()

    def _meet(self, count: int) -> None:
        """Makes sure that the process before this one is at the same call."""
        self._calls += 1
        own, theirs = _HEADER.pack(self._calls, count), bytearray(_HEADER.size)
        self._exchange(memoryview(own), memoryview(theirs), lambda got: None)
        if bytes(theirs) != own:
            raise LostPeerError(
                f"the replicas are out of step: {(self._calls, count)} here, {_HEADER.unpack(theirs)} there "
                "(calls, numbers)"
            )

    def _move(
        self,
        out: npt.NDArray[Any],
        into: npt.NDArray[Any],
        wire: np.dtype[Any],
        combine: Callable[[npt.NDArray[Any], npt.NDArray[Any]], object] | None,
    ) -> None:
        """Sends bytes to the next process while it receives a part from the process before.

        `combine` takes, piece by piece, what is here and what has come; without it the part is replaced.
        """
        whole = wire == np.float32 and combine is None
        incoming = (
            into.view(np.uint8) if whole else np.empty(_start(wire) + into.size * wire.itemsize, np.uint8)
        )
        taken = 0

        def take(got: int) -> None:
            nonlocal taken
            ready = max(0, got - _start(wire)) // wire.itemsize
            while ready - taken >= _PIECE or (got == incoming.nbytes and taken < ready):
                piece = slice(taken, min(taken + _PIECE, ready))
                self._accept(incoming, piece, into[piece], wire, combine)
                taken = piece.stop

        self._exchange(out.data, incoming.data, (lambda got: None) if whole else take)

    def _accept(
        self,
        incoming: npt.NDArray[Any],
        piece: slice,
        into: npt.NDArray[Any],
        wire: np.dtype[Any],
        combine: Callable[[npt.NDArray[Any], npt.NDArray[Any]], object] | None,
    ) -> None:
        if wire == np.float32 and combine is not None:
            combine(into, incoming.view(np.float32)[piece])
            return
        values = into if combine is None else self._scratch[: into.size]
        _unpack(incoming, values, wire, piece.start)
        if combine is not None:
            combine(into, values)

    def _exchange(self, out: memoryview, into: memoryview, take: Callable[[int], None]) -> None:
        sent = got = 0
        poll = select.poll()
        while sent < len(out) or got < len(into):
            before = sent + got
            if sent < len(out):
                sent += self._send(out[sent:])
            if got < len(into):
                got += self._receive(into[got : got + _BUFFER])
                take(got)
            if sent + got == before:
                self._wait(poll, sending=sent < len(out), receiving=got < len(into))

    def _send(self, data: memoryview) -> int:
        try:
            return self._to_next.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LostPeerError(f"the next replica is gone: {error.strerror}") from None

    def _receive(self, into: memoryview) -> int:
        try:
            got = self._from_previous.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LostPeerError(f"the previous replica is gone: {error.strerror}") from None
        if not got:
            raise LostPeerError("the previous replica is gone: it has closed the connection")
        return got

    def _wait(self, poll: select.poll, *, sending: bool, receiving: bool) -> None:
        to_next, from_previous = (self._to_next, select.POLLOUT), (self._from_previous, select.POLLIN)
        used = [to_next] * sending + [from_previous] * receiving
        for connection, event in used:
            poll.register(connection, event)
        began = time.monotonic()
        deadline = began + _PATIENCE_S
        while not poll.poll(_PATIENCE_S * 1000):
            if time.monotonic() >= deadline:
                self._check(began)
                deadline = time.monotonic() + _PATIENCE_S
        for connection, _ in used:
            poll.unregister(connection)


def _start(wire: np.dtype[Any]) -> int:
    """Bytes before the numbers of a part: those of float16 have the exponent of their scale there."""
    return _EXPONENT.size if wire == np.float16 else 0


def _packed(part: npt.NDArray[Any], wire: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns a float32 part as the bytes that travel."""
    # Types of ml_dtypes have no buffer format of their own.
    if wire != np.float16:
        return part.astype(wire, copy=False).view(np.uint8)
    largest = float(max(part.max(), -part.min())) if part.size else 0.0
    exponent = 0
    if 0 < largest < np.inf:
        mantissa, exponent = math.frexp(largest)
        # Rounded as it will be on the way, or a part that is sent on would get another exponent.
        exponent = _HALF_EXPONENT - exponent - (np.float16(mantissa) == 1)
    packed = np.empty(_EXPONENT.size + 2 * part.size, np.uint8)
    exponent = max(-_FINITE, min(_FINITE, exponent))
    _EXPONENT.pack_into(packed.data, 0, exponent)
    np.multiply(
        part, np.float32(2.0**exponent), out=packed[_EXPONENT.size :].view(np.float16), casting="same_kind"
    )
    return packed


def _unpack(packed: npt.NDArray[Any], into: npt.NDArray[Any], wire: np.dtype[Any], first: int = 0) -> None:
    """Writes the numbers that begin with the one of number `first` as float32."""
    begin = _start(wire) + first * wire.itemsize
    into[:] = packed[begin : begin + into.size * wire.itemsize].view(wire)
    if wire == np.float16:
        into *= np.float32(2.0 ** -_EXPONENT.unpack_from(packed.data)[0])


def make_ring(
    cluster: Cluster, total: Callable[[Sequence[float]], list[float]], check: Callable[[float], None]
) -> Ring | None:
    """Connects the processes that train in a ring, or in none (None) where one cannot reach the next.

    A collective: every process listens on a free port and tells it to the others, with a random number of
    which, and of the job's secret, a connection brings a proof. `total` sums numbers over the processes,
    `check` is the ring's.
    """
    names = list(cluster.addresses)[: cluster.num_workers]
    rank, size = names.index(cluster.name), len(names)
    with listen(cluster.own_host) as listener:
        own = (listener.getsockname()[1], secrets.randbits(53))  # which a float64 holds
        table = [0.0] * (2 * size)
        table[2 * rank : 2 * rank + 2] = own
        told = [int(value) for value in total(table)]
        following = (rank + 1) % size
        port, secret = told[2 * following : 2 * following + 2]
        host = cluster.addresses[names[following]].rpartition(":")[0].strip("[]")
        made: list[socket.socket] = []
        with contextlib.suppress(OSError):
            made.append(socket.create_connection((host, port), timeout=_TIMEOUT_S))
            made[0].sendall(_greeting(cluster, rank, secret))
            made.append(_accepted(listener, _greeting(cluster, (rank - 1) % size, own[1])))
    if total([len(made)])[0] < 2 * size:
        for connection in made:
            connection.close()
        return None
    to_next, from_previous = made
    return Ring(rank, size, to_next, from_previous, check)


def listen(host: str = "", port: int = 0, backlog: int | None = None) -> socket.socket:
    """Returns a socket that listens on a host's address, with SO_REUSEADDR only.

    "" is all interfaces, port 0 any free one.
    """
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=dual)


def _greeting(cluster: Cluster, rank: int, number: int) -> bytes:
    return cluster.proof(b"ring", _GREETING.pack(rank, number))


def _accepted(listener: socket.socket, greeting: bytes) -> socket.socket:
    """Returns the connection that begins with the greeting, in time; any other is closed."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        with contextlib.suppress(OSError):
            soon = min(deadline, time.monotonic() + _GREETING_S)
            if hmac.compare_digest(received(connection, len(greeting), soon) or b"", greeting):
                return connection
        connection.close()
