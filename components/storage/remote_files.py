"""Reading of files: on this machine, in a bucket mounted under /gcs/, or in one that is not, gs://.

Files that cannot be found, opened or read raise a SourceError of one line. Remote files, behind a network,
are read in prefetched ranges, or from a copy that a run keeps on this machine's disk while it lasts.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from shardline.components.storage.bucket import parse_uri
from shardline.components.storage.prefetch import TruncatedError, ordered_map, with_retries
from shardline.trainer.base import files
from shardline.trainer.base.errors import ShardlineError, SourceError

#: Most characters of a line.
_LONGEST_LINE = 64 << 20

# Bytes of a range, ranges in flight for one file, and bytes of a file that a single stream copies.
_RANGE_BYTES, _RANGES, _PART_BYTES = 4 << 20, 6, 64 << 20

# Files copied at the same time, large ones in parallel ranges.
_CONCURRENT = 32


def resolve(path: str) -> str:
    """Returns the path to read: /gcs/bucket/x for gs://bucket/x where the bucket is mounted."""
    if not is_remote(path):
        if "://" in path:
            raise SourceError(
                f"cannot read {path!r}: the only URLs are gs://BUCKET/PATH; copy it into a bucket, or "
                "read it in a source class of your own"
            )
        return os.path.expanduser(path)
    bucket = "/".join(path.split("/", 3)[:3])
    return str(files.local_path(path)) if files.local_path(bucket).is_dir() else path


def is_remote(path: str) -> bool:
    """Returns whether a resolved path is an object, read by the API of Cloud Storage."""
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
        raise SourceError(f"cannot read {what}{path!r}: {reason(error)}") from None


def is_on_network(path: str) -> bool:
    """Returns whether a resolved path is a URL, or on a file system behind a network: a mounted bucket."""
    return is_remote(path) or files.is_mounted(path)


def open_read(path: str) -> BinaryIO:
    """Opens a file for reading; a local one without a buffer, as its readers request large blocks."""
    with as_source_error(path):
        if local := local_copy(path) if is_on_network(path) else path:
            return _open_local(local)
        return cast(BinaryIO, io.BufferedReader(RangeReader(path), _RANGE_BYTES))


def fetch(path: str, target: str) -> None:
    """Copies a remote file to this disk, parts of a large one in parallel."""
    source = RangeReader(path)
    with source, open(target, "wb") as file:

        def copy(start: int) -> int:
            at, end = start, min(start + _PART_BYTES, source.size)
            for block in source.parts(start, end):
                at += os.pwrite(file.fileno(), block, at)
            return at - start

        parts = range(0, source.size, _PART_BYTES)
        for copied in ordered_map(
            copy, parts, size=int, in_flight=_RANGES, buffer_bytes=_RANGES * _PART_BYTES
        ):
            if isinstance(copied, Exception):
                raise copied


def upload(source: Path, target: Path, before: Callable[[], None] = lambda: None) -> None:
    """Copies a file of this disk to a remote path, with retries; calls `before` before each attempt."""

    def write(_: Path) -> None:
        before()
        with source.open("rb") as file, target.open("wb") as copy:
            shutil.copyfileobj(file, copy, _RANGE_BYTES)
            copy.flush()
            os.fsync(copy.fileno())  # raises if the bucket refuses the file

    with_retries(write, source)


def read_bytes(path: str, generation: int = 0) -> bytes:
    """Returns the content of a file in one request; of an object, optionally of one generation."""
    if is_remote(path):
        bucket, name = parse_uri(path)
        return bucket.read(name, generation)
    with _open_local(path) as file:
        return file.read()


def _open_local(path: str) -> BinaryIO:
    # A pipe would block, and a device never end.
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise SourceError(f"cannot read {path!r}: it is not a file but a pipe, a socket or a device")
    return cast(BinaryIO, file)


class RangeReader(io.RawIOBase):
    """A remote file that is read in ranges; those after the current one are prefetched."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.size, self._changed = size_and_version(path)
        self._blocks: Iterator[bytes | Exception] = iter(())
        self._block = memoryview(b"")
        self._position = 0
        self._is_prefetching = False

    def parts(self, start: int, end: int) -> Iterator[bytes]:
        """Yields a part of the file; on a mount in one request, by one handle that reads sequentially."""
        if is_remote(self._path):
            for offset in range(start, end, _RANGE_BYTES):
                yield self._range(offset, min(offset + _RANGE_BYTES, end))
            return
        with _open_local(self._path) as file:
            if _size_and_mtime(file) != (self.size, self._changed):
                raise self._replaced()
            file.seek(start)
            while start < end:
                if not (block := file.read(min(_RANGE_BYTES, end - start))):
                    raise TruncatedError(self._path, start, end)
                yield block
                start += len(block)

    def _replaced(self) -> SourceError:
        return SourceError(
            f"{self._path!r} was replaced while it was read; run again when nothing writes to the source"
        )

    def readinto(self, buffer: Any) -> int:
        """Reads from the next block into a buffer."""
        if not self._block and self._position < self.size:
            if not self._is_prefetching:
                first, *rest = range(self._position, self.size, _RANGE_BYTES)
                # The first one alone: often only the beginning of a file is needed.
                others = ordered_map(self._range, rest, in_flight=_RANGES)
                self._blocks, self._is_prefetching = chain([with_retries(self._range, first)], others), True
            if isinstance(block := next(self._blocks), Exception):
                raise block
            self._block = memoryview(block)
        count = min(len(buffer), len(self._block))
        buffer[:count], self._block = self._block[:count], self._block[count:]
        self._position += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a position; if it is another one, prefetched ranges are discarded."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        if base + offset != self._position:
            self._position, self._block, self._is_prefetching = base + offset, memoryview(b""), False
        return self._position

    def tell(self) -> int:
        """Returns the position in bytes."""
        return self._position

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def _range(self, start: int, end: int = 0) -> bytes:
        end = end or min(start + _RANGE_BYTES, self.size)
        if not is_remote(self._path):
            return b"".join(self.parts(start, end))
        bucket, name = parse_uri(self._path)
        try:
            data = bucket.read(name, self._changed, start, end)
        except FileNotFoundError:
            raise self._replaced() from None
        if len(data) != end - start:
            raise TruncatedError(self._path, len(data), end - start)
        return data


def size_and_version(path: str) -> tuple[int, int]:
    """Returns the size of a file in bytes, and its time of change in ns, or an object's generation."""

    def ask(path: str) -> tuple[int, int]:
        if is_remote(path):
            bucket, name = parse_uri(path)
            return bucket.find(name)[1:]
        with _open_local(path) as file:
            return _size_and_mtime(file)

    with as_source_error(path):
        return with_retries(ask, path)


def _size_and_mtime(file: BinaryIO) -> tuple[int, int]:
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
    """Copies of remote files in a directory of this disk, each made once, some at the same time."""

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
                    fetch(path, str(temporary))
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
    """Copies remote files to a directory when they are opened, while the context lasts."""
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
    """Starts to copy files that will be opened, in this order; does nothing where no copies are kept."""
    if _copies:
        for path in paths:
            _copies.start(path)


def local_copy(path: str) -> str:
    """Returns the path of a file's copy, once it is complete; "" where no copies are kept."""
    return _copies.start(path).result() if _copies else ""
