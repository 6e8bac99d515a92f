"""Prefetching: many slow reads at the same time, their results in the order of the requests; and retries.

A read of a bucket takes 20 to 50 ms, which alone limits sequential reads.
"""

from __future__ import annotations

import errno
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from shardline.components.vertex.refusals import RefusalKind, refusal_kind

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Reads at the same time: at 30 ms each, 4,000 a second.
IN_FLIGHT = 128
#: Most bytes of results that wait to be consumed, about.
BUFFER_BYTES = 32 << 20
#: Seconds during which a request is retried.
RETRY_S = 20.0

# Reads that are sent before the size of any is known.
_INITIAL_WINDOW = 16


class TruncatedError(ConnectionError):
    """A read returned fewer bytes than requested."""

    def __init__(self, path: str, read: int, size: int) -> None:
        super().__init__(errno.EIO, f"{read:,} of {size:,} bytes were read", path)


def is_transient(error: BaseException) -> bool:
    """Returns whether the same request may succeed a moment later."""
    if "certificate verify failed" in str(error).lower():
        return False
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    kind = refusal_kind(error)
    # Renewing a token raises an error of its own, caused by that of the connection.
    cause = error.__cause__ if type(error).__module__.startswith("google.auth") else None
    return kind in (RefusalKind.BUSY, RefusalKind.LOST, RefusalKind.UNREACHED) or (
        cause is not None and is_transient(cause)
    )


def with_retries(request: Callable[[Item], Result], item: Item) -> Result:
    """Returns the result of a request, retried after transient errors with growing pauses."""
    # Imported late: it takes a tenth of a second to load.
    from google.api_core.exceptions import RetryError
    from google.api_core.retry import Retry

    try:
        return Retry(is_transient, initial=0.5, maximum=8.0, timeout=RETRY_S)(request)(item)
    except RetryError as over:
        raise over.cause from over.cause.__cause__


def ordered_map(
    read: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    size: Callable[[Result], int] = len,  # type: ignore[assignment]
    in_flight: int = IN_FLIGHT,
    buffer_bytes: int = BUFFER_BYTES,
) -> Iterator[Result | Exception]:
    """Yields the result of `read` for each item, or the exception that it raises, in the order of the items.

    Reads ahead as far as `in_flight` threads need, and as the results fit into `buffer_bytes`, estimated from
    the `size` of earlier ones.
    """
    source, waiting = iter(items), deque[Future[Result]]()
    window, mean = min(_INITIAL_WINDOW, 2 * in_flight), 0.0
    pool = ThreadPoolExecutor(in_flight, "prefetch")
    try:
        while True:
            for item in itertools.islice(source, max(0, window - len(waiting))):
                waiting.append(pool.submit(with_retries, read, item))
            if not waiting:
                return
            first = waiting.popleft()
            error = first.exception()
            if isinstance(error, Exception):
                yield error
                continue
            result = first.result()
            mean += (size(result) - mean) / 16 if mean else size(result)
            window = max(2, min(2 * in_flight, int(buffer_bytes / max(mean, 1))))
            yield result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
