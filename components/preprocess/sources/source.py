"""What a source of examples is: a small Protocol that a user's own class fulfils too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Example:
    """One labelled image of a source.

    Attributes:
        key: Name that is unique in the source and stays the same when the source grows: the split and
            the order of the examples follow from it.
        label: Index into the source's `class_names`.
        image: An encoded image as bytes, the path of an image file, or pixels as a uint8 array of shape
            (height, width, channels) with 1 or 3 channels, values 0..255.
        split: "train", "validation" or "test" where the source has splits of its own, else None.
    """

    key: str
    label: int
    image: bytes | Path | npt.NDArray[np.uint8]
    split: str | None = None


class Source(Protocol):
    """Labelled images, to be read once from the first to the last.

    A source may also have `__len__`; progress then shows how much is left.
    """

    @property
    def class_names(self) -> Sequence[str]:
        """Name of each class, at least two; a label is an index into it."""

    def __iter__(self) -> Iterator[Example]:
        """Yields every example once, in any order."""
