"""Listings of sources: names, sizes and versions of files, here, in a bucket, or behind another URL.

Of a bucket, mounted or not, the API tells of 1,000 files a request, and a mount of one: the API is asked, and
the mount where it does not answer. In each way hidden files are left out, and the order is that of the bytes
of the whole names.
"""

from __future__ import annotations

import functools
import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from shardline.components.preprocess import storage
from shardline.components.preprocess.ahead import in_order, persistently
from shardline.components.vertex.objects import Names, Object, Page
from shardline.trainer import files, progress
from shardline.trainer.errors import PlatformError, SourceError

#: Version of an object in Cloud Storage, by the name that gcsfs has for it too.
_GENERATION = "generation"
#: What other file systems call the version of a file, the surest first.
_VERSIONS = (
    "etag", "ETag", "md5Hash", "crc32c", "checksum",
    "mtime", "LastModified", "last_modified", "updated", "created",
)  # fmt: skip

T = TypeVar("T")

# Names that Cloud Storage FUSE remembers unless told otherwise, and folders that are listed for it.
_KNOWN, _FOLDERS = 20_000, 1_000

_WILD = re.compile(r"[*?[]")


class File(NamedTuple):
    """One file of a source, here or behind a URL.

    `name` is relative to the directory that was listed, else the whole path; `size` is in bytes, -1 where the
    file system does not say. `version` is the time of change in nanoseconds, or what a remote file system has
    in its place, "" for none; `is_generation` tells that it is that of an object.
    """

    name: str
    path: str
    size: int
    version: str
    is_generation: bool = False


class Listing(Protocol):
    """What is in a directory and not hidden."""

    def top(self) -> Iterator[str]:
        """Yields the names in it, those of folders with a slash behind."""

    def files(self) -> Iterator[File]:
        """Yields all files below it."""


def below(directory: str, *, to_read: bool = False) -> Iterator[File]:
    """Yields all files below a directory that are not hidden.

    `to_read`: whether they will all be read in this order, which a mount that has listed them does faster.
    """
    root = storage.resolve(directory)
    found = None if to_read and not storage.is_remote(root) else far(root)
    return found.files() if found else _walked(root)


def tell_mount(folders: Sequence[str]) -> None:
    """Has a mount list folders, of the first 1,000 up to as many names as it remembers.

    Of a name that it has not listed lately it asks before each read, which takes as long as the read.
    """
    known = 0
    for count in in_order(_count, folders[:_FOLDERS], size=int):
        known += count if isinstance(count, int) else 0
        if known >= _KNOWN:
            return


def _count(folder: str) -> int:
    with os.scandir(folder) as entries:
        return sum(1 for _ in itertools.islice(entries, _KNOWN))


class NoFileError(SourceError):
    """No file matches a pattern."""


# Names of which any may match, {2026-11-01,2026-11-02}, and how many of those that do not are shown.
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")
_SHOWN = 5


def matching(pattern: str) -> Iterator[File]:
    """Yields the files that match a pattern with *, ?, [], ** and {a,b}; SourceError where none does.

    Of the names in braces, such as days, some may match nothing, which is said.
    """
    chosen = _CHOICE.search(pattern)
    if not chosen:
        return _matching(pattern)
    found, absent = list[Iterator[File]](), list[str]()
    for name in chosen[1].split(","):
        try:
            found.append(matching(pattern[: chosen.start()] + name + pattern[chosen.end() :]))
        except NoFileError:
            absent.append(name)
    if not found:
        raise NoFileError(f"no file matches {pattern!r}")
    if absent:
        shown = ", ".join(absent[:_SHOWN]) + (
            f" and {len(absent) - _SHOWN:,} more" if absent[_SHOWN:] else ""
        )
        progress.say("listing", f"nothing is there for {len(absent)} of {len(absent) + len(found)}: {shown}")
    return itertools.chain.from_iterable(found)


