"""Reads in flight: many at a time where each takes long, their results in the order of the questions.

A read of a bucket takes 20 to 50 ms, mounted or not, and what limits one after the other is nothing but that.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Reads at the same time: at 30 ms each, 4,000 a second.
IN_FLIGHT = 128
#: Bytes that are held at most, about, of results that nobody has taken.
ROOM = 32 << 20

# So many reads are sent before the size of any is known.
_FIRST = 16

_ATTEMPTS = 7
_FIRST_PAUSE_SECONDS = 0.2
_AGAIN = {
    errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNABORTED,
    errno.EPIPE, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EREMOTEIO,
}  # fmt: skip
# 401: a token that has just expired. Of a photo none of these says that it is bad.
_NO_TOKEN, _SERVER_ERROR = 401, 500
_PASSING = (_NO_TOKEN, 408, 429)
# Errors of connections, by the module of their class, and those of them that will not pass: a certificate.
_CLIENTS = ("aiohttp", "requests", "google")
_LOST = {
    *("ClientConnectionError", "ClientPayloadError"),
    *("ConnectionError", "Timeout", "ChunkedEncodingError", "TransportError"),
}
_UNTRUSTED = {"SSLError", "ClientSSLError", "CertificateError"}


class Tally:
    """A number that threads count up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0

    def add(self, number: int) -> None:
        """Counts up."""
        with self._lock:
            self._number += number

    def take(self) -> int:
        """Returns the number and starts again from 0."""
        with self._lock:
            number, self._number = self._number, 0
            return number


class Room:
    """Bytes that threads may hold together."""

    def __init__(self, size: int) -> None:
        self._free = self._size = size
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Takes so many of them while the context lasts, once they are free."""
        size = min(size, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


#: Reads and writes of this process that were tried again.
REPEATED = Tally()


class TruncatedError(OSError):
    """A read that brought less than there is."""

    def __init__(self, path: str, read: int, size: int) -> None:
        super().__init__(errno.EIO, f"{read:,} of {size:,} bytes were read", path)


def is_transient(error: BaseException) -> bool:
    """Returns whether the same request may succeed a moment later."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(error, "code", getattr(response, "status_code", None))
    if isinstance(status, int):
        passing = status in _PASSING or status >= _SERVER_ERROR
        return passing and not (status == _NO_TOKEN and "Anonymous caller" in str(error))
    kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith(_CLIENTS)}
    if kinds & _LOST:
        return not kinds & _UNTRUSTED
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _AGAIN
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    # What renews a token raises an error of its own from that of the connection.
    return bool(kinds and error.__cause__ and is_transient(error.__cause__))


def persistently(request: Callable[[Item], Result], item: Item) -> Result:
    """Returns what a request gives, sent again after errors that may pass, each time after a longer pause."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return request(item)
        except Exception as error:
            if not is_transient(error):
                raise
        REPEATED.add(1)
        # Not all at the same moment: that is what the bucket complains about.
        time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.5))
    return request(item)


def in_order(
    read: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    size: Callable[[Result], int] = len,  # type: ignore[assignment]
    in_flight: int = IN_FLIGHT,
    room: int = ROOM,
) -> Iterator[Result | Exception]:
    """Yields what `read` gives for each item, or the exception that it raises, in the order of the items.

    Items are taken as results are: at most so many ahead that `in_flight` threads have something to do, and
    that results have `room`, in bytes, as far as the `size` of those before tells.
    """
    crew = _Crew(read, in_flight)
    sent, window, mean = 0, min(_FIRST, 2 * in_flight), 0.0
    source = iter(items)
    try:
        for number in itertools.count():
            for item in itertools.islice(source, max(0, number + window - sent)):
                crew.send(sent, item)
                sent += 1
            if number == sent:
                return
            result = crew.result(number)
            if not isinstance(result, Exception):
                mean += (size(result) - mean) / 16 if mean else size(result)
                window = max(2, min(2 * in_flight, int(room / max(mean, 1))))
            yield result
    finally:
        crew.leave()


class _Crew(Generic[Item, Result]):
    """Threads that read, and what they have read; leaner than an executor, as there are millions of reads."""

    def __init__(self, read: Callable[[Item], Result], most: int) -> None:
        self._read = read
        self._most = most
        self._threads = 0
        self._tasks: SimpleQueue[tuple[int, Item] | None] = SimpleQueue()
        self._results: dict[int, Result | Exception] = {}
        self._wanted = -1
        self._gate = threading.Lock()
        self._gate.acquire()

    def send(self, number: int, item: Item) -> None:
        """Has an item read by a thread, a new one until there are enough."""
        self._tasks.put((number, item))
        if self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._work, daemon=True, name="ahead").start()

    def result(self, number: int) -> Result | Exception:
        """Returns the result of an item that was sent, once it is there."""
        self._wanted = number
        while number not in self._results:
            self._gate.acquire()
        return self._results.pop(number)

    def leave(self) -> None:
        """Has the threads end, each after what it is reading."""
        with contextlib.suppress(Empty):
            while True:
                self._tasks.get_nowait()
        for _ in range(self._threads):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            number, item = task
            try:
                result: Result | Exception = persistently(self._read, item)
            except Exception as error:
                result = error
            self._results[number] = result
            # It waits for one number at a time: nobody else need wake it.
            if number == self._wanted:
                with contextlib.suppress(RuntimeError):  # it is awake already
                    self._gate.release()
