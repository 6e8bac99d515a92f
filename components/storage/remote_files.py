"""Reading of files: on this machine, or in a bucket, gs://BUCKET/PATH or /gcs/BUCKET/PATH.

Files that cannot be found, opened or read raise a SourceError of one line. Objects are read in order, or from
a copy that a run keeps on this machine's disk while it lasts.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from shardline.components.storage.bucket import parse_uri, with_retries
from shardline.components.vertex.refusals import RefusalKind, refusal_kind
from shardline.trainer.base import files
from shardline.trainer.base.errors import RunError, ShardlineError, SourceError

#: Most characters of a line.
_LONGEST_LINE = 64 << 20

# Objects that are copied at the same time.
_CONCURRENT = 32


def resolve(path: str) -> str:
    """Returns the path to read: gs://BUCKET/x for /gcs/BUCKET/x."""
    if path.startswith(("gs://", "/gcs/")):
        return files.bucket_uri(path) or str(files.local_path(path))
    if "://" in path:
        raise SourceError(
            f"cannot read {path!r}: the only URLs are gs://BUCKET/PATH; copy it into a bucket, or "
            "read it in a source class of your own"
        )
    return os.path.expanduser(path)


def is_remote(path: str) -> bool:
    """Returns whether a resolved path is an object of a bucket."""
    return path.startswith("gs://")


@contextlib.contextmanager
def as_source_error(path: str, what: str = "") -> Iterator[None]:
    """Turns errors of reading a file into a SourceError; for a bucket, any exception (HTTP, credentials)."""
    try:
        yield
    except ShardlineError:
        raise
    except Exception as error:
        if not isinstance(error, OSError | ValueError) and not is_remote(path):
            raise
        why = reason(error)
        if is_remote(path) and refusal_kind(error) is RefusalKind.MISSING:  # in the generation it had
            why = "it was replaced while it was read; run again when nothing writes to the source"
        unread = files.cannot_read_now(error) and not is_remote(path)
        kind = RunError if unread else SourceError
        raise kind(f"cannot read {what}{path!r}: {why}") from None


def open_read(path: str) -> BinaryIO:
    """Opens a file for reading; a local one without a buffer, as its readers request large blocks."""
    path = resolve(path)
    with as_source_error(path):
        if not is_remote(path):
            return _open_local(path)
        if copy := local_copy(path):
            return _open_local(copy)
        bucket, name = parse_uri(path)
        return with_retries(bucket.open, name)


def _open_local(path: str) -> BinaryIO:
    # A pipe would block, and a device never end.
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise SourceError(f"cannot read {path!r}: it is not a file but a pipe, a socket or a device")
    return cast(BinaryIO, file)


def size_and_version(path: str) -> tuple[int, int]:
    """Returns the size of a file in bytes, and its time of change in ns, or an object's generation."""
    with as_source_error(path):
        if is_remote(path):
            bucket, name = parse_uri(path)
            return with_retries(bucket.find, name)[1:]
        with _open_local(path) as file:
            status = os.fstat(file.fileno())
            return status.st_size, status.st_mtime_ns


def as_text(file: Any) -> TextIO:
    """Reads an open file as UTF-8, with its line ends; other bytes become surrogates, as in file names."""
    # Spreadsheets write a byte-order mark.
    return io.TextIOWrapper(io.BufferedReader(file), "utf-8-sig", "surrogateescape", newline="")


def lines(text: TextIO, path: str) -> Iterator[str]:
    """Yields the lines of a text file; SourceError for one that is too long."""
    for number, line in enumerate(iter(lambda: text.readline(_LONGEST_LINE + 1), ""), start=1):
        if len(line) > _LONGEST_LINE:
            raise SourceError(
                f"{path!r}, row {number} has more than {_LONGEST_LINE >> 20} MiB; a row is one line"
            )
        yield line


def reason(error: BaseException) -> str:
    """Returns the message of the operating system, or the first line of another error's."""
    message = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(message).strip().partition("\n")[0]


class _LocalCopies:
    """Copies of objects in a directory of this disk, each made once, some at the same time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pool = ThreadPoolExecutor(_CONCURRENT, "copies")
        self._started: dict[str, Future[str]] = {}
        self._lock = threading.Lock()

    def start(self, path: str) -> Future[str]:
        """Starts to copy a file unless that was done before; the result is the path of the copy."""

        def copy() -> str:
            copy = self.directory / hashlib.sha256(os.fsencode(path)).hexdigest()
            if not copy.exists():
                copy.parent.mkdir(exist_ok=True)
                temporary = files.temporary_name(copy)  # another process of this machine may be copying it
                try:
                    bucket, name = parse_uri(path)
                    bucket.download(name, temporary)
                    temporary.replace(copy)
                finally:
                    temporary.unlink(missing_ok=True)
            return str(copy)

        with self._lock:
            if path not in self._started:
                self._started[path] = self.pool.submit(copy)
            return self._started[path]


_copies: _LocalCopies | None = None


@contextlib.contextmanager
def local_copies(directory: Path) -> Iterator[None]:
    """Copies objects to a directory when they are opened, while the context lasts."""
    global _copies
    if _copies and _copies.directory == directory:
        yield
        return
    _copies = made = _LocalCopies(directory)
    try:
        yield
    finally:
        _copies = None
        made.pool.shutdown(cancel_futures=True)


def prefetch_copies(paths: Iterable[str]) -> None:
    """Starts to copy the objects among files that will be opened, in this order, where copies are kept."""
    if _copies:
        for path in filter(is_remote, paths):
            _copies.start(path)


def local_copy(path: str) -> str:
    """Returns the path of an object's copy, once it is complete; "" where no copies are kept."""
    return _copies.start(path).result() if _copies else ""
