"""A directory with one folder of image files per class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from components.preprocess.sources.source import Example
from trainer import files
from trainer.errors import SourceError


class Images:
    """Image files; the class is the folder directly under the directory, the key the path relative to it.

    Folders inside a class folder belong to that class. Names that start with a dot are ignored; every
    other file must be an image (whether it is one is found when it is read).

    Raises:
        SourceError: The directory is missing, has files beside the class folders or an empty class
            folder, or holds something that is neither a file nor a folder.
    """

    def __init__(self, directory: str) -> None:
        self._root = files.local_path(directory).expanduser()
        folders = _visible(self._root)
        strays = [path.name for path in folders if not path.is_dir()]
        if strays:
            raise SourceError(
                f"{directory} has {strays[0]!r} beside the class folders; put every image into the folder "
                "of its class and move other files away"
            )
        self.class_names = tuple(folder.name for folder in folders)
        self._files = [_files_below(folder) for folder in folders]
        for name, found in zip(self.class_names, self._files, strict=True):
            if not found:
                raise SourceError(f"class folder {name!r} of {directory} is empty; remove it or fill it")

    def __len__(self) -> int:
        return sum(len(found) for found in self._files)

    def __iter__(self) -> Iterator[Example]:
        for label, found in enumerate(self._files):
            for path in found:
                yield Example(key=path.relative_to(self._root).as_posix(), label=label, image=path)


def _visible(directory: Path) -> list[Path]:
    """Returns what is in a directory and not hidden, by name."""
    try:
        return sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise SourceError(f"cannot read the directory {directory}: {error.strerror}") from None


def _files_below(directory: Path) -> list[Path]:
    """Returns all files below a directory by name."""
    found: list[Path] = []
    for path in _visible(directory):
        if path.is_file():
            found.append(path)
        elif path.is_dir() and not path.is_symlink():
            found += _files_below(path)
        else:
            raise SourceError(f"{path} is neither a file nor a folder (links to folders are not followed)")
    return found
