"""The first pass over a source: what its examples are, before anything is decided or written."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from components.preprocess.image import Encoded, Header, encode_pixels, read_header
from components.preprocess.meter import Meter
from components.preprocess.sources import Example, Source
from components.preprocess.spool import Span, Spool
from trainer import plugins
from trainer.data.manifest import SPLITS
from trainer.errors import ShardlineError, SourceError


class Record(NamedTuple):
    """One example, its image left where it is: in its file or in the spool."""

    key: str
    label: int
    split: str | None
    image: Path | Span


@dataclass(frozen=True)
class Survey:
    """What a source holds.

    Attributes:
        class_names: Name of each class.
        records: Every example, in the order of the source.
        headers: Every image header that occurs.
    """

    class_names: tuple[str, ...]
    records: Sequence[Record]
    headers: frozenset[Header]


def survey(source: Source, spool: Spool) -> Survey:
    """Reads a source once: all examples, and of their images the headers.

    Args:
        source: The source.
        spool: Keeps the images that are not files.

    Raises:
        SourceError: The source has no examples or fewer than two classes, or one of its examples is not
            usable: a key twice, a label out of range, something that is not an image.
    """
    class_names = _check_class_names(source.class_names)
    records: list[Record] = []
    headers: set[Header] = set()
    keys: set[str] = set()
    meter = Meter("read", operator.length_hint(source, 0))
    for example in _examples(source):
        _check(example, len(class_names), keys)
        keys.add(example.key)
        image = _encoded(example)
        headers.add(read_header(image, example.key))
        kept = image if isinstance(image, Path) else spool.append(image)
        records.append(Record(example.key, operator.index(example.label), example.split, kept))
        meter.tick()
    _check_records(records, class_names)
    return Survey(class_names, records, frozenset(headers))


def _examples(source: Source) -> Iterator[Example]:
    """Yields the examples; what a user's own source raises becomes one line with its place."""
    try:
        yield from source
    except ShardlineError:
        raise
    except Exception as failure:
        raise SourceError(f"the source failed: {plugins.describe(failure)}") from failure


def _check_class_names(names: Sequence[str]) -> tuple[str, ...]:
    class_names = tuple(names)
    for name in class_names:
        if not isinstance(name, str) or not name.isprintable():
            raise SourceError(f"class name {name!r} is not printable text; rename the class")
    if len(set(class_names)) != len(class_names):
        raise SourceError(f"class names are not unique: {', '.join(class_names)}")
    if len(class_names) < 2:
        there = f"only {class_names[0]!r}" if class_names else "none"
        raise SourceError(f"at least 2 classes are needed, the source has {there}")
    return class_names


def _check(example: Example, classes: int, seen: set[str]) -> None:
    if not isinstance(example, Example):
        raise SourceError(
            f"the source yields a {type(example).__name__}, not an Example (components.preprocess.sources)"
        )
    if not isinstance(example.key, str) or not example.key:
        raise SourceError(f"key {example.key!r} of an example is not a text of at least one character")
    if example.key in seen:
        raise SourceError(f"key {example.key!r} occurs twice; the key of an example must be unique")
    try:
        label = operator.index(example.label)
    except TypeError:
        raise SourceError(f"label {example.label!r} of {example.key!r} is not an integer") from None
    if not 0 <= label < classes:
        raise SourceError(
            f"label {label} of {example.key!r} is out of range 0..{classes - 1} of the {classes} classes"
        )
    if example.split is not None and example.split not in SPLITS:
        raise SourceError(
            f"split {example.split!r} of {example.key!r} is unknown; known: {', '.join(SPLITS)}, None"
        )


def _encoded(example: Example) -> Encoded:
    if isinstance(example.image, np.ndarray):
        return encode_pixels(example.image, example.key)
    if isinstance(example.image, bytes | Path):
        return example.image
    raise SourceError(
        f"image {example.key!r} is a {type(example.image).__name__}; expected bytes, a Path or a uint8 array"
    )


def _check_records(records: Sequence[Record], class_names: Sequence[str]) -> None:
    if not records:
        raise SourceError("the source is empty: it has no example")
    labels = {record.label for record in records}
    if len(labels) < 2:
        raise SourceError(
            f"all {len(records):,} examples are of one class, {class_names[labels.pop()]!r}; bring a second"
        )
