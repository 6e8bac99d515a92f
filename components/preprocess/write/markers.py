"""Completion markers of shards: files of a line of JSON, and hashes of the contents of the shards' examples.

A marker that is cut off, or of another plan, is ignored.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardline.components.preprocess.images.codec import Kind
from shardline.components.preprocess.plan.digests import HASH_BYTES, blocks
from shardline.components.preprocess.plan.plan import Plan
from shardline.components.preprocess.plan.records import Records
from shardline.components.preprocess.tfrecord.example import parse_entries
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.base import deserialize, files
from shardline.trainer.base.errors import RunError, printable
from shardline.trainer.data.features import (
    CLASS,
    LABEL,
    MULTILABEL,
    REGRESSION,
    Feature,
    Label,
    Spread,
    Tally,
    is_class,
)
from shardline.trainer.data.manifest import Shard


@dataclass(frozen=True)
class Images:
    """Common properties of the stored images of some shards; a side is None where they differ.

    `channels` is the largest number, 0 without images; `converted` counts images by conversion.
    """

    height: int | None = None
    width: int | None = None
    channels: int = 0
    encodings: tuple[str, ...] = ()
    converted: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def merge(cls, parts: Sequence[Images]) -> Images:
        """Returns the common properties of several groups of images."""
        converted: Counter[str] = Counter()
        for part in parts:
            converted.update(part.converted)
        heights, widths = {part.height for part in parts}, {part.width for part in parts}
        return cls(
            heights.pop() if len(heights) == 1 else None,
            widths.pop() if len(widths) == 1 else None,
            max((part.channels for part in parts), default=0),
            tuple(sorted({encoding for part in parts for encoding in part.encodings})),
            dict(sorted(converted.items())),
        )

    @classmethod
    def from_kinds(cls, kinds: Mapping[Kind, int]) -> Images:
        """Returns the common properties of images, from the number of images of each kind."""
        return cls.merge(
            [
                cls(height, width, channels, (encoding,), dict.fromkeys(converted, count))
                for (height, width, channels, encoding, converted), count in kinds.items()
            ]
        )

    def feature(self, resize: str) -> Feature:
        """Returns the image feature of the manifest."""
        encoding = self.encodings[0] if len(self.encodings) == 1 else "image"
        return Feature("image", "uint8", (self.height, self.width, self.channels), encoding, resize)


@dataclass(frozen=True)
class Marker:
    """Facts about a completed shard; `identity` and `surveyed` are those of its plan."""

    identity: str
    surveyed: int
    shard: Shard
    labels: Mapping[str, Tally]
    images: Images


@dataclass(frozen=True)
class FoundMarker:
    """A marker that was found: the file that it is in, and where in it the shard's hashes are."""

    marker: Marker
    path: Path
    offset: int

    def hashes(self) -> Iterator[bytes]:
        """Yields the hashes, one behind the other, in blocks."""
        return blocks(self.path, self.offset, HASH_BYTES * self.marker.shard.records)


class LabelCounts:
    """Counts of label values in records, block by block; `records` is the number of records so far."""

    def __init__(self, labels: Sequence[Label]) -> None:
        self._labels = labels
        self._classes = np.zeros(len(labels[0].outputs), np.int64) if is_class(labels) else None
        self._values: dict[str, list[list[Any]]] = {label.name: [] for label in labels}
        self.records = 0

    def add(self, block: Records) -> None:
        """Counts some records."""
        self.records += block.count
        if self._classes is not None:
            self._classes += np.bincount(block.heads["label"], minlength=len(self._classes))
            return
        for entry in block.features():
            stored = parse_entries(entry)
            for name, values in self._values.items():
                values.append(stored[name][1])

    def tallies(self) -> dict[str, Tally]:
        """Returns the tally of each label; there must be at least one record."""
        if self._classes is not None:
            return {LABEL: Tally(tuple(self._classes.tolist()))}
        return {label.name: tally(label, self._values[label.name]) for label in self._labels}


def write(work: WorkDirectory, marker: Marker, hashes: bytes) -> None:
    """Writes the marker of a shard that is complete and in place, with the hashes of its contents."""
    content = b"".join((json.dumps(asdict(marker)).encode(), b"\n", hashes))
    work.add_marker(f"{marker.shard.file}.mark", content)


def load(work: WorkDirectory) -> dict[str, FoundMarker]:
    """Returns all readable markers, by the file of their shard."""
    return {found.marker.shard.file: found for found in map(_read, work.markers()) if found}


def remove_other_markers(plan: Plan, work: WorkDirectory) -> None:
    """Removes markers of other plans, before their shards are written again."""
    planned = {(shard.file, plan.identity(shard)) for shard in plan.shards}
    for path in work.markers():
        found = _read(path)
        if not found or (found.marker.shard.file, found.marker.identity) not in planned:
            work.remove_marker(path.name)


def _read(path: Path) -> FoundMarker | None:
    try:
        with path.open("rb") as file:
            line, size = file.readline(files.MAX_TEXT_BYTES), os.fstat(file.fileno()).st_size
        facts = files.parse_json(line, str(path), RunError)
        marker = deserialize.restore(Marker, facts, str(path), RunError)
    except (FileNotFoundError, RunError):  # one that cannot be read is not missing
        return None
    is_whole = size == len(line) + HASH_BYTES * marker.shard.records
    return FoundMarker(marker, path, len(line)) if is_whole else None


def tally(label: Label, values: Sequence[Sequence[Any]]) -> Tally:
    """Returns the tally of a label from its stored values in some examples, at least one."""
    table = np.asarray(values, np.float64).reshape(len(values), -1)
    if label.kind == CLASS:
        return Tally(tuple(np.bincount(table[:, 0].astype(np.int64), minlength=len(label.outputs)).tolist()))
    if label.kind == MULTILABEL:
        return Tally(tuple(int(count) for count in table.sum(axis=0)))
    columns = zip(
        *(function(table, axis=0).tolist() for function in (np.min, np.max, np.mean, np.std)), strict=True
    )
    return Tally(spreads=tuple(Spread(*numbers) for numbers in columns))


def describe(label: Label, tallies: Sequence[Tally]) -> str:
    """Describes a label in one line: "fare, regression, 3.25 to 88 USD"."""
    name = f"{label.name}, " if label.name != LABEL else ""
    if label.kind != REGRESSION:
        named = printable(", ".join(label.outputs[:5])) + (", ..." if len(label.outputs) > 5 else "")
        return f"{name}{label.kind} of {len(label.outputs):,}: {named}"
    units, spreads = label.units or ("",) * len(label.outputs), [each.spreads for each in tallies]
    ranges = [
        f"{min(each.least for each in found):g} to {max(each.largest for each in found):g} {unit}".rstrip()
        for unit, *found in zip(units, *spreads, strict=True)
    ]
    if len(ranges) == 1:
        return f"{label.outputs[0]}, {label.kind}, {ranges[0]}"
    parts = (f"{output}, {each}" for output, each in zip(label.outputs, ranges, strict=True))
    return f"{name}{label.kind} of {len(ranges)} numbers: {'; '.join(parts)}"
