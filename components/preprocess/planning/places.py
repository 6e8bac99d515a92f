"""Places: the few files and directories that the images of a dataset are in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from shardline.trainer.errors import SourceError

#: Number of the place of examples without an image.
NOWHERE = 0


@dataclass(frozen=True)
class Place:
    """Where images are.

    Attributes:
        kind: "directory": each image is a file, its path is `path` and what the row says; "file": each image
            is a span of this file; "spool": the same, of a file of the work directory; "none".
        path: The beginning of the images' paths, or the file.
        size: Of the file when it was surveyed, in bytes.
        changed: Time of its last change in nanoseconds.
    """

    kind: str
    path: str = ""
    size: int = 0
    changed: int = 0


class Places:
    """Numbers the places in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._places = [Place("none")]

    def number(self, kind: str, path: str) -> int:
        """Returns the number of a place.

        Raises:
            SourceError: A file cannot be read.
        """
        known = self._numbers.get((kind, path))
        if known is not None:
            return known
        place = Place(kind, path)
        if kind == "file" and "://" not in path:
            try:
                status = os.stat(path)
            except OSError as error:
                raise SourceError(f"cannot read {path!r}: {error.strerror}") from None
            place = Place(kind, path, status.st_size, status.st_mtime_ns)
        self._numbers[kind, path] = len(self._places)
        self._places.append(place)
        return len(self._places) - 1

    def all(self) -> Sequence[Place]:
        """Returns the places by number."""
        return self._places
