"""Files of a source on this machine, or in a bucket, gs://BUCKET/PATH or /gcs/BUCKET/PATH: found and read.

Hidden files are not listed, and the order is that of the bytes of the whole names. Files that cannot be
found, opened or read raise a SourceError of one line. Objects are read in order, or from a copy that a run
keeps on this machine's disk while it lasts.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import hashlib
import io
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, cast

from shardline.components.storage.storage import File, Storage, is_visible, with_stat
from shardline.components.text import enumerate_names, reason
from shardline.components.vertex import RefusalKind, is_transient, refusal_kind, with_retries
from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import RunError, ShardlineError, SourceError

_WILDCARD = re.compile(r"[*?[]")
# Alternative names, {2026-11-01,2026-11-02}.
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")

# Objects that are copied at the same time.
_CONCURRENT = 32


def resolve(path: str) -> str:
    """Returns the path to read: gs://BUCKET/x for /gcs/BUCKET/x."""
    if path.startswith(files.BUCKET_PREFIXES):
        return files.bucket_uri(path) or str(files.local_path(path))
    if "://" in path:
        raise SourceError(
            f"cannot read {path!r}: the only URLs are gs://BUCKET/PATH; copy it into a bucket, or "
            "read it in a source class of your own"
        )
    return os.path.expanduser(path)


@contextlib.contextmanager
def as_source_error(path: str, what: str = "") -> Iterator[None]:
    """Turns errors of reading a file into a SourceError; for a bucket, any exception (HTTP, credentials).

    One about a file below the directory `path` names that file.
    """
    is_remote = bool(files.bucket_uri(path))
    try:
        yield
    except ShardlineError:
        raise
    except Exception as error:
        if not isinstance(error, OSError | ValueError) and not is_remote:
            raise
        why, name = reason(error), f"{what}{path!r}"
        if is_remote and refusal_kind(error) is RefusalKind.MISSING:  # in the generation it had
            why = "it was replaced while it was read; run again when nothing writes to the source"
        elif (inner := str(getattr(error, "filename", ""))) != path and inner.startswith(f"{path}/"):
            name = repr(inner)
        kind = RunError if files.cannot_read_now(error) and not is_remote else SourceError
        raise kind(f"cannot read {name}: {why}") from None


def _split(path: str) -> tuple[Storage, str]:
    """Returns the bucket of an object, and its name in it."""
    bucket, _, name = path.removeprefix("gs://").partition("/")
    return Storage(f"gs://{bucket}"), name


def open_read(path: str) -> BinaryIO:
    """Opens a file for reading; a local one without a buffer, as its readers request large blocks."""
    path = resolve(path)
    with as_source_error(path):
        if not files.bucket_uri(path):
            return _open_local(path)
        if copy := copies.path(path):
            return _open_local(copy)
        bucket, name = _split(path)
        return with_retries(bucket.open, name)


def _open_local(path: str) -> BinaryIO:
    # A pipe would block, and a device never end.
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise SourceError(f"cannot read {path!r}: it is not a file but a pipe, a socket or a device")
    return cast(BinaryIO, file)


def read_object(path: str, size: int = 0, generation: int = 0) -> bytes:
    """Returns the content of an object as stored, of a `generation` and of at least `size` bytes if not 0.

    Raises FileNotFoundError where there is none, SourceError where the bucket does not answer, and otherwise
    the errors of Google's client.
    """
    bucket, name = _split(path)

    def read(name: str) -> bytes:
        data = bucket.read_bytes(name, generation)
        if len(data) < size:
            raise ConnectionError(errno.EIO, f"{len(data):,} of {size:,} bytes were read", path)
        return data

    try:
        return with_retries(read, name)
    except Exception as error:
        if not (is_transient(error) or isinstance(error, ConnectionError)):
            raise
        why = f"after several tries: {reason(error)}; run again to continue from there"
        raise SourceError(f"cannot read {path!r} {why}") from None


def size_and_version(path: str) -> tuple[int, int]:
    """Returns the size of a file in bytes, and its time of change in ns, or an object's generation."""
    with as_source_error(path):
        if files.bucket_uri(path):
            bucket, name = _split(path)
            found = with_retries(bucket.find, name)
            return found.size, int(found.version)
        with _open_local(path) as file:
            status = os.fstat(file.fileno())
            return status.st_size, status.st_mtime_ns


