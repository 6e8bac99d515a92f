"""Statistics of the shards (labels, columns, sizes of images and records), and summaries of the manifest.

`stats` reads every record; `describe` and `render_manifest` read no shard.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardline.components import text
from shardline.components.preprocess.inspect import columns, each_shard, image_kind, read_values
from shardline.components.preprocess.inspect.columns import NumberColumn, TextColumn
from shardline.components.preprocess.process_pool import Report
from shardline.trainer.base.errors import DatasetError, SourceError, printable
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.features import CLASS, LABEL, Feature, Label, Tally
from shardline.trainer.data.manifest import Manifest

_MOST_CLASSES = 20
_MOST_SIZES = 10
_MOST_NAMED = 10
# Sizes of a shard's records from which quantiles are computed.
_KEPT_SIZES = 1000
_SUMMARY = (
    "source", "fingerprint", "features", "labels", "splits", "compression", "records_in", "records",
    "rejected", "converted", "duplicates", "anomalies", "settings",
)  # fmt: skip

#: Height, width and channels of an image.
_Size = tuple[int, int, int]


@dataclass(frozen=True)
class Stats:
    """Statistics of a dataset; those of the labels (`tallies`) are by split.

    Attributes:
        image_sizes: Images by (height, width, channels), the most frequent first; none without images.
        encodings: Images by how they are stored.
        record_bytes: Size of a serialized example.
        numbers: Columns of numbers, labels that are numbers first.
        texts: Columns of text.
    """

    records: int
    labels: tuple[Label, ...]
    tallies: dict[str, Mapping[str, Tally]]
    image_sizes: tuple[tuple[_Size, int], ...]
    encodings: dict[str, int]
    record_bytes: NumberColumn
    numbers: tuple[NumberColumn, ...] = ()
    texts: tuple[TextColumn, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the statistics as JSON."""
        sizes = [
            {"height": height, "width": width, "channels": channels, "images": count}
            for (height, width, channels), count in self.image_sizes
        ]
        return asdict(self) | {"image_sizes": sizes}


class ClassTable(NamedTuple):
    """A table of classes, of many only the largest and smallest, and a note that says so."""

    titles: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str


def stats(directory: Path, *, processes: int = 0) -> Stats:
    """Reads every record, but only the headers of images, by `processes` processes, 0 for one per core.

    Raises DatasetError if there is no manifest, or a shard is damaged.
    """
    manifest = manifests.load(directory)
    found = each_shard(count_shards, directory, manifest, topic="stats", processes=processes)
    sizes, encodings = Counter[_Size](), Counter[str]()
    for shard in found.values():
        for (height, width, channels, encoding), count in shard["images"]:
            sizes[height, width, channels] += count
            encodings[encoding] += count
    numbers, texts = columns.merge_columns(shard["columns"] for shard in found.values())
    record_bytes = columns.number_column("record", [shard["record_bytes"] for shard in found.values()])
    return Stats(
        records=record_bytes.examples,
        labels=manifest.labels,
        tallies={name: split.labels for name, split in manifest.splits.items()},
        image_sizes=tuple(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))),
        encodings=dict(sorted(encodings.items())),
        record_bytes=record_bytes,
        numbers=tuple(numbers),
        texts=tuple(texts),
    )


def count_shards(arguments: Mapping[str, Any], items: Iterable[str], report: Report) -> dict[str, Any]:
    """Counts the contents of shards, a job of the process pool whose argument is the `directory`.

    It returns for each shard `images`, pairs of `image_kind` and its number, `record_bytes` and `columns`.
    """
    directory, found = Path(arguments["directory"]), {}
    remedy = f"'shardline dataset verify {directory}' lists all damage"
    manifest = manifests.load(directory)
    features = [feature for feature in manifest.features if feature.encoding]
    for file in items:
        images, record_bytes = Counter[Any](), columns.NumberCounter(_KEPT_SIZES)
        counter = columns.ColumnCounter(manifest, len(manifest.shards))
        read = read_values(directory / file, manifest.compression, report)
        try:
            for number, (size, values) in enumerate(read):
                if isinstance(values, str):
                    raise SourceError(f"record {number:,}: {values}")
                record_bytes.add(size)
                counter.add(values)
                for feature in features:
                    if len(values.get(feature.name, ("", ()))[1]) == 0:
                        raise DatasetError(f"{file}, record {number:,}: has no image; {remedy}")
                    images[image_kind(values[feature.name][1][0], feature)] += 1
        except (SourceError, OSError) as error:
            raise DatasetError(f"{file}: {error}; {remedy}") from None
        found[file] = {
            "images": list(images.items()),
            "record_bytes": record_bytes.found(),
            "columns": counter.found(),
        }
    return found


