"""Listings of sources: names, sizes and versions of files on this machine and in buckets.

Hidden files are left out, and the order is that of the bytes of the whole names.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from shardline.components.storage import remote_files
from shardline.components.storage.bucket import Bucket, parse_uri
from shardline.components.text import enumerate_names
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SourceError

_WILDCARD = re.compile(r"[*?[]")


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
    found = open_listing(remote_files.resolve(directory))
    files = _with_stat(found.files()) if isinstance(found, Directory) else found.files()
    if not (first := next(files, None)):
        raise _no_file_in(directory)
    return itertools.chain([first], files)


def open_listing(root: str) -> Objects | Directory:
    """Returns the listing of a resolved directory."""
    if not remote_files.is_remote(root):
        return Directory(root)
    bucket, prefix = parse_uri(root.rstrip("/"))
    return Objects(bucket, prefix and f"{prefix}/", root)


class NoFileError(SourceError):
    """No file matches a pattern."""


# Alternative names, {2026-11-01,2026-11-02}.
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")


def match_files(pattern: str) -> Iterator[File]:
    """Yields the files that match a pattern with *, ?, [], ** and {a,b}; SourceError where none does.

    Some of the names in braces, such as days, may match nothing, which is reported.
    """
    braces = _ALTERNATIVES.search(pattern)
    if not braces:
        return _match_files(remote_files.resolve(pattern))
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


def _match_files(pattern: str) -> Iterator[File]:
    if remote_files.is_remote(pattern):
        found = _match_objects(pattern)
        if not (first := next(found, None)):
            raise NoFileError(f"no file matches {pattern!r}")
        return itertools.chain([first], found)
    # The name itself may contain brackets.
    paths = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
    if paths == [pattern] and os.path.isdir(pattern):
        raise SourceError(
            f"{pattern!r} is a directory; give a pattern such as {pattern.rstrip('/')}/*.tfrecord"
        )
    if not (paths := [path for path in paths if not os.path.isdir(path)]):
        raise NoFileError(f"no file matches {pattern!r}")
    return _with_stat(File(path, path) for path in sorted(paths))


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
        for page in self._bucket.pages(self._prefix, delimiter="/"):
            for name in itertools.chain((each.name for each in page), page.folders):
                if _is_visible(inner := name[len(self._prefix) :]) and inner != "/":
                    yield inner
                    is_empty = False
        if is_empty:
            raise _no_file_in(self._root)

    def files(self) -> Iterator[File]:
        """Yields all files below the folder."""
        for name, size, generation in itertools.chain.from_iterable(self._bucket.pages(self._prefix)):
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
    with remote_files.as_source_error(directory, "the directory "), os.scandir(directory) as entries:
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
        raise SourceError(f"cannot read {error.filename!r}: {remote_files.reason(error)}") from None


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
    page = next(bucket.pages(wanted, page_size=1))  # the name may contain brackets
    first = next(iter(page), None)
    if first and first.name == wanted:
        yield File(f"{uri}/{wanted}", f"{uri}/{wanted}", first.size, str(first.generation), True)
    elif wild:
        parts, start = wanted.split("/"), wanted.rfind("/", 0, wild.start()) + 1
        folder = {} if "/" in wanted[wild.start() :] or "**" in wanted else {"delimiter": "/"}
        for name, size, generation in itertools.chain.from_iterable(
            bucket.pages(wanted[: wild.start()], **folder)
        ):
            if _is_visible(name[start:]) and name[-1] != "/" and _matches(name.split("/"), parts):
                yield File(f"{uri}/{name}", f"{uri}/{name}", size, str(generation), True)


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Returns whether the parts of a name match those of a pattern, as in `glob`: ** is any number."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_matches(names[skipped:], parts[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])
