"""The mark of a shard that is done: what the manifest needs to know of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardline.trainer import files
from shardline.trainer.data.manifest import Feature, Shard


@dataclass(frozen=True)
class Images:
    """What the stored images of one or more shards have in common.

    Attributes:
        height: Of all of them in pixels, or None if they differ.
        width: Likewise.
        channels: The most that one has; 0 where there are no images.
        encodings: All that occur, sorted.
        converted: Number of images by what was done to them.
    """

    height: int | None = None
    width: int | None = None
    channels: int = 0
    encodings: tuple[str, ...] = ()
    converted: Mapping[str, int] | None = None

    @classmethod
    def of(cls, shapes: Mapping[tuple[int, int, int, str, tuple[str, ...]], int]) -> Images:
        """Returns what images have in common, given how many there are of each kind (see `StoredImage`)."""
        converted: Counter[str] = Counter()
        for (_, _, _, _, names), count in shapes.items():
            converted.update(dict.fromkeys(names, count))
        return cls(
            _common(shape[0] for shape in shapes),
            _common(shape[1] for shape in shapes),
            max((shape[2] for shape in shapes), default=0),
            tuple(sorted({shape[3] for shape in shapes})),
            dict(sorted(converted.items())),
        )

    @classmethod
    def merge(cls, parts: Iterable[Images]) -> Images:
        """Returns what the images of several shards have in common."""
        parts = list(parts)
        converted: Counter[str] = Counter()
        for part in parts:
            converted.update(part.converted or {})
        return cls(
            _common(part.height for part in parts),
            _common(part.width for part in parts),
            max((part.channels for part in parts), default=0),
            tuple(sorted({encoding for part in parts for encoding in part.encodings})),
            dict(sorted(converted.items())),
        )

    def feature(self, resize: str) -> Feature:
        """Returns the feature of the manifest."""
        encoding = self.encodings[0] if len(self.encodings) == 1 else "image"
        return Feature("image", "uint8", (self.height, self.width, self.channels), encoding, resize)


@dataclass(frozen=True)
class Mark:
    """What is known of a shard that is done.

    Attributes:
        identity: `Plan.identity` of the shard; with another one it is not done.
        surveyed: When the survey of its plan began, in nanoseconds since the epoch.
        shard: What the manifest says of the file.
        class_counts: Examples per class.
        images: What its images have in common.
    """

    identity: str
    surveyed: int
    shard: Shard
    class_counts: tuple[int, ...]
    images: Images


def save(mark: Mark, path: Path) -> None:
    """Writes a mark, whole or not at all."""
    files.write_json(path, asdict(mark))


def load(path: Path) -> Mark | None:
    """Reads a mark; None if there is none that can be read."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        images = content.pop("images")
        return Mark(
            shard=Shard(**content.pop("shard")),
            class_counts=tuple(content.pop("class_counts")),
            images=Images(**{**images, "encodings": tuple(images["encodings"])}),
            **content,
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _common(values: Iterable[int | None]) -> int | None:
    different = set(values)
    return different.pop() if len(different) == 1 else None