class LocalCopies:
    """Copies of objects in a directory of this disk, each made once, some at the same time."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    @contextlib.contextmanager
    def kept_in(self, directory: Path) -> Iterator[None]:
        """Copies objects to a directory when they are opened, while the context lasts."""
        if self._directory == directory:
            yield
            return
        pool = ThreadPoolExecutor(_CONCURRENT, "copies")
        self._directory = directory
        self._start = functools.cache(lambda path: pool.submit(_copy, directory, path))
        try:
            yield
        finally:
            self._directory = None
            pool.shutdown(cancel_futures=True)

    def prefetch(self, paths: Iterable[str]) -> None:
        """Starts to copy the objects among files that will be opened in this order, where copies are kept."""
        for path in filter(files.bucket_uri, paths if self._directory else ()):
            self._start(path)

    def path(self, path: str) -> str:
        """Returns the path of an object's copy, once it is complete; "" where no copies are kept."""
        return self._start(path).result() if self._directory else ""


def _copy(directory: Path, path: str) -> str:
    copy = directory / hashlib.sha256(os.fsencode(path)).hexdigest()
    if not copy.exists():
        directory.mkdir(exist_ok=True)
        bucket, name = _split(path)
        with files.replacing(copy) as temporary:  # another process may be copying it
            bucket.download(name, temporary)
    return str(copy)


copies = LocalCopies()


def files_below(directory: str) -> Iterator[File]:
    """Yields all files below a directory that are not hidden; SourceError where there is none."""
    root, is_empty = resolve(directory), True
    with as_source_error(root, "the directory "):
        for file in Storage(root).files():
            yield file
            is_empty = False
    if is_empty:
        raise SourceError(f"cannot read the directory {directory!r}: there is no file in it")


def match_files(pattern: str) -> Iterator[File]:
    """Yields the files that match a pattern with *, ?, [], ** and {a,b}; SourceError where none does.

    Some of the names in braces, such as days, may match nothing, which is reported.
    """
    if not (found := _match_alternatives(pattern)):
        raise SourceError(f"no file matches {resolve(pattern)!r}")
    return itertools.chain.from_iterable(found)


def _match_alternatives(pattern: str) -> list[Iterator[File]]:
    if not (braces := _ALTERNATIVES.search(pattern)):
        pattern = resolve(pattern)
        matching = _match_objects(pattern) if files.bucket_uri(pattern) else _match_paths(pattern)
        return [itertools.chain([first], matching)] if (first := next(matching, None)) else []
    names, start, end = braces[1].split(","), pattern[: braces.start()], pattern[braces.end() :]
    found = {name: _match_alternatives(start + name + end) for name in names}
    absent = [name for name, files_of_name in found.items() if not files_of_name]
    if 0 < len(absent) < len(found):
        shares = f"{len(absent)} of {len(found)} alternatives"
        progress.report("listing", f"no file for {shares}: {enumerate_names(absent, 5)}")
    return [*itertools.chain.from_iterable(found.values())]


def _match_paths(pattern: str) -> Iterator[File]:
    # The name itself may contain brackets.
    paths = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
    if paths == [pattern] and os.path.isdir(pattern):
        raise SourceError(
            f"{pattern!r} is a directory; give a pattern such as {pattern.rstrip('/')}/*.tfrecord"
        )
    for path in sorted(paths):
        if not os.path.isdir(path):
            with as_source_error(path):
                yield with_stat(File(path, path))


def _match_objects(pattern: str) -> Iterator[File]:
    bucket, wanted = _split(pattern)
    if not wanted or _WILDCARD.search(bucket.root):
        return
    wild = _WILDCARD.search(wanted)
    first = next(bucket.objects(wanted, page_size=1), None)  # the name may contain brackets
    if first and first.name == wanted:
        yield first._replace(name=first.path)
    elif wild:
        parts, start = wanted.split("/"), wanted.rfind("/", 0, wild.start()) + 1
        delimiter = "" if "/" in wanted[wild.start() :] or "**" in wanted else "/"
        for found in bucket.objects(wanted[: wild.start()], delimiter=delimiter):
            name = found.name
            if is_visible(name[start:]) and name[-1] != "/" and _matches(name.split("/"), parts):
                yield found._replace(name=found.path)


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Returns whether the parts of a name match those of a pattern, as in `glob`: ** is any number."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_matches(names[skipped:], parts[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])