def render(found: Stats) -> str:
    """Renders the statistics as text."""
    parts = []
    for label in found.labels:
        if label.class_names:
            titles, rows, note = class_table(label, found.tallies, found.records)
            table = text.table(titles, [(printable(row[0]), *row[1:]) for row in rows])
            parts.append(f"{table}\n{note}".rstrip())
    if found.numbers:
        parts.append(text.table(columns.NUMBER_TITLES, [columns.number_row(each) for each in found.numbers]))
    if found.texts:
        parts.append(
            text.table(columns.TEXT_TITLES, [columns.text_row(each) for each in found.texts], align="lrrl")
        )
    byte_row = columns.number_row(found.record_bytes, text.size)[:-2]
    parts.append(text.table(("bytes", *columns.NUMBER_TITLES[1:-2]), [byte_row]))
    if found.image_sizes:
        shown = found.image_sizes[:_MOST_SIZES]
        rows = [
            (f"{h} x {w} x {c}", f"{count:,}", f"{count / found.records:.1%}") for (h, w, c), count in shown
        ]
        if len(found.image_sizes) > len(shown):
            others = sum(count for _, count in found.image_sizes[_MOST_SIZES:])
            rest = len(found.image_sizes) - len(shown)
            rows.append((f"{rest:,} other sizes", f"{others:,}", f"{others / found.records:.1%}"))
        parts.append(text.table(("image size", "images", "share"), rows))
        parts.append("stored as " + ", ".join(f"{name} {n:,}" for name, n in found.encodings.items()))
    return "\n\n".join(parts)


def class_table(label: Label, tallies: Mapping[str, Mapping[str, Tally]], records: int) -> ClassTable:
    """Returns the number of examples of each class or label, by split (`Stats.tallies`)."""
    by_split = {name: of_split[label.name].counts for name, of_split in tallies.items()}
    totals = [sum(column) for column in zip(*by_split.values(), strict=True)]
    order = sorted(range(len(totals)), key=lambda index: (-totals[index], index))
    half = _MOST_CLASSES // 2
    shown = order if len(order) <= _MOST_CLASSES else order[:half] + order[-half:]
    rows = [
        (
            label.outputs[index],
            *(f"{counts[index]:,}" for counts in by_split.values()),
            f"{totals[index]:,}",
            f"{totals[index] / max(1, records):.1%}",
        )
        for index in shown
    ]
    title = f"{label.name}, {label.kind}"
    if label.name == LABEL:
        title = "class" if label.kind == CLASS else LABEL
    note = (
        f"the {half} largest and {half} smallest of {len(order):,} classes" if len(shown) < len(order) else ""
    )
    return ClassTable((title, *by_split, "all", "share"), rows, note)


def describe(manifest: Manifest) -> dict[str, Any]:
    """Returns a summary of the manifest as JSON; class names are its only long list."""
    splits = {
        name: {
            "records": split.records,
            "shards": len(split.shards),
            "bytes": split.bytes,
            "labels": {name: asdict(tally) for name, tally in split.labels.items()},
        }
        for name, split in manifest.splits.items()
    }
    content = asdict(manifest)
    content["features"] = {feature.pop("name"): feature for feature in content["features"]}
    content["duplicates"].pop("named")
    content |= {"splits": splits, "records": manifest.records}
    summary: dict[str, Any] = json.loads(json.dumps({name: content[name] for name in _SUMMARY}))
    return summary


def render_manifest(manifest: Manifest) -> str:
    """Renders a summary of the manifest as text."""
    rejected = f", {_counted(manifest.rejected)} rejected" if manifest.rejected else ""
    found = manifest.duplicates
    groups = f"{found.straddling:,} group{'s' if found.straddling != 1 else ''} in more than one split"
    groups = groups if found.straddling else "none across splits"
    duplicates = f"{found.examples:,} repeat another example, {groups}" if found.examples else "none"
    labels = []
    for label in manifest.labels:
        units = label.units or ("",) * len(label.outputs)
        names = [
            f"{name} [{unit}]" if unit else name for name, unit in zip(label.outputs, units, strict=True)
        ]
        more = ", ..." if len(names) > _MOST_NAMED else ""
        kind = "classes" if label.name == LABEL and label.class_names else f"{label.name}, {label.kind}"
        labels.append((kind, f"{len(names):,}: {printable(', '.join(names[:_MOST_NAMED]))}{more}"))
    settings = {
        name: "/".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else value
        for name, value in manifest.settings.items()
    }
    shown = ", ".join(f"{name} {'none' if value == '' else value}" for name, value in settings.items())
    rows = [
        ("source", printable(manifest.source)),
        ("fingerprint", manifest.fingerprint),
        ("features", ", ".join(describe_feature(feature) for feature in manifest.features)),
        *labels,
        ("records", f"{manifest.records:,} of {manifest.records_in:,} in the source{rejected}"),
        ("converted", _counted(manifest.converted)),
        ("duplicates", duplicates),
        *(("anomaly", printable(str(anomaly))) for anomaly in manifest.anomalies),
        ("settings", printable(shown)),
    ]
    splits = [
        (name, f"{split.records:,}", f"{len(split.shards)}", text.size(split.bytes))
        for name, split in manifest.splits.items()
    ]
    return f"{text.facts(rows)}\n\n{text.table(('split', 'records', 'shards', 'size'), splits)}"


def describe_feature(feature: Feature) -> str:
    """Describes a feature: "image 224 x 224 x 3 jpeg (crop)"."""
    parts = [printable(feature.name)]
    if feature.shape:
        parts.append(" x ".join("any" if side is None else str(side) for side in feature.shape))
    parts.append(feature.encoding or feature.dtype)
    return " ".join(parts) + (f" ({feature.resize})" if feature.resize else "")


def _counted(amounts: Mapping[str, int]) -> str:
    """Formats counts by name: "3 cmyk, 1 alpha", or "none"."""
    return printable(", ".join(f"{count:,} {what}" for what, count in amounts.items())) or "none"
