"""Splits by time: training before validation before test, by a column of times."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from shardline.trainer.base.errors import SettingsError, SourceError
from shardline.trainer.data.features import SPLIT_TIME_FEATURES

_UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND, _DAY = datetime.timedelta(microseconds=1), 86_400_000_000
_SECONDS = (100_000_000, 10_000_000_000)  # since 1970: 1973 to 2286; excludes milliseconds and 20261123
_GAP = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


def parse_gap(text: str) -> float:
    """Returns a gap in seconds, from "7d", "36h", "90m" or "30s", or a plain number; raises SettingsError."""
    match = _GAP.fullmatch(text)
    if text and not match:
        raise SettingsError(f"split_gap {text!r} is no duration; give 7d, 36h, 90m, 30s or a number")
    return float(match[1]) * _UNITS.get(match[2], 1.0) if match else 0.0


def time_feature(kind: str) -> str:
    """Returns the feature, of `SPLIT_TIME_FEATURES`, that holds the times of a column of this type."""
    return {"int64": "split_number", "float32": "split_number_millionths"}.get(kind, "split_time_us")


def parse_time(value: Any, feature: str = "split_time_us") -> int | None:
    """Returns a time as the number that `feature` stores (UTC without a zone); None for anything else."""
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value.strip())
        except ValueError:
            return None
    if isinstance(value, datetime.datetime):
        return ((value if value.tzinfo else value.replace(tzinfo=datetime.UTC)) - _EPOCH) // _MICROSECOND
    if isinstance(value, datetime.date):
        return (value.toordinal() - _EPOCH.toordinal()) * _DAY
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    number = round(value * SPLIT_TIME_FEATURES[feature])
    return number if -(2**63) <= number < 2**63 else None


def format_time(number: int, feature: str) -> str:
    """Returns a time for messages."""
    if feature == "split_time_us":
        try:
            return (_EPOCH + number * _MICROSECOND).isoformat()
        except OverflowError:
            return f"{number} us"
    return f"{number / SPLIT_TIME_FEATURES[feature]:.15g}"


class TimeSplit:
    """Assigns times, from `parse_time`, to splits; `left_out` counts the rows in a gap."""

    def __init__(
        self, column: str, shares: Mapping[str, float], gap: str, feature: str, values: Iterable[Any]
    ) -> None:
        """Reads all values of the column; raises SourceError if they are not times, or all the same."""
        import numpy as np

        parsed = (parse_time(value, feature) for value in values)
        times = np.sort(np.fromiter((time for time in parsed if time is not None), np.int64))
        if not len(times):
            raise SourceError(
                f"column {column!r} holds no times to split by; give numbers, dates or ISO 8601 texts"
            )
        if times[0] == times[-1]:
            raise SourceError(f"all rows have the same time in {column!r}: no split can be made of it")
        unit = SPLIT_TIME_FEATURES[feature]
        if (
            gap[-1:].isalpha()
            and feature != "split_time_us"
            and not (_SECONDS[0] * unit <= times[0] and times[-1] <= _SECONDS[1] * unit)
        ):
            raise SourceError(
                f"column {column!r} holds numbers from {format_time(int(times[0]), feature)} to "
                f"{format_time(int(times[-1]), feature)}, which are not seconds since 1970; give split_gap "
                "as a number in their unit, or a column of dates"
            )
        self.left_out = 0
        self._gap = scaled_gap(gap, feature)
        reached, starts = 0.0, list[tuple[str, float]]()
        for name in ("train", "validation", "test"):
            if name in shares:
                index = min(round(reached * len(times)), len(times) - 1)
                starts.append((name, -math.inf if not starts else int(times[index])))
                reached += shares[name]
        self._starts = starts

    def split(self, at: int) -> str | None:
        """Returns the split of a time; None, and counts the row, in a gap."""
        current = max(number for number, (_, start) in enumerate(self._starts) if at >= start)
        following = self._starts[current + 1][1] if current + 1 < len(self._starts) else math.inf
        if at >= following - self._gap and self._gap:
            self.left_out += 1
            return None
        return self._starts[current][0]


def scaled_gap(gap: str, feature: str) -> int:
    """Returns a gap in the units in which a feature stores times."""
    return round(parse_gap(gap) * SPLIT_TIME_FEATURES[feature])
