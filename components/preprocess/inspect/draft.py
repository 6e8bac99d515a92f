"""Draft of a schema: what the examples of a dataset have, for a person to edit."""

from __future__ import annotations

import math
from typing import Any

from shardline.components.preprocess.inspect.profile import LONGEST_VALUE, Numbers, Profile, number_names
from shardline.components.preprocess.schema.labels import MOST_CLASSES, SHARE
from shardline.components.preprocess.schema.schema import INTEGER, LIST, MAX_MISSING, NUMBER, STRING
from shardline.trainer.data.features import CLASS, REGRESSION
from shardline.trainer.data.manifest import Manifest

# Share of the range of the numbers by which a drafted range is wider at each end.
_WIDER = 0.1
# Significant digits of a limit, relative to the range; of a constant number, to itself.
_DIGITS, _DIGITS_OF_ONE = 2, 6


def draft(manifest: Manifest, found: Profile) -> dict[str, Any]:
    """Returns a Table Schema of a dataset, labels first.

    Numbers get a range that is wider by a tenth than theirs at each end. A text of few different values (at
    most 50, and one for each ten examples) gets an enum of them. A column is required if every example has
    it; otherwise twice the share that lacks it is allowed.
    """
    numbers = found.numbers
    fields: list[dict[str, Any]] = []
    for label in manifest.labels:
        if label.kind == REGRESSION:
            names = number_names(label).items()
            fields += [_number_field(output, numbers[name], whole=False) for output, name in names]
        else:
            kind = STRING if label.kind == CLASS else LIST
            fields.append({"name": label.name, "type": kind, "constraints": {"enum": list(label.outputs)}})
    for feature in manifest.columns:
        if lengths := numbers.get(f"{feature.name} length") if feature.dtype == "string" else None:
            counts = found.categories[feature.name].counts if feature.name in found.categories else {}
            values = sorted(filter(None, counts))
            short = lengths.spread is not None and lengths.spread.largest <= LONGEST_VALUE
            few = short and 0 < len(values) <= min(MOST_CLASSES, SHARE * lengths.examples)
            constraints = {"enum": values} if few else {}
            fields.append(_draft_field(feature.name, STRING, constraints, lengths.zeros / lengths.examples))
        elif feature.name in numbers:
            fields.append(_number_field(feature.name, numbers[feature.name], whole=feature.dtype == "int64"))
    origin = f"Drafted from {manifest.records:,} examples of {manifest.source}; edit what they do not show."
    return {"description": origin, "fields": fields, "missingValues": [""]}


def _number_field(name: str, column: Numbers, *, whole: bool) -> dict[str, Any]:
    constraints: dict[str, Any] = {}
    if column.spread:
        low, high = _widened(column.spread.least, column.spread.largest, whole=whole)
        constraints |= {"minimum": low, "maximum": high}
    return _draft_field(name, INTEGER if whole else NUMBER, constraints, column.missing / column.examples)


def _draft_field(name: str, kind: str, constraints: dict[str, Any], missing: float) -> dict[str, Any]:
    if not missing:
        return {"name": name, "type": kind, "constraints": {"required": True, **constraints}}
    allowed = math.ceil(200 * missing) / 100
    share = {MAX_MISSING: allowed} if allowed < 1 else {}
    return {"name": name, "type": kind, "constraints": constraints, **share}


def _widened(least: float, largest: float, *, whole: bool) -> tuple[float, float]:
    low: float
    high: float
    margin = _WIDER * (largest - least)
    if whole:
        low, high = int(least) - math.floor(margin), int(largest) + math.floor(margin)
    else:
        unit = largest - least or abs(least) or 1.0
        decimals = (_DIGITS if margin else _DIGITS_OF_ONE) - math.floor(math.log10(unit))
        low, high = (round(limit * 10.0**decimals, 6) for limit in (least - margin, largest + margin))
        low, high = (
            round(limit / 10.0**decimals, max(decimals, 0)) for limit in (math.floor(low), math.ceil(high))
        )
    limits = (max(low, 0) if least >= 0 else low), (min(high, 0) if largest <= 0 else high)
    low, high = (int(limit) if limit == int(limit) else limit for limit in limits)
    return low, high