def _matching(pattern: str) -> Iterator[File]:
    pattern = storage.resolve(pattern)
    found = _matching_objects(pattern)
    first = next(found, None)
    if first:
        return itertools.chain([first], found)
    if storage.is_remote(pattern):
        return _matching_urls(pattern)
    return _described(((path, path) for path in _globbed(pattern)), storage.is_far(os.path.dirname(pattern)))


def find_files(pattern: str) -> list[str]:
    """Returns the paths of the files that match a pattern, sorted; hidden ones are left out."""
    return [file.path for file in matching(pattern)]


def far(root: str) -> Listing | None:
    """Returns the listing of a bucket or of a URL; None of a directory that has to be walked."""
    uri = _uri(root)
    if uri:
        bucket, _, prefix = uri.removeprefix("gs://").partition("/")
        found = Objects(Names(bucket), prefix and f"{prefix}/", root)
        if _first(found.top(), bucket, root):
            return found
    return Url(root) if storage.is_remote(root) else None


def _uri(path: str) -> str:
    """Returns the gs:// URI of a path in a bucket, mounted or not; "" of any other."""
    if storage.is_remote(path):
        return path.rstrip("/") if path.startswith("gs://") else ""
    return files.bucket_uri(path)


def _first(found: Iterator[T], bucket: str, path: str) -> T | None:
    """Returns the first thing that a bucket's API says; where it does not answer, why is said once."""
    try:
        return next(found, None)
    except (PlatformError, ImportError) as error:
        _say(
            f"gs://{bucket}",
            "by gcsfs" if storage.is_remote(path) else "through its mount, a request a file",
            str(error),
        )
        return None


@functools.cache
def _say(bucket: str, way: str, why: str) -> None:
    progress.say("listing", f"{bucket} is listed {way}, as its API does not answer: {why}")


class Objects:
    """Listing of a folder of a bucket by its API.

    `prefix` is that of its names, `root` the path by which its files are read.
    """

    def __init__(self, names: Names, prefix: str, root: str) -> None:
        self._names, self._prefix, self._root = names, prefix, root.rstrip("/")
        self._folders: Sequence[str] = ()

    @functools.cached_property
    def _first(self) -> Page:
        page = next(self._names.pages(self._prefix, delimiter="/"))
        self._folders = page.folders
        return page

    def top(self) -> Iterator[str]:
        """Yields the names in the folder, and those of folders with a slash behind."""
        pages, folders = iter([self._first]), list[str]()
        if token := self._first.token:
            pages = itertools.chain(pages, self._names.pages(self._prefix, token, delimiter="/"))
        for page in pages:
            folders += page.folders
            for name in itertools.chain((each.name for each in page), page.folders):
                if _is_visible(inner := name.removeprefix(self._prefix).removesuffix("/")):
                    yield inner + name[len(self._prefix) + len(inner) :]
        self._folders = folders

    def files(self) -> Iterator[File]:
        """Yields all files below the folder."""
        start, mounted = len(self._prefix), not storage.is_remote(self._root)
        for name, size, generation in self._names.objects(self._prefix, self._folders):
            inner = name[start:]
            # A mount shows no name with an empty part.
            if _is_visible(inner) and inner[-1] != "/" and not (mounted and "//" in f"/{inner}"):
                yield File(inner, f"{self._root}/{inner}", size, str(generation), True)


class Url:
    """Listing of what is behind any other URL, which is held."""

    def __init__(self, root: str) -> None:
        file_system, inner = storage.remote(root)
        with storage.one_line(root, "the directory "):
            found = persistently(functools.partial(file_system.find, detail=True), inner)
        prefix, root = inner.rstrip("/") + "/", root.rstrip("/")
        self._files = [
            _remote_file(name, f"{root}/{name}", found[path])
            for path in sorted(found)
            if path.startswith(prefix) and _is_visible(name := path.removeprefix(prefix))
        ]
        if not self._files:
            raise SourceError(f"cannot read the directory {root!r}: there is no file in it")

    def top(self) -> Iterator[str]:
        """Yields the names in the directory, and those of folders with a slash behind."""
        heads = (name.partition("/")[:2] for name, *_ in self._files)
        return iter(dict.fromkeys(map("".join, heads)))

    def files(self) -> Iterator[File]:
        """Yields all files below the directory."""
        return iter(self._files)


