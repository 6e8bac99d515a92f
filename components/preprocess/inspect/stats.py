"""Statistics: what is in the shards (labels, columns, sizes of images, records and shards), and the manifest.

`stats` reads every record; `describe` and `render_manifest` open no shard.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from shardline.components import text
from shardline.components.preprocess.inspect import columns, each_shard, opened_image, read_values
from shardline.components.preprocess.inspect.columns import NumberColumn, TextColumn
from shardline.components.preprocess.pool import Report
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.features import LABEL, REGRESSION, Feature, Label, Tally
from shardline.trainer.data.manifest import Duplicates, Manifest
from shardline.trainer.errors import DatasetError, SourceError, printable

_MOST_CLASSES = 20
_MOST_SIZES = 10
_MOST_NAMED = 10
_SUMMARY = (
    "source", "fingerprint", "features", "labels", "splits", "compression", "records_in", "records",
    "rejected", "converted", "duplicates", "anomalies", "settings",
)  # fmt: skip
_VERIFY = "'shardline dataset verify' lists all damage"

_Size = tuple[int, int, int]


@dataclass(frozen=True)
class Spread:
    """Spread of a number: minimum, median, 95th percentile, maximum and mean."""

    least: int
    median: int
    p95: int
    most: int
    mean: float


@dataclass(frozen=True)
class Stats:
    """Statistics of a dataset; what the labels are, and sizes of shards, are by split.

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
    record_bytes: Spread
    shard_bytes: dict[str, Spread]
    numbers: tuple[NumberColumn, ...] = ()
    texts: tuple[TextColumn, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the same for a program."""
        sizes = [
            {"height": height, "width": width, "channels": channels, "images": count}
            for (height, width, channels), count in self.image_sizes
        ]
        return asdict(self) | {"image_sizes": sizes}


def stats(directory: Path, *, processes: int = 0) -> Stats:
    """Reads every record, of images only the headers.

    Args:
        directory: A dataset directory.
        processes: Number of processes; 0 for one per core.

    Raises:
        DatasetError: There is no manifest, or a shard is damaged.
    """
    manifest = manifests.load(directory)
    found = each_shard(look_at_shards, directory, manifest, topic="stats", processes=processes)
    sizes, encodings, record_bytes = Counter[_Size](), Counter[str](), Counter[int]()
    for look in found.values():
        for (height, width, channels, encoding), count in look["images"]:
            sizes[height, width, channels] += count
            encodings[encoding] += count
        record_bytes.update(dict(look["record_bytes"]))
    numbers, texts = columns.merged(look["columns"] for look in found.values())
    return Stats(
        records=record_bytes.total(),
        labels=manifest.labels,
        tallies={name: split.labels for name, split in manifest.splits.items()},
        image_sizes=tuple(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))),
        encodings=dict(sorted(encodings.items())),
        record_bytes=spread(list(record_bytes.elements())),
        shard_bytes={
            name: spread([shard.bytes for shard in split.shards]) for name, split in manifest.splits.items()
        },
        numbers=tuple(numbers),
        texts=tuple(texts),
    )


def look_at_shards(given: Mapping[str, Any], items: Iterable[str], report: Report) -> dict[str, Any]:
    """Counts what is in shards: a job of the process pool, given the `directory` of the dataset.

    By shard it returns `images`: pairs of (height, width, channels, encoding) and their number,
    `record_bytes`: pairs of the size of a record and their number, and `columns`, as `ColumnCounter.found`.
    """
    directory, found = Path(given["directory"]), {}
    manifest = manifests.load(directory)
    features = [feature for feature in manifest.features if feature.encoding]
    for file in items:
        images, record_bytes = Counter[Any](), Counter[int]()
        counter = columns.ColumnCounter(manifest, len(manifest.shards))
        read = read_values(directory / file, manifest.compression, report)
        try:
            for number, (size, values) in enumerate(read):
                if isinstance(values, str):
                    raise SourceError(f"record {number:,}: {values}")
                record_bytes[size] += 1
                counter.add(values)
                for feature in features:
                    if len(values.get(feature.name, ("", ()))[1]) == 0:
                        raise DatasetError(f"{file}, record {number:,}: has no image; {_VERIFY}")
                    image_size, encoding = header(values[feature.name][1][0], feature)
                    images[*image_size, encoding] += 1
        except (SourceError, OSError) as error:
            raise DatasetError(f"{file}: {error}; {_VERIFY}") from None
        found[file] = {
            "images": list(images.items()),
            "record_bytes": list(record_bytes.items()),
            "columns": counter.found(),
        }
    return found


def spread(values: Sequence[int]) -> Spread:
    """Returns the spread of values, at least one."""
    ordered = sorted(values)

    def at(share: float) -> int:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Spread(ordered[0], at(0.5), at(0.95), ordered[-1], sum(ordered) / len(ordered))


def header(encoded: bytes, feature: Feature) -> tuple[_Size, str]:
    """Returns ((height, width, channels), encoding) of a stored image without decoding it."""
    if feature.encoding == "raw":
        height, width, channels = (side or 0 for side in feature.shape)
        return (height, width, channels), "raw"
    try:
        with opened_image(encoded, ("JPEG", "PNG")) as image:
            return (image.height, image.width, len(image.getbands())), str(image.format).lower()
    except Exception as failure:
        raise SourceError(f"cannot be read as an image: {type(failure).__name__}") from None


def render(found: Stats) -> str:
    """Returns the statistics for a person."""
    spreads = {"record": found.record_bytes}
    spreads |= {f"shard of {name}": spread for name, spread in found.shard_bytes.items()}
    byte_rows = [(name, *(f"{round(value):,}" for value in astuple(each))) for name, each in spreads.items()]
    byte_titles = ("bytes", "least", "median", "95 %", "most", "mean")
    parts = [_label_table(label, found) for label in found.labels]
    parts += [*columns.tables(found.numbers, found.texts), text.table(byte_titles, byte_rows)]
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


def _label_table(label: Label, found: Stats) -> str:
    if label.kind == REGRESSION:
        return _number_table(label, found)
    by_split = {name: tallies[label.name].counts for name, tallies in found.tallies.items()}
    totals = [sum(column) for column in zip(*by_split.values(), strict=True)]
    order = sorted(range(len(totals)), key=lambda index: (-totals[index], index))
    half = _MOST_CLASSES // 2
    shown = order if len(order) <= _MOST_CLASSES else order[:half] + order[-half:]
    rows = [
        (
            printable(label.outputs[index]),
            *(f"{counts[index]:,}" for counts in by_split.values()),
            f"{totals[index]:,}",
            f"{totals[index] / max(1, found.records):.1%}",
        )
        for index in shown
    ]
    title = "class" if label.name == LABEL else f"{label.name}, {label.kind}"
    lines = text.table((title, *by_split, "all", "share"), rows)
    if len(shown) < len(order):
        lines += f"\nthe {half} largest and {half} smallest of {len(order):,} classes"
    return lines


def _number_table(label: Label, found: Stats) -> str:
    rows = [
        (printable(output), split, *(f"{value:g}" for value in astuple(tallies[label.name].spreads[place])))
        for place, output in enumerate(label.outputs)
        for split, tallies in found.tallies.items()
    ]
    title = "number" if label.name == LABEL else label.name
    return text.table((title, "split", "least", "largest", "mean", "deviation"), rows, align="llr")


def _label_rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yields a line on each label."""
    for label in manifest.labels:
        units = label.units or ("",) * len(label.outputs)
        named = [
            f"{name} [{unit}]" if unit else name for name, unit in zip(label.outputs, units, strict=True)
        ]
        names = ", ".join(named[:_MOST_NAMED])
        more = ", ..." if len(label.outputs) > _MOST_NAMED else ""
        kind = "classes" if label.name == LABEL and label.class_names else f"{label.name}, {label.kind}"
        yield kind, f"{len(label.outputs):,}: {printable(names)}{more}"


def describe(manifest: Manifest) -> dict[str, Any]:
    """Returns a summary of the manifest as a program reads it; class names are its only long list."""
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
    """Returns a summary of the manifest for a person."""
    rejected = f", {_counted(manifest.rejected)} rejected" if manifest.rejected else ""
    settings = ", ".join(f"{name} {_short(value)}" for name, value in manifest.settings.items())
    rows = [
        ("source", printable(manifest.source)),
        ("fingerprint", manifest.fingerprint),
        ("features", ", ".join(describe_feature(feature) for feature in manifest.features)),
        *_label_rows(manifest),
        ("records", f"{manifest.records:,} of {manifest.records_in:,} in the source{rejected}"),
        ("converted", _counted(manifest.converted)),
        ("duplicates", _duplicates(manifest.duplicates)),
        *(("anomaly", printable(str(anomaly))) for anomaly in manifest.anomalies),
        ("settings", printable(settings)),
    ]
    splits = [
        (name, f"{split.records:,}", f"{len(split.shards)}", text.size(split.bytes))
        for name, split in manifest.splits.items()
    ]
    return f"{text.facts(rows)}\n\n{text.table(('split', 'records', 'shards', 'size'), splits)}"


def describe_feature(feature: Feature) -> str:
    """Returns a feature in a few words: "image 224 x 224 x 3 jpeg (crop)"."""
    words = [printable(feature.name)]
    if feature.shape:
        words.append(" x ".join("any" if side is None else str(side) for side in feature.shape))
    words.append(feature.encoding or feature.dtype)
    return " ".join(words) + (f" ({feature.resize})" if feature.resize else "")


def _counted(amounts: Mapping[str, int]) -> str:
    """Returns amounts by what they are of: "3 cmyk, 1 alpha", or "none"."""
    return printable(", ".join(f"{count:,} {what}" for what, count in amounts.items())) or "none"


def _duplicates(found: Duplicates) -> str:
    """Returns in a few words how many examples repeat others, and how many cross the splits."""
    if not found.examples:
        return "none"
    groups = f"{found.straddling:,} group{'s' if found.straddling != 1 else ''} in more than one split"
    return (
        f"{found.examples:,} repeat another example, {groups if found.straddling else 'none across splits'}"
    )


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(f"{key}={item}" for key, item in value.items()) or "none"
    return str(value) if value != "" else "none"
