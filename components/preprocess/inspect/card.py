"""Dataset card: one self-contained HTML page about a dataset, with some of its examples."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from shardline.components.html import Picture, Rows, draw_picture, fact_rows, make_picture, render
from shardline.components.preprocess.inspect import Values, first_records
from shardline.components.preprocess.inspect.columns import (
    NUMBER_TITLES,
    TEXT_TITLES,
    ColumnCounter,
    merged,
    number_row,
    text_row,
)
from shardline.components.preprocess.inspect.stats import describe_feature, header
from shardline.components.text import size
from shardline.trainer.data.features import CLASS, LABEL, MULTILABEL, REGRESSION, Feature, Label
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
_BINS_OF_COLUMN = 24


class ClassRow(NamedTuple):
    """A row of the table of classes: examples by split and in all, and against those of the largest class."""

    name: str
    counts: tuple[int, ...]
    total: int
    share: float


@dataclass(frozen=True)
class Balance:
    """Examples by class, or that have each of several labels.

    Attributes:
        title: Heading, and what a row is.
        classes: All of them, or of many the largest and the smallest.
        profile: Of many, the `d` of an SVG path for each split.
        of_classes: Whether an example has exactly one of them, not any number of labels.
    """

    title: str
    classes: list[ClassRow]
    count: int
    largest: ClassRow
    smallest: ClassRow
    profile: list[str]
    of_classes: bool


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
        pictures: Some images of each class, with their keys, by its name; "examples" where there is not one
            class.
        rows: Some examples of a dataset without images, as text.
        columns: Titles of `rows`: key, labels, then the other features.
        numbers: What is shown of each column of numbers, and the `d` of an SVG path that is its histogram.
        texts: What is shown of each column of texts.
    """

    records: int
    sizes: Mapping[tuple[int, int], int]
    pictures: Mapping[str, list[tuple[str, Picture]]]
    rows: list[list[str]]
    columns: list[str]
    numbers: list[tuple[tuple[str, ...], str]]
    texts: list[tuple[str, ...]]


def render_card(directory: Path, manifest: Manifest) -> str:
    """Renders the card of a finished dataset: an HTML page without network or script.

    The numbers are the manifest's. Sample images, and image sizes where they differ, come from the first
    records of some shards, which are a random sample: shards are written in the order of hashes. The same
    dataset gives the same page; a shard that cannot be read is a DatasetError.
    """
    balances = [_balance(label, manifest) for label in manifest.labels if label.class_names]
    drawn = [row.name for row in balances[0].classes] if manifest.is_classes else []
    sample = take_sample(directory, manifest, drawn)
    features = [
        (each.name, describe_feature(each).removeprefix(f"{each.name} ")) for each in manifest.features
    ]
    return render(
        Path(__file__).with_name("card.html.j2"),
        manifest=manifest,
        records=manifest.records,
        numbers=_numbers(manifest),
        size=size,
        balances=balances,
        spreads=list(_spreads(manifest)),
        ends=_ENDS,
        bars=_size_bars(sample.sizes),
        sample=sample,
        titles=(NUMBER_TITLES, TEXT_TITLES),
        tables=[("Settings", fact_rows(manifest.settings)), ("Features", features)],
    )


def _balance(label: Label, manifest: Manifest) -> Balance:
    counts = list(zip(*(s.labels[label.name].counts for s in manifest.splits.values()), strict=True))
    largest = max(map(sum, counts))
    rows = [
        ClassRow(name, row, sum(row), sum(row) / max(1, largest))
        for name, row in zip(label.outputs, counts, strict=True)
    ]
    by_size = sorted(rows, key=lambda row: (-row.total, row.name))
    many = len(rows) > _MOST_CLASSES
    shown = [*by_size[:_ENDS], *by_size[-_ENDS:]] if many else rows
    profile = _profile([row.counts for row in by_size]) if many else []
    title = {LABEL: "Class balance" if label.kind == CLASS else "Labels"}.get(
        label.name, f"Label {label.name}"
    )
    return Balance(title, shown, len(rows), by_size[0], by_size[-1], profile, label.kind == CLASS)


