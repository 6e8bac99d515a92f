"""Ring all-reduce: sums of large arrays over the processes of a cluster, through plain sockets.

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
import itertools
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.trainer.cluster.cluster import ClusterConfig

# What is received is added up in pieces that stay in a core's own cache (256 KiB of float32).
_PIECE = 1 << 16
# Parts begin at a multiple of a cache line.
_ALIGN = 16
# Arrays that are sent in one call, at most: the kernel takes 1,024.
_MAX_BUFFERS = 64
# A name without a file, which ends with the socket that has it (unix(7), abstract).
_UNIX_NAME = b"\0shardline-%d"
# Bytes that a Unix socket, whose buffer nobody tunes, holds on their way; the kernel takes as many as it may.
_UNIX_BUFFER = 1 << 20
# Seconds without a byte until it is asked whether the others are still there, and until a connection that
# cannot be made counts as forbidden.
_SILENCE_S, _TIMEOUT_S = 5.0, 15.0
# Seconds for a connection that was made to bring its greeting, which is sent at once.
_GREETING_S = 2.0

_HEADER = struct.Struct("!QQ")  # before each array: number of the call, size of the array
_GREETING = struct.Struct("!QQ")  # what is proven at the start of a connection: rank, number of the receiver

Numbers = npt.NDArray[Any]
#: Arrays, each with the place of its first number in a longer one, in ascending order.
Spans = Sequence[tuple[int, Numbers]]


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
        self._rank, self._size = rank, size
        self._to_next, self._from_previous = to_next, from_previous
        self._check, self._calls, self._lock = check, 0, threading.Lock()
        self._scratch = np.empty(_PIECE, np.float32)
        for connection in (to_next, from_previous):
            connection.setblocking(False)
            if connection.family == socket.AF_UNIX:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # Its buffers stay as they are: once set, the kernel tunes them no more.

    def sum(self, values: Numbers, wire: Any = np.float32, own: Spans = ()) -> None:
        """Replaces a contiguous float32 (n,) by its sum over all processes; n is the same everywhere.

        `wire` is the type in which the numbers travel: float32, which is exact, or bfloat16; they are added
        up in float32 in any case. What `own` has is taken from there, and not from `values`.
        """
        wire = np.dtype(wire)
        exact, size = wire == np.float32, -(-values.size // (self._size * _ALIGN)) * _ALIGN
        parts = [values[index * size : (index + 1) * size] for index in range(self._size)]

        def add(begin: int, first: int, come: Numbers) -> None:
            at = begin + first
            for mine in _slices(values, own, at, come.size):
                here, at = at - begin - first, at + mine.size
                np.add(mine, come[here : here + mine.size], out=values[at - mine.size : at])

        # What is not finite is the optimizer's affair.
        with self._lock, np.errstate(all="ignore"):
            self._calls += 1
            header = _HEADER.pack(self._calls, values.size)
            packed, other = (np.empty(0 if exact else parts[0].size, wire) for _ in range(2))
            for step in range(self._size - 1):
                out, into = ((self._rank - step - behind) % self._size for behind in (0, 1))
                sent = [parts[out]] if step else _slices(values, own, out * size, parts[out].size)
                if not exact:
                    sent = [
                        np.concatenate([values[:0], *sent], out=packed[: parts[out].size], casting="unsafe")
                    ]
                take = functools.partial(add, into * size)
                incoming = self._incoming(parts[into], other, take)
                self._exchange(header, sent, itertools.chain(self._met(header), incoming))
                header = b""
            done = parts[(self._rank + 1) % self._size]
            if not exact:
                packed[: done.size] = done
                done[:] = packed[: done.size]  # as the others will have it
            for step in range(self._size - 1):
                out, into = ((self._rank - step - ahead) % self._size for ahead in (-1, 0))
                # What has come travels on as it is.
                sent = [parts[out] if exact else packed[: parts[out].size]]
                self._exchange(b"", sent, self._incoming(parts[into], other))
                packed, other = other, packed

    def close(self) -> None:
        """Ends the connections."""
        self._to_next.close()
        self._from_previous.close()

    def _met(self, own: bytes) -> Iterator[memoryview]:
        """Takes the header of the process before this one, and makes sure that it is at the same call."""
        theirs = bytearray(len(own))
        if own:
            yield memoryview(theirs)
        if theirs != own:
            raise LostPeerError(
                f"the replicas are out of step: {_HEADER.unpack(own)} here, {_HEADER.unpack(theirs)} there "
                "(calls, numbers)"
            )

    def _incoming(
        self, part: Numbers, packed: Numbers, take: Callable[[int, Numbers], None] | None = None
    ) -> Iterator[memoryview]:
        """Gives room for a part as it travels, piece by piece, each when the one before has come.

        `packed`, if it is not empty, is room for numbers of a shorter type. `take` gets the place of a
        piece's first number and its numbers; without it they replace the part's.
        """
        for first in range(0, part.size, _PIECE):
            into = part[first : first + _PIECE]
            values = self._scratch[: into.size] if take else into
            come = packed[first : first + into.size] if packed.size else values
            yield come.view(np.uint8).data
            if come is not values:
                values[:] = come
            if take:
                take(first, values)

    def _exchange(self, header: bytes, out: Sequence[Numbers], incoming: Iterator[memoryview]) -> None:
        """Sends a header and arrays to the next process while it fills what `incoming` gives."""
        unsent = [memoryview(header)] * bool(header) + [one.view(np.uint8).data for one in out if one.size]
        into = next(incoming, None)
        poll = select.poll()
        while unsent or into:
            sent = self._send(unsent) if unsent else 0
            got = self._receive(into) if into else 0
            if into and got:
                into = into[got:] or next(incoming, None)
            if not sent + got:
                self._wait(poll, sending=bool(unsent), receiving=bool(into))

    def _send(self, unsent: list[memoryview]) -> int:
        """Sends what the kernel takes, of which nothing is left in the list."""
        try:
            sent = self._to_next.sendmsg(unsent[:_MAX_BUFFERS])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LostPeerError(f"the next replica is gone: {error.strerror}") from None
        left = sent
        while unsent and left >= len(unsent[0]):
            left -= len(unsent.pop(0))
        if left:
            unsent[0] = unsent[0][left:]
        return sent

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
        deadline = began + _SILENCE_S
        while not poll.poll(_SILENCE_S * 1000):
            if time.monotonic() >= deadline:
                self._check(began)
                deadline = time.monotonic() + _SILENCE_S
        for connection, _ in used:
            poll.unregister(connection)


def _slices(values: Numbers, own: Spans, first: int, count: int) -> list[Numbers]:
    """Returns, as arrays one after the other, some of `values`, or what `own` has in their place."""
    found, end = [], first + count
    for start, array in own:
        begin, stop = max(first, start), min(end, start + array.size)
        if begin < stop:
            found += [values[first:begin], array[begin - start : stop - start]]
            first = stop
    return [one for one in (*found, values[first:end]) if one.size]


def on_one_machine(cluster: ClusterConfig) -> bool:
    """Whether all processes can meet at Unix sockets without a file, which Linux alone has."""
    return sys.platform == "linux" and bool(cluster.own_host)


def make_ring(
    cluster: ClusterConfig,
    total: Callable[[Sequence[float]], list[float]],
    check: Callable[[float], None],
    *,
    unix: bool = False,
) -> Ring | None:
    """Connects the processes that train in a ring, or in none (None) where one cannot reach the next.

    A collective: every process listens on a free port and tells it to the others, with a random number of
    which, and of the job's secret, a connection brings a proof. `total` sums numbers over the processes,
    `check` is the ring's. With `unix`, for processes `on_one_machine`, numbers of Unix sockets are its ports.
    """
    names = list(cluster.addresses)[: cluster.num_workers]
    rank, size = names.index(cluster.name), len(names)
    number, proof = secrets.randbits(53), secrets.randbits(53)  # which a float64 holds
    with _unix_socket(number, listens=True) if unix else listen(cluster.own_host) as listener:
        own = (number if unix else listener.getsockname()[1], proof)
        table = [0.0] * (2 * size)
        table[2 * rank : 2 * rank + 2] = own
        told = [int(value) for value in total(table)]
        following = (rank + 1) % size
        port, secret = told[2 * following : 2 * following + 2]
        host = cluster.addresses[names[following]].rpartition(":")[0].strip("[]")
        made: list[socket.socket] = []
        with contextlib.suppress(OSError):
            made.append(_unix_socket(port) if unix else socket.create_connection((host, port), _TIMEOUT_S))
            made[0].sendall(_greeting(cluster, rank, secret))
            made.append(_accept(listener, _greeting(cluster, (rank - 1) % size, proof)))
    if total([len(made)])[0] < 2 * size:
        for connection in made:
            connection.close()
        return None
    to_next, from_previous = made
    return Ring(rank, size, to_next, from_previous, check)


def _unix_socket(number: int, *, listens: bool = False) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    if listens:
        found.bind(_UNIX_NAME % number)
        found.listen()
    else:
        found.settimeout(_TIMEOUT_S)
        found.connect(_UNIX_NAME % number)
    return found


def listen(host: str = "", port: int = 0, backlog: int | None = None) -> socket.socket:
    """Returns a socket that listens on a host's address, with SO_REUSEADDR only.

    "" is all interfaces, port 0 any free one.
    """
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=dual)


def _greeting(cluster: ClusterConfig, rank: int, number: int) -> bytes:
    return cluster.sign(b"ring", _GREETING.pack(rank, number))


def _accept(listener: socket.socket, greeting: bytes) -> socket.socket:
    """Returns the connection that begins with the greeting, in time; any other is closed."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        with contextlib.suppress(OSError):
            soon = min(deadline, time.monotonic() + _GREETING_S)
            if hmac.compare_digest(receive(connection, len(greeting), soon) or b"", greeting):
                return connection
        connection.close()


def receive(connection: socket.socket, most: int, deadline: float, beginning: bytes = b"") -> bytes | None:
    """Returns what comes until the connection ends or there is enough; None when it begins otherwise."""
    found = b""
    while len(found) < most:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        if not (more := connection.recv(most - len(found))):
            break
        found += more
        if found[: len(beginning)] != beginning[: len(found)]:
            return None
    return found
