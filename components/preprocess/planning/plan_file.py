"""The plan of a dataset as a file, which every process and task that writes shards reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardline.components.preprocess.images.codec import Codec
from shardline.components.preprocess.planning.places import Place
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer import files
from shardline.trainer.data.manifest import Feature
from shardline.trainer.errors import RunError

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
