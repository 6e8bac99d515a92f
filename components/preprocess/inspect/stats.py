"""Statistics of a dataset: its manifest, the classes of its labels, and the profile of a sample."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from shardline.components import text
from shardline.components.preprocess.inspect import first_records, profile
from shardline.components.preprocess.inspect.profile import BYTES, RECORDS, Profile
from shardline.trainer.base.errors import printable
from shardline.trainer.base.progress import Meter
from shardline.trainer.data.features import CLASS, LABEL, Feature, Label
from shardline.trainer.data.manifest import Manifest

_MOST_CLASSES = 20
_MOST_NAMED = 10
_SUMMARY = (
    "source", "fingerprint", "features", "labels", "splits", "records_in", "records",
    "rejected", "converted", "duplicates", "anomalies", "settings",
)  # fmt: skip


class ClassTable(NamedTuple):
    """A table of classes, of many only the largest and smallest, and a note that says so."""

    titles: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str


def stats(directory: Path, manifest: Manifest, *, whole: bool = False) -> Profile:
    """Profiles a sample of all splits of a dataset; `whole`, all examples, without their images.

    Raises DatasetError if a shard cannot be read.
    """
    limits = {} if whole else {"records": RECORDS, "max_bytes": BYTES}
    without = {manifest.time_feature, *(["image"] if whole else [])}
    report = Meter("read", manifest.records, topic="dataset").advance if whole else None
    records = first_records(directory, manifest.shards, report=report, **limits)
    measured = (profile.measure(values, manifest, without) for values in records)
    return profile.summarize(measured, {}, manifest.fingerprint, "")


def render(manifest: Manifest, found: Profile) -> str:
    """Renders the manifest, the classes and the profile of a sample as text."""
    parts = [render_manifest(manifest)]
    for label in manifest.labels:
        if label.class_names:
            titles, rows, note = class_table(label, manifest)
            table = text.table(titles, [(printable(row[0]), *row[1:]) for row in rows])
            parts.append(f"{table}\n{note}".rstrip())
    numbers, texts = profile.tables(found, manifest)
    if numbers:
        parts.append(text.table(profile.NUMBER_TITLES, list(numbers.values())))
    if texts:
        parts.append(text.table(profile.TEXT_TITLES, texts, align="lrrl"))
    return "\n\n".join(parts)


def class_table(label: Label, manifest: Manifest) -> ClassTable:
    """Returns the number of examples of each class or label, by split."""
    by_split = {name: split.labels[label.name].counts for name, split in manifest.splits.items()}
    totals = [sum(column) for column in zip(*by_split.values(), strict=True)]
    order = sorted(range(len(totals)), key=lambda index: (-totals[index], index))
    half = _MOST_CLASSES // 2
    shown = order if len(order) <= _MOST_CLASSES else order[:half] + order[-half:]
    rows = [
        (
            label.outputs[index],
            *(f"{counts[index]:,}" for counts in by_split.values()),
            f"{totals[index]:,}",
            f"{totals[index] / max(1, manifest.records):.1%}",
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
    groups = groups if found.straddling else "by chance" if found.by_chance else "none across splits"
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
