"""Dataset card: one self-contained HTML page about a dataset, with some of its examples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from shardline.components.html import Picture, Rows, fact_rows, make_picture, render_page
from shardline.components.preprocess.inspect import Columns, profile, read_sample, text
from shardline.components.text import hide_directories, size, truncate
from shardline.trainer.manifest import CLASS, LABEL, MULTILABEL, REGRESSION, Feature, Label, Manifest

_SIDE = 96
_ROWS, _LONGEST = 10, 300
# A sample of more columns has a row for each of them, and fewer examples.
_ACROSS, _EXAMPLES_ACROSS = 8, 4
_BINS = 24


def render_card(directory: Path, manifest: Manifest) -> str:
    """Renders the card of a finished dataset: an HTML page without network or script.

    The numbers are the manifest's. Sample images and columns are from the first records of some shards, a
    random sample as shards are written in the order of hashes. The same dataset gives the same page. Raises
    DatasetError if a shard cannot be read.
    """
    tables = [profile.class_table(label, manifest) for label in manifest.labels if label.class_names]
    drawn = [row[0] for row in tables[0].rows] if manifest.is_classes else []
    features = [
        (each.name, profile.describe_feature(each).removeprefix(f"{each.name} "))
        for each in manifest.features
    ]
    settings = [(name, hide_directories(value)) for name, value in fact_rows(manifest.settings)]
    # Number, split, and its smallest, largest, mean value and standard deviation.
    spreads = []
    for label in (label for label in manifest.labels if label.kind == REGRESSION):
        for index, output in enumerate(label.outputs):
            unit = f" [{label.units[index]}]" if label.units and label.units[index] else ""
            for name, split in manifest.splits.items():
                values = astuple(split.labels[label.name].spreads[index])
                spreads.append((f"{output}{unit}", name, *(f"{value:,.6g}" for value in values)))
    return render_page(
        Path(__file__).with_name("card.html.j2"),
        manifest=manifest,
        public=hide_directories,
        records=manifest.records,
        numbers=_numbers(manifest),
        size=size,
        classes=tables,
        spreads=spreads,
        sample=_take_sample(directory, manifest, drawn),
        titles=(profile.NUMBER_TITLES, profile.TEXT_TITLES),
        uncounted=[
            each.name for each in manifest.columns if each.shape or each.name == manifest.time_feature
        ],
        tables=[("Settings", settings), ("Features", features)],
    )


def _numbers(manifest: Manifest) -> Rows:
    images = [feature for feature in manifest.features if feature.name == "image"]
    names = {CLASS: "classes", MULTILABEL: "labels", REGRESSION: "numbers"}
    return [
        ("examples", f"{manifest.records:,}"),
        *(
            (
                names[label.kind] + ("" if label.name == LABEL else f" of {label.name}"),
                f"{len(label.outputs):,}",
            )
            for label in manifest.labels
        ),
        *(("image", profile.describe_feature(feature).removeprefix("image ")) for feature in images),
        ("stored", size(sum(split.bytes for split in manifest.splits.values()))),
        ("left out", f"{sum(manifest.rejected.values()):,}"),
        ("exact repeats", f"{manifest.duplicates.examples:,}"),
    ]


def _targets(columns: Columns, label: Label) -> list[str]:
    rows = columns[label.name].to_pylist()
    if label.kind == CLASS:
        return [label.outputs[index] for (index,) in rows]
    if label.kind == REGRESSION:
        return [", ".join(map(text, row)) for row in rows]
    return [", ".join(name for name, has in zip(label.outputs, row, strict=True) if has) for row in rows]


def _take_sample(directory: Path, manifest: Manifest, classes: Collection[str]) -> dict[str, Any]:
    """Reads the first records of some shards, about 2,000 in all, as a sample for the template.

    Returns their number `records`; some `pictures` with their keys by class, of the named ones, or "examples"
    without classes; without images some examples as `rows` below `columns`; and the table rows of columns of
    `numbers`, with histograms, and of `texts`.
    """
    image = next((feature for feature in manifest.features if feature.name == "image"), None)
    others = [feature.name for feature in manifest.columns if feature.name != manifest.time_feature]
    each, records = 6 if len(classes) <= 10 else 4, 0
    measured, rows = list[Mapping[str, Any]](), list[list[str]]()
    pictures: dict[str, list[tuple[str, Picture]]] = {name: [] for name in classes or ("examples",)}
    for columns in read_sample(directory, manifest, manifest.shards):
        measured.append(profile.measure(columns, manifest, {manifest.time_feature}))
        keys = [text(key) for (key,) in columns["key"].to_pylist()]
        records += len(keys)
        targets = [_targets(columns, label) for label in manifest.labels]
        if image is None:
            shown = (columns[name].slice(0, _ROWS).to_pylist() for name in others)
            cells = ([", ".join(map(text, row)) for row in values] for values in shown)
            found = zip(keys, *targets, *cells, strict=False)
            rows += [[truncate(cell, _LONGEST) for cell in row] for row in found][: _ROWS - len(rows)]
            continue
        names = targets[0] if manifest.is_classes else ["examples"] * len(keys)
        for key, name, encoded in zip(keys, names, columns["image"].flatten(), strict=True):
            if len(pictures.get(name, [None] * each)) < each:
                pictures[name].append((key, _picture(encoded.as_py(), image)))
    # A regression label without a name of its own has the names of its outputs.
    titles = [
        ", ".join(label.outputs) if label.name == LABEL and label.kind == REGRESSION else label.name
        for label in manifest.labels
    ]
    heads = ["key", *(["class"] if manifest.is_classes else titles), *others]
    if rows and len(heads) > _ACROSS:
        heads, *rows = map(list, zip(heads, *rows[:_EXAMPLES_ACROSS], strict=True))
    profiled = profile.summarize(measured, {})
    numbers, texts = profile.tables(profiled, manifest, "{:,.6g}".format)
    return {
        "records": records,
        "pictures": pictures,
        "rows": rows,
        "columns": heads,
        "numbers": [(row, _histogram(profiled.numbers[name].values)) for name, row in numbers.items()],
        "texts": texts,
    }


def _histogram(values: Sequence[float | None]) -> str:
    """Draws a histogram of numbers, in a box of 100 x 100, as the `d` of an SVG path."""
    counts = np.histogram([value for value in values if value is not None], _BINS)[0]
    heights, width = 100 * counts / max(1, counts.max()), 100 / _BINS
    return "".join(
        f"M{index * width:.2f} {100 - height:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}z"
        for index, height in enumerate(heights.tolist())
    )


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
    return make_picture(pixels, _SIDE)