def _spreads(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    """Yields number, split, and its smallest, largest, mean value and standard deviation."""
    for label in manifest.labels:
        for place, output in enumerate(label.outputs if label.kind == REGRESSION else ()):
            unit = f" [{label.units[place]}]" if label.units and label.units[place] else ""
            for name, split in manifest.splits.items():
                values = astuple(split.labels[label.name].spreads[place])
                yield f"{output}{unit}", name, *(f"{value:.6g}" for value in values)


def _numbers(manifest: Manifest) -> Rows:
    stored = size(sum(split.bytes for split in manifest.splits.values()))
    images = [feature for feature in manifest.features if feature.name == "image"]
    return [
        ("examples", f"{manifest.records:,}"),
        *((_kind(label), f"{len(label.outputs):,}") for label in manifest.labels),
        *(("image", describe_feature(feature).removeprefix("image ")) for feature in images),
        ("stored", stored + (f", {manifest.compression}" if manifest.compression else "")),
        ("left out", f"{sum(manifest.rejected.values()):,}"),
        ("exact repeats", f"{manifest.duplicates.examples:,}"),
    ]


def _kind(label: Label) -> str:
    words = {CLASS: "classes", MULTILABEL: "labels", REGRESSION: "numbers"}[label.kind]
    return words if label.name == LABEL else f"{words} of {label.name}"


def _title(label: Label) -> str:
    """Returns what stands above a label: its own name, or where it has none the numbers'."""
    return ", ".join(label.outputs) if label.name == LABEL and label.kind == REGRESSION else label.name


def _target(values: Values, label: Label) -> str:
    """Returns a label of an example as text."""
    found = values[label.name][1]
    if label.kind == CLASS:
        return label.outputs[int(found[0])]
    if label.kind == REGRESSION:
        return ", ".join(f"{value:g}" for value in found)
    return ", ".join(name for name, there in zip(label.outputs, found, strict=True) if there)


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
    others = [feature.name for feature in manifest.columns if feature.name != manifest.moment]
    each = 6 if len(classes) <= 10 else 4
    taken, sizes, counter = 0, Counter[tuple[int, int]](), ColumnCounter(manifest, 1)
    rows: list[list[str]] = []
    pictures: dict[str, list[tuple[str, Picture]]] = {name: [] for name in classes or ("examples",)}
    for values in first_records(directory, manifest, manifest.shards, records=_RECORDS, room=_BYTES):
        taken += 1
        counter.add(values)
        key = values["key"][1][0].decode("utf-8", "replace")
        targets = [_target(values, label) for label in manifest.labels]
        if image is None:
            if len(rows) < _ROWS:
                rows.append([key, *targets, *(_text(values[other][1][0]) for other in others)])
            continue
        encoded = values["image"][1][0]
        with contextlib.suppress(SourceError):  # drawn as a box that says so
            sizes[header(encoded, image)[0][:2]] += 1
        name = targets[0] if manifest.is_classes else "examples"
        if len(pictures.get(name, [None] * each)) < each:
            pictures[name].append((key, _picture(encoded, image)))
    titles = ["class"] if manifest.is_classes else [_title(label) for label in manifest.labels]
    found = counter.found()
    numbers, texts = merged([found])
    drawn = [(number_row(each), _histogram(found["numbers"][each.name]["sample"])) for each in numbers]
    return Sample(
        taken, sizes, pictures, rows, ["key", *titles, *others], drawn, [text_row(each) for each in texts]
    )


def _histogram(values: Sequence[float]) -> str:
    """Draws how numbers are distributed, in a box of 100 x 100, as the `d` of an SVG path."""
    counts, _ = np.histogram(values, _BINS_OF_COLUMN)
    return _profile([(count,) for count in counts.tolist()])[0]


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
