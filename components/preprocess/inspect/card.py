"""Dataset card: one self-contained HTML page about a dataset, with some of its examples."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw

from shardline.components.html import Picture, Rows, draw_picture, fact_rows, make_picture, render
from shardline.components.preprocess.inspect import first_records
from shardline.components.preprocess.inspect.stats import describe_feature, header
from shardline.components.text import size
from shardline.trainer.data.features import Feature
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import SourceError

_RECORDS = 2048
_BYTES = 64 << 20
_SIDE = 96
_ROWS = 10

#: Up to this many classes, each has a row; of more, the largest and the smallest have one.
_MOST_CLASSES = 40
_ENDS = 10
_MOST_BARS = 500
_BINS = 10


class ClassRow(NamedTuple):
    """A row of the table of classes: examples by split and in all, and against those of the largest class."""

    name: str
    counts: tuple[int, ...]
    total: int
    share: float


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram: what it counts, how many, and that against the longest bar."""

    name: str
    count: int
    share: float


@dataclass(frozen=True)
class Sample:
    """Examples from shards of a dataset.

    Attributes:
        records: Number of examples looked at.
        sizes: Images by (height, width).
        pictures: Some images of each class, with their keys, by the name of the class.
        rows: Some examples of a dataset without images, as text.
        columns: Titles of `rows`: key, class, then the other features.
    """

    records: int
    sizes: Mapping[tuple[int, int], int]
    pictures: Mapping[str, list[tuple[str, Picture]]]
    rows: list[list[str]]
    columns: list[str]


def render_card(directory: Path, manifest: Manifest) -> str:
    """Renders the card of a finished dataset: an HTML page without network or script.

    The numbers are the manifest's. Sample images, and image sizes where they differ, come from the first
    records of some shards, which are a random sample: shards are written in the order of hashes. The same
    dataset gives the same page; a shard that cannot be read is a DatasetError.
    """
    rows = _class_rows(manifest)
    by_size = sorted(rows, key=lambda row: (-row.total, row.name))
    shown = rows if len(rows) <= _MOST_CLASSES else [*by_size[:_ENDS], *by_size[-_ENDS:]]
    sample = take_sample(directory, manifest, [row.name for row in shown])
    features = [
        (each.name, describe_feature(each).removeprefix(f"{each.name} ")) for each in manifest.features
    ]
    return render(
        Path(__file__).with_name("card.html.j2"),
        manifest=manifest,
        records=manifest.records,
        numbers=_numbers(manifest),
        size=size,
        classes=shown,
        ends=_ENDS,
        largest=by_size[0],
        smallest=by_size[-1],
        profile=_profile([row.counts for row in by_size]) if len(rows) > _MOST_CLASSES else [],
        bars=_size_bars(sample.sizes),
        sample=sample,
        tables=[("Settings", fact_rows(manifest.settings)), ("Features", features)],
    )


def _class_rows(manifest: Manifest) -> list[ClassRow]:
    counts = list(zip(*(split.class_counts for split in manifest.splits.values()), strict=True))
    largest = max(map(sum, counts))
    return [
        ClassRow(name, row, sum(row), sum(row) / max(1, largest))
        for name, row in zip(manifest.class_names, counts, strict=True)
    ]


def _numbers(manifest: Manifest) -> Rows:
    stored = size(sum(split.bytes for split in manifest.splits.values()))
    images = [feature for feature in manifest.features if feature.name == "image"]
    return [
        ("examples", f"{manifest.records:,}"),
        ("classes", f"{len(manifest.class_names):,}"),
        *(("image", describe_feature(feature).removeprefix("image ")) for feature in images),
        ("stored", stored + (f", {manifest.compression}" if manifest.compression else "")),
        ("left out", f"{sum(manifest.rejected.values()):,}"),
        ("exact repeats", f"{manifest.duplicates.examples:,}"),
    ]


def _profile(counts: Sequence[tuple[int, ...]]) -> list[str]:
    """Draws classes, given as examples by class and split, as stacked bars in a box of 100 x 100.

    It returns the `d` of an SVG path for each split.
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
    sides = Counter[int]()
    for height_and_width, count in sizes.items():
        sides[min(height_and_width)] += count
    least = min(sides, default=0)
    step = max(1, -(-(max(sides, default=0) - least + 1) // _BINS))
    counts = Counter[int]()
    for side, count in sides.items():
        counts[least + (side - least) // step * step] += count
    return [
        Bar(
            f"{start:,} px" if step == 1 else f"{start:,} to {start + step - 1:,} px",
            count,
            count / max(counts.values()),
        )
        for start, count in sorted(counts.items())
    ]


def take_sample(directory: Path, manifest: Manifest, classes: Collection[str]) -> Sample:
    """Looks at the first records of some shards, of a large dataset at about 2,000 in all.

    Images are taken of the classes that are named.
    """
    image = next((feature for feature in manifest.features if feature.name == "image"), None)
    others = [f.name for f in manifest.features if f.name not in ("image", "label", "key")]
    each = 6 if len(classes) <= 10 else 4
    taken, sizes = 0, Counter[tuple[int, int]]()
    rows: list[list[str]] = []
    pictures: dict[str, list[tuple[str, Picture]]] = {name: [] for name in classes}
    for values in first_records(directory, manifest, manifest.shards, records=_RECORDS, room=_BYTES):
        taken += 1
        key = values["key"][1][0].decode("utf-8", "replace")
        name = manifest.class_names[values["label"][1][0]]
        if image is None:
            if len(rows) < _ROWS:
                rows.append([key, name, *(_text(values[other][1][0]) for other in others)])
            continue
        encoded = values["image"][1][0]
        with contextlib.suppress(SourceError):  # drawn as a box that says so
            sizes[header(encoded, image)[0][:2]] += 1
        if len(pictures.get(name, [None] * each)) < each:
            pictures[name].append((key, _picture(encoded, image)))
    return Sample(taken, sizes, pictures, rows, ["key", "class", *others])


def _picture(encoded: bytes, image: Feature) -> Picture:
    """Draws an image of a record; one that cannot be decoded as a box that says so."""
    try:
        if image.encoding != "raw":
            return make_picture(encoded, _SIDE)
        height, width, channels = (side or 0 for side in image.shape)
        pixels = Image.frombytes("L" if channels == 1 else "RGB", (width, height), encoded)
    except Exception:  # Pillow's decoders raise OSError, SyntaxError, ValueError and more
        pixels = Image.new("L", (_SIDE, _SIDE // 2), 224)
        ImageDraw.Draw(pixels).multiline_text((8, 8), "cannot be\ndecoded", fill=96)
    return draw_picture(pixels, _SIDE)


def _text(value: bytes | int | float) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else f"{value:g}"
