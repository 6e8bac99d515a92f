"""A source of one's own, as a user would write it: images that are the rows of one .npy file."""

from __future__ import annotations

import os
from collections.abc import Iterator

from shardline.components.preprocess.sources.example import Example, Span

CLASSES = 5

#: Names the file of `Packed`.
PACKED_VARIABLE = "SHARDLINE_BENCHMARK_PACKED"

#: Where the rows of an .npy file of this kind begin, and how long they are.
_HEADER, _SIZE = 128, 824


class Packed:
    """Spans of the file, which is not read before it is written."""

    class_names = tuple(f"class{label}" for label in range(CLASSES))

    def __init__(self) -> None:
        self._path = os.environ[PACKED_VARIABLE]

    def __len__(self) -> int:
        return (os.stat(self._path).st_size - _HEADER) // _SIZE

    def __iter__(self) -> Iterator[Example]:
        for index in range(len(self)):
            span = Span(self._path, _HEADER + index * _SIZE, _SIZE)
            yield Example(key=f"{index:07d}", label=index % CLASSES, image=span)
