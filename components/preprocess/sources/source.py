"""What a source of examples is: a small Protocol that a user's own class fulfils too.

Which keys have occurred, in 16 to 32 bytes each, where a set would take a hundred.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shardline.trainer.data.manifest import Scalar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Length of a span that is a whole file, of whatever size.
WHOLE_FILE = -1


class Span(NamedTuple):
    """Bytes inside a local file, which a writer reads for itself when their turn comes.

    Attributes:
        file: Path of the file.
        offset: Of the first byte.
        length: Number of bytes, or `WHOLE_FILE`: the same as the file's path, and faster than a Path is made.
    """

    file: str
    offset: int
    length: int


class Example(NamedTuple):
    """One labelled example of a source.

    Attributes:
        key: Name that is unique in the source and stays the same when the source grows: the split and
            the order of the examples follow from it.
        label: Index into the source's `class_names`.
        image: An encoded image as bytes, the path of an image file, a span of a file that holds an encoded
            image, or pixels as a uint8 array of shape (height, width, channels) with 1 or 3 channels, values
            0..255. None where the source has no images (a table). Paths and spans are read only when they
            are written: prefer them.
        split: "train", "validation" or "test" where the source has splits of its own, else None.
        features: Further values by name, as the source's `features` declare them.
    """

    key: str
    label: int
    image: bytes | Path | Span | npt.NDArray[np.uint8] | None = None
    split: str | None = None
    features: Mapping[str, Scalar] = MappingProxyType({})


class BadExample(NamedTuple):
    """What a source yields in the place of an example that cannot be used.

    A generator cannot go on after it has raised an error; so it says this, and whoever reads it decides.

    Attributes:
        name: The example's key, or file and row.
        reason: Why, without the name: the same words for the same kind of fault.
    """

    name: str
    reason: str


class Source(Protocol):
    """Labelled examples, to be read once from the first to the last.

    A source may also have `__len__` (progress then shows how much is left), `features`, a sequence of
    `trainer.data.manifest.Feature` that declares what is in every `Example.features`, and `fingerprint()`,
    which returns a text that is another one whenever the examples are (a version, a time of change):
    without it, a scheduled run cannot know that nothing has changed.
    """

    @property
    def class_names(self) -> Sequence[str]:
        """Name of each class, at least two; a label is an index into it."""

    def __iter__(self) -> Iterator[Example | BadExample]:
        """Yields every example once, in any order; of those that cannot be used, their name and why."""


class Seen:
    """A set of 64-bit hashes: two of a million different keys are confused once in 30 million runs."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 << 16))
        self._free = len(self._slots) // 2

    def add(self, value: int) -> bool:
        """Adds a hash and returns whether it is new."""
        value = value or 1  # 0 is an empty slot
        slots = self._slots
        slot = value % len(slots)
        while found := slots[slot]:
            if found == value:
                return False
            slot = (slot + 1) % len(slots)
        slots[slot] = value
        self._free -= 1
        if not self._free:
            self._grow()
        return True

    def _grow(self) -> None:
        old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
        self._free = len(self._slots) // 2
        for value in filter(None, old):
            self.add(value)
