"""The plan of a dataset as a file, which every process and task that writes shards reads.

Places: the few files and directories that the images of a dataset are in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardline.components.preprocess.images.codec import Codec
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer import files
from shardline.trainer.data.manifest import Feature
from shardline.trainer.errors import RunError, SourceError

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


#: Part of every shard's identity: raised when the same plan is written as other bytes.
_WRITER_VERSION = 1


@dataclass(frozen=True)
class PlannedShard:
    """One shard before it is written.

    Attributes:
        file: Name of the file.
        split: Name of its split.
        records: Number of examples.
        rows: Hash of its rows.
    """

    file: str
    split: str
    records: int
    rows: str


@dataclass(frozen=True)
class Plan:
    """What is to be written.

    Attributes:
        settings: How.
        class_names: Name of each class.
        features: Further features of every example, beside image, label and key.
        places: Where the images are.
        surveyed: When the survey began, in nanoseconds since the epoch.
        records_in: Examples that the source has.
        rejected: Number of examples left out, by reason.
        shards: All shards of all splits.
    """

    settings: PreprocessSettings
    class_names: tuple[str, ...]
    features: tuple[Feature, ...]
    places: tuple[Place, ...]
    surveyed: int
    records_in: int
    rejected: Mapping[str, int]
    shards: tuple[PlannedShard, ...]

    @property
    def records(self) -> int:
        """Number of examples that are written."""
        return sum(shard.records for shard in self.shards)

    def make_codec(self) -> Codec:
        """Returns the codec of the dataset's images."""
        settings = self.settings
        return Codec(
            image_size=settings.image_size,
            resize_mode=settings.resize_mode,
            encoding=settings.encoding,
            max_pixels=settings.max_pixels,
        )

    def identity(self, shard: PlannedShard) -> str:
        """Returns a hash of all that shapes the bytes of a shard, but for the content of the images."""
        settings = self.settings
        text = json.dumps(
            [
                _WRITER_VERSION,
                shard.file,
                shard.rows,
                settings.image_size,
                settings.resize_mode,
                settings.encoding,
                settings.compression,
                settings.max_pixels,
                len(self.class_names),
                # The spool is made anew by every survey; its rows carry checksums.
                [asdict(place) for place in self.places],
            ]
        )
        return xxhash.xxh3_128_hexdigest(text.encode())


def save(plan: Plan, path: Path) -> None:
    """Writes a plan, whole or not at all."""
    # Paths may have bytes that are no UTF-8: as escapes they survive.
    files.write_bytes(path, json.dumps(asdict(plan)).encode())


def load(path: Path) -> Plan:
    """Reads a plan.

    Raises:
        RunError: There is none.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(
            f"no plan in {path.parent}: plan the dataset first, or again if it is complete"
        ) from None
    features = content.pop("features")
    return Plan(
        settings=PreprocessSettings(**content.pop("settings")),
        class_names=tuple(content.pop("class_names")),
        features=tuple(Feature(**{**item, "shape": tuple(item["shape"])}) for item in features),
        places=tuple(Place(**item) for item in content.pop("places")),
        shards=tuple(PlannedShard(**item) for item in content.pop("shards")),
        **content,
    )
