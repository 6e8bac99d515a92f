"""Files of a source on this machine, or in a bucket, gs://BUCKET/PATH or /gcs/BUCKET/PATH: listed and read.

Hidden files are not listed, and the order is that of the bytes of the whole names. Files that cannot be
found, opened or read raise a SourceError of one line. Objects are read in order, or from a copy that a run
keeps on this machine's disk while it lasts.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import itertools
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from shardline.components.storage.bucket import Bucket, parse_uri, with_retries
from shardline.components.text import enumerate_names
from shardline.components.vertex.refusals import RefusalKind, refusal_kind
from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import RunError, ShardlineError, SourceError

#: Most characters of a line.
_LONGEST_LINE = 64 << 20

_WILDCARD = re.compile(r"[*?[]")
# Alternative names, {2026-11-01,2026-11-02}.
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")

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
                bucket, name = parse_uri(path)
                with files.replacing(copy) as temporary:  # another process may be copying it
                    bucket.download(name, temporary)
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


class File(NamedTuple):
    """One file of a source, local or in a bucket.

    `name` is relative to the directory that was listed, else the whole path. `version` is the time of change
    in nanoseconds, or an object's generation. Files of a `Directory` have size -1 and version "".
    """

    name: str
    path: str
    size: int = -1
    version: str = ""
    is_generation: bool = False


def files_below(directory: str) -> Iterator[File]:
    """Yields all files below a directory that are not hidden; SourceError where there is none."""
    found = open_listing(resolve(directory))
    files = _with_stat(found.files()) if isinstance(found, Directory) else found.files()
    if not (first := next(files, None)):
        raise _no_file_in(directory)
    return itertools.chain([first], files)


def open_listing(root: str) -> Objects | Directory:
    """Returns the listing of a resolved directory."""
    if not is_remote(root):
        return Directory(root)
    bucket, prefix = parse_uri(root.rstrip("/"))
    return Objects(bucket, prefix and f"{prefix}/", root)


class NoFileError(SourceError):
    """No file matches a pattern."""


def match_files(pattern: str) -> Iterator[File]:
    """Yields the files that match a pattern with *, ?, [], ** and {a,b}; SourceError where none does.

    Some of the names in braces, such as days, may match nothing, which is reported.
    """
    braces = _ALTERNATIVES.search(pattern)
    if not braces:
        pattern = resolve(pattern)
        matching = _match_objects(pattern) if is_remote(pattern) else _match_paths(pattern)
        if not (first := next(matching, None)):
            raise NoFileError(f"no file matches {pattern!r}")
        return itertools.chain([first], matching)
    found, absent = list[Iterator[File]](), list[str]()
    for name in braces[1].split(","):
        try:
            found.append(match_files(pattern[: braces.start()] + name + pattern[braces.end() :]))
        except NoFileError:
            absent.append(name)
    if not found:
        raise NoFileError(f"no file matches {pattern!r}")
    if absent:
        shares = f"{len(absent)} of {len(absent) + len(found)} alternatives"
        progress.report("listing", f"no file for {shares}: {enumerate_names(absent, 5)}")
    return itertools.chain.from_iterable(found)


def _match_paths(pattern: str) -> Iterator[File]:
    # The name itself may contain brackets.
    paths = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
    if paths == [pattern] and os.path.isdir(pattern):
        raise SourceError(
            f"{pattern!r} is a directory; give a pattern such as {pattern.rstrip('/')}/*.tfrecord"
        )
    return _with_stat(File(path, path) for path in sorted(paths) if not os.path.isdir(path))


def find_files(pattern: str) -> list[str]:
    """Returns the paths of the files that match a pattern, sorted; hidden ones are left out."""
    return [file.path for file in match_files(pattern)]


class Objects:
    """Listing of a folder of a bucket.

    `prefix` is the prefix of its names, `root` the path by which its files are read.
    """

    def __init__(self, bucket: Bucket, prefix: str, root: str) -> None:
        self._bucket, self._prefix, self._root = bucket, prefix, root.rstrip("/")

    def top(self) -> Iterator[str]:
        """Yields the names in the folder, of which there must be one; those of folders end with a slash."""
        is_empty = True
        for objects, folders in self._bucket.pages(self._prefix, delimiter="/"):
            for name in itertools.chain((each.name for each in objects), folders):
                if _is_visible(inner := name[len(self._prefix) :]) and inner != "/":
                    yield inner
                    is_empty = False
        if is_empty:
            raise _no_file_in(self._root)

    def files(self) -> Iterator[File]:
        """Yields all files below the folder."""
        for name, size, generation in self._bucket.objects(self._prefix):
            inner = name[len(self._prefix) :]
            if _is_visible(inner) and inner[-1] != "/":
                yield File(inner, f"{self._root}/{inner}", size, str(generation), True)


class Directory:
    """Listing of a directory of this machine, without a stat of each file."""

    def __init__(self, root: str) -> None:
        self._root = root

    def top(self) -> Iterator[str]:
        """Yields the names in the directory; those of folders end with a slash."""
        return iter(_names(self._root, follow=True))

    def files(self, prefix: str = "") -> Iterator[File]:
        """Yields all files below the directory; links to folders are followed only directly in it."""
        directory = f"{self._root.rstrip('/')}/{prefix}"
        for name in _names(directory if prefix else self._root, follow=not prefix):
            if name[-1] == "/":
                yield from self.files(prefix + name)
            else:
                yield File(prefix + name, directory + name)


def _names(directory: str, *, follow: bool) -> list[str]:
    with as_source_error(directory, "the directory "), os.scandir(directory) as entries:
        return sorted(
            f"{entry.name}/" if entry.is_dir(follow_symlinks=follow) else entry.name
            for entry in entries
            if entry.name[0] != "."
        )


def _with_stat(found: Iterable[File]) -> Iterator[File]:
    try:
        for file in found:
            status = os.stat(file.path)
            yield File(file.name, file.path, status.st_size, str(status.st_mtime_ns))
    except OSError as error:
        raise SourceError(f"cannot read {error.filename!r}: {reason(error)}") from None


def _no_file_in(directory: str) -> SourceError:
    return SourceError(f"cannot read the directory {directory!r}: there is no file in it")


def _is_visible(name: str) -> bool:
    """Returns whether a name, relative to the listed directory, is not empty and has no hidden part."""
    return name != "" and "/." not in f"/{name}"


def _match_objects(pattern: str) -> Iterator[File]:
    bucket, wanted = parse_uri(pattern)
    if not wanted or _WILDCARD.search(bucket.name):
        return
    uri, wild = f"gs://{bucket.name}", _WILDCARD.search(wanted)
    first = next(bucket.objects(wanted, page_size=1), None)  # the name may contain brackets
    if first and first.name == wanted:
        yield File(f"{uri}/{wanted}", f"{uri}/{wanted}", first.size, str(first.generation), True)
    elif wild:
        parts, start = wanted.split("/"), wanted.rfind("/", 0, wild.start()) + 1
        folder = {} if "/" in wanted[wild.start() :] or "**" in wanted else {"delimiter": "/"}
        for name, size, generation in bucket.objects(wanted[: wild.start()], **folder):
            if _is_visible(name[start:]) and name[-1] != "/" and _matches(name.split("/"), parts):
                yield File(f"{uri}/{name}", f"{uri}/{name}", size, str(generation), True)


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Returns whether the parts of a name match those of a pattern, as in `glob`: ** is any number."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_matches(names[skipped:], parts[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])
