"""The dataset card: one self-contained HTML page about a dataset, for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.components.html.page import Rows, fact_rows, render
from shardline.components.preprocess.inspect.info import describe_feature
from shardline.components.preprocess.inspect.sample import take_sample
from shardline.components.preprocess.inspect.text import size
from shardline.trainer.data.manifest import Manifest

#: Up to this many classes, each has a row; of more, the largest and the smallest have one.
_MOST_CLASSES = 40
_ENDS = 10
_MOST_BARS = 500
_BINS = 10


@dataclass(frozen=True)
class ClassRow:
    """One class in the table of classes.

    Attributes:
        name: Of the class.
        counts: Its examples by split.
        total: Its examples in all splits.
        share: `total` against that of the largest class, 0..1.
    """

    name: str
    counts: tuple[int, ...]
    total: int
    share: float


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram.

    Attributes:
        name: What it counts.
        count: How many.
        share: `count` against that of the longest bar, 0..1.
    """

    name: str
    count: int
    share: float


def render_card(directory: Path, manifest: Manifest) -> str:
    """Renders the card of a finished dataset.

    The numbers are the manifest's. Sample images, and image sizes where they differ, come from the first
    records of every shard, which are a random sample: shards are written in the order of hashes.

    Args:
        directory: The dataset directory.
        manifest: Its manifest.

    Returns:
        An HTML page without network or script. The same dataset gives the same page.

    Raises:
        DatasetError: A shard cannot be read.
    """
    rows = _class_rows(manifest)
    by_size = sorted(rows, key=lambda row: (-row.total, row.name))
    shown = rows if len(rows) <= _MOST_CLASSES else [*by_size[:_ENDS], *by_size[-_ENDS:]]
    sample = take_sample(directory, manifest, [row.name for row in shown])
    return render(
        Path(__file__).with_name("card.html.j2"),
        manifest=manifest,
        records=sum(row.total for row in rows),
        numbers=_numbers(manifest),
        splits=_split_rows(manifest),
        classes=shown,
        ends=_ENDS,
        largest=by_size[0],
        smallest=by_size[-1],
        profile=_profile([row.counts for row in by_size]) if len(rows) > _MOST_CLASSES else [],
        bars=_size_bars(sample.sizes),
        sample=sample,
        tables=[("Settings", fact_rows(manifest.settings)), ("Features", _feature_rows(manifest))],
    )


def _class_rows(manifest: Manifest) -> list[ClassRow]:
    counts = list(zip(*(split.class_counts for split in manifest.splits.values()), strict=True))
    largest = max(map(sum, counts))
    return [
        ClassRow(name, row, sum(row), sum(row) / max(1, largest))
        for name, row in zip(manifest.class_names, counts, strict=True)
    ]


def _numbers(manifest: Manifest) -> Rows:
    stored = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    images = [feature for feature in manifest.features if feature.name == "image"]
    return [
        ("examples", f"{sum(split.records for split in manifest.splits.values()):,}"),
        ("classes", f"{len(manifest.class_names):,}"),
        *(("image", describe_feature(feature).removeprefix("image ")) for feature in images),
        ("stored", size(stored) + (f", {manifest.compression}" if manifest.compression else "")),
        ("left out", f"{sum(manifest.rejected.values()):,}"),
        ("exact repeats", f"{manifest.duplicates.examples:,}"),
    ]


def _split_rows(manifest: Manifest) -> list[dict[str, Any]]:
    total = sum(split.records for split in manifest.splits.values())
    return [
        {
            "name": name,
            "records": split.records,
            "share": split.records / max(1, total),
            "shards": len(split.shards),
            "per_shard": " to ".join(f"{n:,}" for n in sorted({shard.records for shard in split.shards})),
            "size": size(sum(shard.bytes for shard in split.shards)),
        }
        for name, split in manifest.splits.items()
    ]


def _profile(counts: Sequence[tuple[int, ...]]) -> list[str]:
    """Draws classes as stacked bars in a box of 100 x 100, largest class first.

    Args:
        counts: Examples by class and split.

    Returns:
        The `d` of an SVG path for each split.
    """
    step = max(1, -(-len(counts) // _MOST_BARS))
    groups = [counts[i : i + step] for i in range(0, len(counts), step)]
    bars = [[sum(column) / len(group) for column in zip(*group, strict=True)] for group in groups]
    width, tallest = 100 / len(bars), max(1.0, max(map(sum, bars)))
    paths = [""] * len(bars[0])
    for index, bar in enumerate(bars):
        floor = 100.0
        for split, amount in enumerate(bar):
            height = 100 * amount / tallest
            floor -= height
            paths[split] += f"M{index * width:.2f} {floor:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}z"
    return paths


def _size_bars(sizes: Mapping[tuple[int, int], int]) -> list[Bar]:
    """Counts images by their shorter side: each side by itself, or in ranges where there are many."""
    sides = [min(key) for key in sizes]
    step = max(1, -(-(max(sides, default=0) - min(sides, default=0) + 1) // _BINS))
    counts: dict[int, int] = {}
    for (height, width), count in sizes.items():
        start = min(sides) + (min(height, width) - min(sides)) // step * step
        counts[start] = counts.get(start, 0) + count
    return [
        Bar(
            f"{start:,} px" if step == 1 else f"{start:,} to {start + step - 1:,} px",
            count,
            count / max(counts.values()),
        )
        for start, count in sorted(counts.items())
    ]


def _feature_rows(manifest: Manifest) -> Rows:
    return [
        (feature.name, describe_feature(feature).removeprefix(f"{feature.name} "))
        for feature in manifest.features
    ]
