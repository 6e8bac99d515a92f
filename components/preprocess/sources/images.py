"""Image files in a folder per class, local or at a URL.

Where each question costs a request, in a mounted bucket, none is asked of a single file.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Iterator

from shardline.components.preprocess import listing, storage
from shardline.components.preprocess.ahead import in_order
from shardline.components.preprocess.sources import WHOLE_FILE, BadExample, Example, Source, Span
from shardline.trainer.errors import SourceError


def open_images(directory: str) -> Source:
    """Returns the images of a local directory or of one at a URL.

    The class is the folder directly under the directory, the key the path relative to it. Folders inside a
    class folder belong to that class. Names that start with a dot are ignored; every other file must be an
    image (whether it is one is found when it is read).

    Raises:
        SourceError: The directory is missing or holds something else.
    """
    root = storage.resolve(directory)
    found = listing.far(root)
    return ListedImages(root, found) if found else Images(root)


class Images:
    """Image files of a local directory, listed folder by folder, so that not all names are in memory."""

    def __init__(self, root: str) -> None:
        self._root, self._far = root, storage.is_far(root)
        folders = _listed(root)
        for folder in folders:
            if not folder.is_dir():
                raise _stray(root, folder.name)
        firsts = in_order(self._first, folders, size=bool) if self._far else map(self._first, folders)
        for folder, first in zip(folders, firsts, strict=True):
            if isinstance(first, Exception):
                raise first
            if first is None:
                raise _empty(root, folder.name)
        self._folders = [folder.name for folder in folders]
        self.class_names = tuple(sorted(self._folders))

    def _first(self, folder: os.DirEntry[str]) -> tuple[str, str | BadExample] | None:
        return next(_files_below(folder.path, folder.name, self._far), None)

    def __iter__(self) -> Iterator[Example | BadExample]:
        labels = {name: label for label, name in enumerate(self.class_names)}
        for folder in self._folders:
            label = labels[folder]
            for key, found in _files_below(os.path.join(self._root, folder), folder, self._far):
                if isinstance(found, BadExample):
                    yield found
                else:
                    yield Example(key, label, Span(found, 0, WHOLE_FILE))


class ListedImages:
    """Image files in a folder per class in a bucket or at a URL, listed there."""

    def __init__(self, root: str, found: listing.Listing) -> None:
        self._root, self._listing = root, found
        folders = []
        for name in found.top():
            if not name.endswith("/"):
                raise _stray(root, name)
            folders.append(name[:-1])
        self.class_names = tuple(sorted(folders))

    def __iter__(self) -> Iterator[Example | BadExample]:
        labels = {name: label for label, name in enumerate(self.class_names)}
        seen = bytearray(len(labels))
        if not storage.is_remote(self._root):
            listing.tell_mount([os.path.join(self._root, name) for name in self.class_names])
        for file in self._listing.files():
            label = labels.get(file.name.partition("/")[0])
            if label is None:
                raise SourceError(
                    f"{file.path!r} came while the source was read; run again when nothing writes to it"
                )
            seen[label] = 1
            generation = int(file.version) if file.is_generation else 0
            yield Example(file.name, label, Span(file.path, generation, ~max(file.size, 0)))
        for folder in itertools.compress(self.class_names, map(operator.not_, seen)):
            raise _empty(self._root, folder)


def is_outside(path: str) -> bool:
    """Returns whether a normalized path does not stay in the directory that it is relative to."""
    return os.path.isabs(path) or path == ".." or path.startswith("../")


def _stray(root: str, name: str) -> SourceError:
    return SourceError(
        f"{root} has {name!r} beside the class folders; put every file into the folder of its class, or "
        "give a CSV file of labels"
    )


def _empty(root: str, folder: str) -> SourceError:
    return SourceError(f"class folder {folder!r} of {root} is empty; remove it or fill it")


def _listed(directory: str) -> list[os.DirEntry[str]]:
    """Returns what is in a directory and not hidden, in the order of the names of the files below it."""
    try:
        with os.scandir(directory) as entries:
            return sorted((entry for entry in entries if entry.name[0] != "."), key=_order)
    except OSError as error:
        raise SourceError(f"cannot read the directory {directory!r}: {error.strerror}") from None


def _order(entry: os.DirEntry[str]) -> str:
    return f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name


def _files_below(directory: str, prefix: str, far: bool) -> Iterator[tuple[str, str | BadExample]]:
    """Yields key and path of all files below a directory by name, or why one of them cannot be used."""
    for entry in _listed(directory):
        key = f"{prefix}/{entry.name}"
        try:
            # A mounted bucket may be asked for each name again; a folder that looks like a file is found
            # when it is read.
            if (far and os.path.splitext(entry.name)[1]) or entry.is_file():
                yield key, entry.path
            elif entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path, key, far)
            elif entry.is_dir():
                raise SourceError(f"{entry.path!r} is a link to a folder; put the folder itself there")
            else:
                yield key, BadExample(key, "is neither a file nor a folder")
        except OSError as error:  # a link to itself
            yield key, BadExample(key, f"cannot be read: {error.strerror}")
