"""Draft of a schema: what a finished dataset has in its columns and labels, for a person to edit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardline.components.preprocess.inspect.columns import NumberColumn, TextColumn
from shardline.components.preprocess.inspect.stats import stats
from shardline.components.preprocess.labels import MOST_CLASSES, SHARE
from shardline.components.preprocess.schema import INTEGER, LIST, MAX_MISSING, NUMBER, STRING
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.features import CLASS, MULTILABEL, Label

#: By which share of their distance the smallest and the largest number lie further apart in a schema.
_WIDER = 0.1

# Digits of a limit, of the distance between the two; of a number that is always the same, of itself.
_DIGITS, _DIGITS_OF_ONE = 2, 6


def draft(directory: Path, *, processes: int = 0) -> dict[str, Any]:
    """Returns a Table Schema of a dataset, labels first.

    Numbers get a range: the smallest and the largest one, each a tenth of their distance further out, rounded
    away from each other; numbers of which none is negative stay so, whole ones whole. A text of few different
    values (50, and one for each ten examples) gets them as an enum. A column is required where no example
    lacks it; else twice the share that does is allowed.

    Args:
        directory: A dataset directory, of which every record is read.
        processes: Number of processes; 0 for one per core.

    Raises:
        DatasetError: There is no manifest, or a shard is damaged.
    """
    manifest, found = manifests.load(directory), stats(directory, processes=processes)
    numbers = {column.name: column for column in found.numbers}
    texts = {column.name: column for column in found.texts}
    fields = [field for label in manifest.labels for field in _of_label(label, numbers)]
    for feature in manifest.columns:
        if feature.name in texts:
            fields.append(_of_text(texts[feature.name]))
        elif feature.name in numbers:
            fields.append(_of_numbers(numbers[feature.name], whole=feature.dtype == "int64"))
    origin = f"Drafted from {found.records:,} examples of {manifest.source}; edit what they do not show."
    return {
        "description": origin,
        "fields": fields,
        "missingValues": [""],
    }


def _of_label(label: Label, numbers: Mapping[str, NumberColumn]) -> Iterator[dict[str, Any]]:
    if label.kind in (CLASS, MULTILABEL):
        kind = STRING if label.kind == CLASS else LIST
        yield {"name": label.name, "type": kind, "constraints": {"enum": list(label.outputs)}}
    else:
        yield from (_of_numbers(numbers[output], whole=False) for output in label.outputs)


def _of_text(column: TextColumn) -> dict[str, Any]:
    constraints: dict[str, Any] = {}
    if 0 < len(column.values) <= min(MOST_CLASSES, SHARE * column.examples):
        constraints["enum"] = list(column.values)
    return _field(column.name, STRING, constraints, column.empty / column.examples)


def _of_numbers(column: NumberColumn, *, whole: bool) -> dict[str, Any]:
    constraints: dict[str, Any] = {}
    if column.spread:
        low, high = _widened(column.spread.least, column.spread.largest, whole=whole)
        constraints |= {"minimum": low, "maximum": high}
    return _field(column.name, INTEGER if whole else NUMBER, constraints, column.missing / column.examples)


def _field(name: str, kind: str, constraints: dict[str, Any], missing: float) -> dict[str, Any]:
    if not missing:
        return {"name": name, "type": kind, "constraints": {"required": True, **constraints}}
    allowed = math.ceil(200 * missing) / 100
    return {
        "name": name,
        "type": kind,
        "constraints": constraints,
        **({MAX_MISSING: allowed} if allowed < 1 else {}),
    }


def _widened(least: float, largest: float, *, whole: bool) -> tuple[float, float]:
    low: float
    high: float
    margin = _WIDER * (largest - least)
    if whole:
        low, high = int(least) - math.floor(margin), int(largest) + math.floor(margin)
    else:
        unit = largest - least or abs(least) or 1.0
        places = (_DIGITS if margin else _DIGITS_OF_ONE) - math.floor(math.log10(unit))
        low, high = (round(limit * 10.0**places, 6) for limit in (least - margin, largest + margin))
        low, high = (
            round(limit / 10.0**places, max(places, 0)) for limit in (math.floor(low), math.ceil(high))
        )
    limits = (max(low, 0) if least >= 0 else low), (min(high, 0) if largest <= 0 else high)
    low, high = (int(limit) if limit == int(limit) else limit for limit in limits)
    return low, high