def _is_visible(name: str) -> bool:
    """Returns whether a name, relative to what was listed, is one and no part of it is hidden."""
    return name != "" and "/." not in f"/{name}"


def _remote_file(name: str, url: str, details: Mapping[str, Any]) -> File:
    size, generation = details.get("size"), details.get(_GENERATION)
    version = generation or next((details[key] for key in _VERSIONS if details.get(key)), "")
    return File(name, url, -1 if size is None else int(size), str(version), bool(generation))


def _walked(root: str) -> Iterator[File]:
    return _described(_walk(root, ""), storage.is_far(root))


def _walk(directory: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yields names and paths of all files below a directory."""
    with storage.one_line(directory, "the directory "), os.scandir(directory) as entries:
        names = sorted(
            f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
            for entry in entries
            if entry.name[0] != "."
        )
    for name in names:
        path = f"{directory.rstrip('/')}/{name}"
        if name[-1] == "/":
            yield from _walk(path[:-1], prefix + name)
        else:
            yield prefix + name, path


def _described(names: Iterable[tuple[str, str]], is_far: bool) -> Iterator[File]:
    """Yields files, given name and path of each; many are asked for at the same time where they are far."""
    try:
        for found in in_order(_file, names) if is_far else map(_file, names):
            if isinstance(found, Exception):
                raise found
            yield found
    except OSError as error:
        raise SourceError(f"cannot read {error.filename!r}: {storage.reason(error)}") from None


def _file(names: tuple[str, str]) -> File:
    name, path = names
    status = os.stat(path)
    return File(name, path, status.st_size, str(status.st_mtime_ns))


def _globbed(pattern: str) -> list[str]:
    """Returns the files of this machine that match a pattern, sorted."""
    if os.path.lexists(pattern):  # the name itself may have brackets
        found = [pattern]
    else:
        found = [path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)]
    if not found:
        raise NoFileError(f"no file matches {pattern!r}")
    if os.path.isdir(found[0]):
        raise SourceError(
            f"{pattern!r} is a directory; give a pattern such as {pattern.rstrip('/')}/*.tfrecord"
        )
    return sorted(found)


def _matching_urls(pattern: str) -> Iterator[File]:
    file_system, inner = storage.remote(pattern)
    with storage.one_line(pattern):
        found = persistently(functools.partial(file_system.glob, detail=True), inner)
    if not found:
        raise NoFileError(f"no file matches {pattern!r}")
    for path in sorted(found):
        url = file_system.unstrip_protocol(path)
        yield _remote_file(url, url, found[path])


def _matching_objects(pattern: str) -> Iterator[File]:
    """Yields the files of a bucket that match a pattern; none where its API does not answer."""
    bucket, _, wanted = _uri(pattern).removeprefix("gs://").partition("/")
    if not wanted or _WILD.search(bucket):
        return
    names = Names(bucket)
    page = _first(names.pages(wanted, page_size=1), bucket, pattern)  # the name itself may have brackets
    first, wild = next(iter(page or ()), None), _WILD.search(wanted)
    root = f"gs://{bucket}" if storage.is_remote(pattern) else str(files.local_path(f"gs://{bucket}"))

    def file(found: Object) -> File:
        path = f"{root}/{found.name}"
        return File(path, path, found.size, str(found.generation), True)

    if first and first.name == wanted:
        yield file(first)
    elif page and wild:
        from fsspec.utils import glob_translate

        matches, start = re.compile(glob_translate(wanted)).match, wanted.rfind("/", 0, wild.start()) + 1
        folder = {} if "/" in wanted[wild.start() :] or "**" in wanted else {"delimiter": "/"}
        for page in names.pages(wanted[: wild.start()], **folder):
            for each in page:
                if matches(each.name) and _is_visible(each.name[start:]) and each.name[-1] != "/":
                    yield file(each)
