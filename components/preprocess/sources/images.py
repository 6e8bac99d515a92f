"""A directory with one folder of image files per class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shardline.components.preprocess import storage
from shardline.components.preprocess.sources.remote import fetched
from shardline.components.preprocess.sources.source import WHOLE_FILE, BadExample, Example, Source, Span
from shardline.trainer.errors import SourceError


def open_images(directory: str) -> Source:
    """Returns the images of a local directory or of one behind a URL, with a folder per class.

    The class is the folder directly under the directory, the key the path relative to it. Folders inside a
    class folder belong to that class. Names that start with a dot are ignored; every other file must be an
    image (whether it is one is found when it is read).

    Raises:
        SourceError: The directory is missing, has files beside the class folders or an empty class folder.
    """
    root = storage.resolve(directory)
    return RemoteImages(root) if storage.is_remote(root) else Images(root)


class Images:
    """Image files of a local directory, listed folder by folder, so that not all names are in memory."""

    def __init__(self, root: str) -> None:
        self._root = root
        folders = _listed(root)
        for folder in folders:
            if not folder.is_dir():
                raise _stray(root, folder.name)
            if next(_files_below(folder.path, folder.name), None) is None:
                raise SourceError(f"class folder {folder.name!r} of {root} is empty; remove it or fill it")
        self.class_names = tuple(folder.name for folder in folders)

    def __iter__(self) -> Iterator[Example | BadExample]:
        for label, folder in enumerate(self.class_names):
            for key, found in _files_below(os.path.join(self._root, folder), folder):
                if isinstance(found, BadExample):
                    yield found
                else:
                    yield Example(key, label, Span(found, 0, WHOLE_FILE))


class RemoteImages:
    """Image files behind a URL."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._keys = storage.find_below(root)
        for key in self._keys:
            if "/" not in key:
                raise _stray(root, key)
        self.class_names = tuple(sorted({key.partition("/")[0] for key in self._keys}))

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Example | BadExample]:
        labels = {name: label for label, name in enumerate(self.class_names)}
        return fetched(
            self._root, (Example(key, labels[key.partition("/")[0]], Path(key)) for key in self._keys)
        )


def _stray(root: str, name: str) -> SourceError:
    return SourceError(
        f"{root} has {name!r} beside the class folders; put every image into the folder of its class, or "
        "give a CSV file of labels"
    )


def _listed(directory: str) -> list[os.DirEntry[str]]:
    """Returns what is in a directory and not hidden, by name."""
    try:
        with os.scandir(directory) as entries:
            return sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise SourceError(f"cannot read the directory {directory!r}: {error.strerror}") from None


def _files_below(directory: str, prefix: str) -> Iterator[tuple[str, str | BadExample]]:
    """Yields key and path of all files below a directory by name, or why one of them cannot be used."""
    for entry in _listed(directory):
        key = f"{prefix}/{entry.name}"
        try:
            if entry.is_file():
                yield key, entry.path
            elif entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path, key)
            elif entry.is_dir():
                raise SourceError(f"{entry.path!r} is a link to a folder; put the folder itself there")
            else:
                yield key, BadExample(key, "is neither a file nor a folder")
        except OSError as error:  # a link to itself
            yield key, BadExample(key, f"cannot be read: {error.strerror}")
