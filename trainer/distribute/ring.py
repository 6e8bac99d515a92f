"""Ring: sums of large arrays over the processes of a cluster, and rows of all, through plain sockets.

TensorFlow's own collective moves bytes through gRPC, at about a quarter of the speed of a socket, and uses
the cores that train. Here each process sends to the next one and receives from the previous one:
2 (N - 1) / N times the array with N processes, the least possible (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009). Each part is added up by one process in a fixed
order, so all processes get the same bits, every time.
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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.trainer.cluster import ClusterConfig

# Received data is added up in pieces that fit a core's own cache (256 KiB of float32).
_PIECE = 1 << 16
# Parts begin at a multiple of a cache line, in numbers.
_ALIGN = 16
# Most arrays sent in one call: the kernel takes 1,024.
_MAX_BUFFERS = 64
# An abstract name, which needs no file and ends with its socket (unix(7)).
_UNIX_NAME = b"\0shardline-%d"
# Send buffer of a Unix socket in bytes, which the kernel does not tune; it may allow fewer.
_UNIX_BUFFER = 1 << 20
# Seconds without a byte until the peers are checked, and until a connection attempt counts as failed.
_SILENCE_S, _TIMEOUT_S = 2.0, 15.0
# Seconds for a new connection to send its greeting.
_GREETING_S = 2.0

_HEADER = struct.Struct("!QQ")  # before each array: number of the call, size of the array
_GREETING = struct.Struct("!QQ")  # signed at the start of a connection: rank, random number of the receiver

Numbers = npt.NDArray[Any]
#: Arrays, each with its offset in a longer one, in ascending order.
Spans = Sequence[tuple[int, Numbers]]


class LostPeerError(ConnectionError):
    """A neighbour has ended, or has sent unexpected data."""


class Ring:
    """One process's end of the ring. All processes must make the same calls in the same order.

    It takes over connections to process `rank + 1` and from `rank - 1` of `size`, at least 2. `check` is
    called every few seconds of silence with the time (`time.monotonic()`) at which the wait began, and raises
    when a peer is lost.
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
                # Its buffers are not set, which would end the kernel's tuning of them.

    def sum(self, values: Numbers, own: Spans = ()) -> None:
        """Replaces a contiguous float32 (n,) by its sum over all processes; n is the same everywhere.

        Numbers in `own` replace those at the same offset of `values`.
        """
        size = -(-values.size // (self._size * _ALIGN)) * _ALIGN
        parts = [values[index * size : (index + 1) * size] for index in range(self._size)]

        def add(begin: int, first: int, received: Numbers) -> None:
            at = begin + first
            for mine in _slices(values, own, at, received.size):
                here, at = at - begin - first, at + mine.size
                np.add(mine, received[here : here + mine.size], out=values[at - mine.size : at])

        # The optimizer handles values that are not finite.
        with self._lock, np.errstate(all="ignore"):
            self._calls += 1
            header = _HEADER.pack(self._calls, values.size)
            for step in range(self._size - 1):
                out, into = ((self._rank - step - behind) % self._size for behind in (0, 1))
                sent = [parts[out]] if step else _slices(values, own, out * size, parts[out].size)
                incoming = self._incoming(parts[into], functools.partial(add, into * size))
                self._exchange(header, sent, itertools.chain(self._check_header(header), incoming))
                header = b""
            for step in range(self._size - 1):
                out, into = ((self._rank - step - ahead) % self._size for ahead in (-1, 0))
                self._exchange(b"", [parts[out]], self._incoming(parts[into]))

    def gather(self, *arrays: Numbers) -> list[Numbers]:
        """Returns each array with the rows of all processes, by rank; the numbers of rows may differ.

        Arrays are contiguous, and of the same types and shapes but for the rows on all processes.
        """
        with self._lock:
            self._calls += 1
            rows = np.zeros((self._size, len(arrays)), np.int64)
            rows[self._rank] = [len(array) for array in arrays]
            self._forward(list(rows), _HEADER.pack(self._calls, rows.size))
            gathered = []
            for array, counts in zip(arrays, rows.T, strict=True):
                whole = np.empty((int(counts.sum()), *array.shape[1:]), array.dtype)
                parts = np.split(whole, counts.cumsum()[:-1])
                parts[self._rank][...] = array
                self._forward(parts)
                gathered.append(whole)
            return gathered

    def _forward(self, parts: Sequence[Numbers], header: bytes = b"") -> None:
        """Sends this process's part to all others, and fills theirs in."""
        flat = [part.reshape(-1).view(np.uint8) for part in parts]
        for step in range(self._size - 1):
            out, into = ((self._rank - step - behind) % self._size for behind in (0, 1))
            incoming = itertools.chain(self._check_header(header), self._incoming(flat[into]))
            self._exchange(header, [flat[out]], incoming)
            header = b""

    def close(self) -> None:
        """Closes the connections."""
        self._to_next.close()
        self._from_previous.close()

    __del__ = close

    def _check_header(self, own: bytes) -> Iterator[memoryview]:
        """Receives the previous process's header and checks that it is at the same call."""
        theirs = bytearray(len(own))
        if own:
            yield memoryview(theirs)
        if theirs != own:
            raise LostPeerError(
                f"the replicas are out of step: {_HEADER.unpack(own)} here, {_HEADER.unpack(theirs)} there "
                "(calls, numbers)"
            )

    def _incoming(
        self, part: Numbers, consume: Callable[[int, Numbers], None] | None = None
    ) -> Iterator[memoryview]:
        """Yields buffers to receive a part into, piece by piece, the next when one has been filled.

        `consume` gets the offset and the numbers of each piece; without it they are written into the part.
        """
        for first in range(0, part.size, _PIECE):
            into = part[first : first + _PIECE]
            values = self._scratch[: into.size] if consume else into
            yield values.view(np.uint8).data
            if consume:
                consume(first, values)

    def _exchange(self, header: bytes, out: Sequence[Numbers], incoming: Iterator[memoryview]) -> None:
        """Sends a header and arrays to the next process while it fills the buffers of `incoming`."""
        unsent = [memoryview(header)] * bool(header) + [part.view(np.uint8).data for part in out if part.size]
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
        """Sends as much as the kernel takes, removes it from the list, and returns its size in bytes."""
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
    """Returns `count` numbers from offset `first` as consecutive arrays of `own`, else of `values`."""
    slices, end = [], first + count
    for start, array in own:
        begin, stop = max(first, start), min(end, start + array.size)
        if begin < stop:
            slices += [values[first:begin], array[begin - start : stop - start]]
            first = stop
    return [part for part in (*slices, values[first:end]) if part.size]


def make_ring(
    cluster: ClusterConfig,
    total: Callable[[Sequence[float]], list[float]],
    check: Callable[[float], None],
    *,
    unix: bool = False,
) -> Ring | None:
    """Connects the training processes in a ring; None when one cannot reach the next. A collective.

    Every process listens on a free port and announces it with a random number, which a connection sends back
    signed with the job's secret. `total` sums numbers over the processes, `check` is the ring's. With `unix`,
    for processes of one machine, the ports are numbers of Unix sockets.
    """
    names = list(cluster.addresses)[: cluster.num_workers]
    rank, size = names.index(cluster.name), len(names)
    number, nonce = secrets.randbits(53), secrets.randbits(53)  # a float64 holds 53 bits
    with _unix_socket(number, listens=True) if unix else listen(cluster.own_host) as listener:
        own = (number if unix else listener.getsockname()[1], nonce)
        table = [0.0] * (2 * size)
        table[2 * rank : 2 * rank + 2] = own
        announced = [int(value) for value in total(table)]
        following = (rank + 1) % size
        port, next_nonce = announced[2 * following : 2 * following + 2]
        host = cluster.addresses[names[following]].rpartition(":")[0].strip("[]")
        connections: list[socket.socket] = []
        with contextlib.suppress(OSError):
            connections.append(
                _unix_socket(port) if unix else socket.create_connection((host, port), _TIMEOUT_S)
            )
            connections[0].sendall(_greeting(cluster, rank, next_nonce))
            connections.append(_accept(listener, _greeting(cluster, (rank - 1) % size, nonce)))
    if total([len(connections)])[0] < 2 * size:
        for connection in connections:
            connection.close()
        return None
    to_next, from_previous = connections
    return Ring(rank, size, to_next, from_previous, check)


def _unix_socket(number: int, *, listens: bool = False) -> socket.socket:
    unix = socket.socket(socket.AF_UNIX)
    if listens:
        unix.bind(_UNIX_NAME % number)
        unix.listen()
    else:
        unix.settimeout(_TIMEOUT_S)
        unix.connect(_UNIX_NAME % number)
    return unix


def listen(host: str = "", port: int = 0, backlog: int | None = None) -> socket.socket:
    """Returns a listening socket; host "" is all interfaces, port 0 any free one. SO_REUSEPORT is not set."""
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=dual)


def _greeting(cluster: ClusterConfig, rank: int, number: int) -> bytes:
    return cluster.sign(b"ring", _GREETING.pack(rank, number))


def _accept(listener: socket.socket, greeting: bytes) -> socket.socket:
    """Returns the first connection that sends the greeting in time, and closes any other."""
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
    """Returns up to `most` bytes, fewer if the connection ends; None when they do not begin as expected."""
    data = b""
    while len(data) < most:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        if not (more := connection.recv(most - len(data))):
            break
        data += more
        if data[: len(beginning)] != beginning[: len(data)]:
            return None
    return data
