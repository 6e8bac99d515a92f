"""Sums of large arrays over the processes of a cluster, through plain TCP connections in a ring.

TensorFlow's own collective moves bytes between processes through gRPC, at about a quarter of the speed of a
socket, and pays with the very cores that train. Here each process sends to the next one and receives from
the one before: with N processes every process sends and receives 2 (N - 1) / N times the array, the least
that is possible (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009). Each part is added up in one place and in a fixed order, so that all processes get the same bits,
every time.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

# What is received is added up in pieces that stay in a core's own cache (256 KiB of float32).
_PIECE = 1 << 16
# Parts begin at a multiple of a cache line.
_ALIGN = 16
# Bytes that the kernel may hold for a connection: enough that neither side waits for the other's turn.
_BUFFER = 4 << 20
# Seconds without a byte until it is asked whether the others are still there.
_PATIENCE_S = 5.0

_HEADER = struct.Struct("!QQ")


class LostPeerError(ConnectionError):
    """A neighbour has ended, or does not send what it should."""


class Ring:
    """This process's place in the ring. All processes must make the same calls in the same order."""

    def __init__(
        self,
        rank: int,
        size: int,
        to_next: socket.socket,
        from_previous: socket.socket,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes over two connections.

        Args:
            rank: This process's number, 0..size-1.
            size: Processes in the ring, at least 2.
            to_next: To the process `rank + 1`.
            from_previous: From the process `rank - 1`.
            check: Called after some seconds of silence; raises when a peer is no longer there.
        """
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
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)

    def sum(self, values: Array, wire: Any = np.float32) -> None:
        """Replaces an array by its sum over all processes.

        Args:
            values: float32 (n,), contiguous; n is the same everywhere.
            wire: In which type the numbers travel: float32, which is exact, or a shorter float type. They are
                added up in float32 in any case.

        Raises:
            LostPeerError: When a neighbour has ended, or is at another call.
        """
        # What is not finite is the optimizer's affair.
        with self._lock, np.errstate(all="ignore"):
            self._meet(values.size)
            parts = self._parts(values)
            for step in range(self._size - 1):
                out = parts[(self._rank - step) % self._size]
                self._move(
                    out.astype(wire, copy=False), parts[(self._rank - step - 1) % self._size], add=True
                )
            own = parts[(self._rank + 1) % self._size]
            if wire != np.float32:
                own[:] = own.astype(wire)  # as the others will have it
            for step in range(self._size - 1):
                out, into = (parts[(self._rank - step - ahead) % self._size] for ahead in (-1, 0))
                self._move(out.astype(wire, copy=False), into, add=False)

    def close(self) -> None:
        """Ends the connections."""
        self._to_next.close()
        self._from_previous.close()

    def _parts(self, values: Array) -> list[Array]:
        step = -(-values.size // (self._size * _ALIGN)) * _ALIGN
        return [values[index * step : (index + 1) * step] for index in range(self._size)]

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

    def _move(self, out: Array, into: Array, *, add: bool) -> None:
        """Sends one part to the next process while it receives another one from the process before."""
        incoming = into if out.dtype == into.dtype and not add else np.empty(into.size, out.dtype)
        width, taken = incoming.itemsize, 0

        def take(got: int) -> None:
            nonlocal taken
            whole = got // width
            while whole - taken >= _PIECE or (got == incoming.nbytes and taken < whole):
                piece = slice(taken, min(taken + _PIECE, whole))
                self._accept(incoming[piece], into[piece], add=add)
                taken = piece.stop

        ignore = incoming is into
        self._exchange(_bytes(out), _bytes(incoming), (lambda got: None) if ignore else take)

    def _accept(self, piece: Array, into: Array, *, add: bool) -> None:
        if not add:
            into[:] = piece
        elif piece.dtype == into.dtype:
            np.add(into, piece, out=into)
        else:
            scratch = self._scratch[: piece.size]
            scratch[:] = piece
            np.add(into, scratch, out=into)

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
        if sending:
            poll.register(self._to_next, select.POLLOUT)
        if receiving:
            poll.register(self._from_previous, select.POLLIN)
        deadline = time.monotonic() + _PATIENCE_S
        while not poll.poll(_PATIENCE_S * 1000):
            if time.monotonic() >= deadline:
                self._check()
                deadline = time.monotonic() + _PATIENCE_S
        for connection, used in ((self._to_next, sending), (self._from_previous, receiving)):
            if used:
                poll.unregister(connection)


def _bytes(array: Array) -> memoryview:
    # Types of ml_dtypes have no buffer format of their own.
    return array.view(np.uint8).data
