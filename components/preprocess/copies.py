"""Copies of files that are far, which a run keeps on this machine's disk while it lasts.

A source may read its files more than once, and a writer reads them again record by record: from a bucket each
of that would be a request.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from shardline.trainer import files

#: Copies a file to a path of this disk.
Fetch = Callable[[str, str], None]

# Files that are fetched at the same time; of large ones ranges are, too.
_TOGETHER = 32

_directory: Path | None = None
_fetched: dict[str, Future[str]] = {}
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


@contextlib.contextmanager
def kept_in(directory: Path) -> Iterator[None]:
    """Has files that are far copied to a directory when they are opened, while the context lasts."""
    global _directory, _pool
    if _directory == directory:
        yield
        return
    with ThreadPoolExecutor(_TOGETHER, "copies") as pool:
        _directory, _pool = directory, pool
        try:
            yield
        finally:
            _directory = _pool = None
            _fetched.clear()
            pool.shutdown(cancel_futures=True)


def expect(paths: Iterable[str], fetch: Fetch) -> None:
    """Begins to copy files that will be opened, in this order; where no copies are kept, nothing happens."""
    for path in paths:
        _begin(path, fetch)


def find(path: str, fetch: Fetch) -> str:
    """Returns the path of the copy of a file, once it is whole; "" where no copies are kept."""
    copy = _begin(path, fetch)
    return copy.result() if copy else ""


def _begin(path: str, fetch: Fetch) -> Future[str] | None:
    if _pool is None or _directory is None:
        return None
    with _lock:
        if path not in _fetched:
            _fetched[path] = _pool.submit(_copied, path, _directory / name_of(path), fetch)
        return _fetched[path]


def name_of(path: str) -> str:
    """Returns the name of the copy of a file."""
    return xxhash.xxh3_128_hexdigest(path.encode("utf-8", "surrogateescape"))


def _copied(path: str, copy: Path, fetch: Fetch) -> str:
    if not copy.exists():
        copy.parent.mkdir(exist_ok=True)
        # Another process of this machine may be at it.
        temporary = files.temporary_name(copy)
        try:
            fetch(path, str(temporary))
            temporary.replace(copy)
        finally:
            temporary.unlink(missing_ok=True)
    return str(copy)
