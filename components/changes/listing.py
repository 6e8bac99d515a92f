"""Files with what tells one version of them from the next: here, or behind a URL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardline.components.preprocess import storage

#: What file systems call the version of a file, the surest first.
_VERSIONS = (
    "generation", "etag", "ETag", "md5Hash", "crc32c", "checksum",
    "mtime", "LastModified", "last_modified", "updated", "created",
)  # fmt: skip


class File(NamedTuple):
    """One file.

    Attributes:
        name: Relative to the directory that was listed; else its path.
        path: A local path or a URL.
        size: In bytes; -1 where the file system does not say.
        version: Time of change in nanoseconds, or what a remote file system has in its place; "" where it
            has nothing.
    """

    name: str
    path: str
    size: int
    version: str


def files_below(directory: str) -> Iterator[File]:
    """Yields all files below a directory that are not hidden, sorted folder by folder.

    Raises:
        SourceError: The directory cannot be read.
    """
    root = storage.resolve(directory)
    if storage.is_remote(root):
        for name, details in storage.describe_below(root).items():
            yield _remote_file(name, f"{root.rstrip('/')}/{name}", details)
    else:
        yield from _below(root, "")


def files_matching(pattern: str) -> Iterator[File]:
    """Yields the files that match a pattern with *, ?, [] and **, sorted.

    Raises:
        SourceError: Nothing matches, or it cannot be read.
    """
    pattern = storage.resolve(pattern)
    if storage.is_remote(pattern):
        for url, details in storage.describe_files(pattern).items():
            yield _remote_file(url, url, details)
        return
    for path in storage.find_files(pattern):
        with storage.one_line(path):
            yield _local_file(path, path, os.stat(path))


def _below(directory: str, prefix: str) -> Iterator[File]:
    with storage.one_line(directory, "the directory "), os.scandir(directory) as entries:
        visible = sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    for entry in visible:
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path, f"{prefix}{entry.name}/")
            continue
        with storage.one_line(entry.path):
            yield _local_file(prefix + entry.name, entry.path, entry.stat())


def _local_file(name: str, path: str, status: os.stat_result) -> File:
    return File(name, path, status.st_size, str(status.st_mtime_ns))


def _remote_file(name: str, url: str, details: Mapping[str, Any]) -> File:
    version = next((str(details[key]) for key in _VERSIONS if details.get(key)), "")
    size = details.get("size")
    return File(name, url, -1 if size is None else int(size), version)


def first_line(path: str) -> str:
    """Returns the first line of a text file.

    Raises:
        SourceError: The file cannot be read.
    """
    path = storage.resolve(path)
    with storage.one_line(path), storage.open_text(path) as text:
        return text.readline()
