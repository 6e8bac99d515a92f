"""Splits by time: training before validation before test, by a column of times."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shardline.components.preprocess.lazy import np, pa, pc
from shardline.trainer.base.errors import SettingsError, SourceError
from shardline.trainer.manifest import SPLIT_TIME_FEATURES

if TYPE_CHECKING:
    import numpy.typing as npt


#: Split of rows that are in none.
LEFT_OUT = ""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
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


def parse_times(values: Any, feature: str) -> Any:
    """Returns an array of times as the int64 that `feature` stores (UTC without a zone); null for others."""
    if pa.types.is_temporal(values.type):
        return values.cast(pa.timestamp("us")).cast(pa.int64())
    if pa.types.is_string(values.type):
        return pa.array(map(_microseconds, values.to_pylist()), pa.int64())
    if pa.types.is_integer(values.type):
        return values
    if not pa.types.is_floating(values.type):  # lists and bytes are no times
        return pa.nulls(len(values), pa.int64())
    numbers = pc.round(pc.multiply(values, float(SPLIT_TIME_FEATURES[feature])))
    known = pc.fill_null(pc.less(pc.abs(numbers), 2.0**63), False)
    return pc.if_else(known, numbers, None).cast(pa.int64())


def _microseconds(text: str | None) -> int | None:
    try:
        time = datetime.datetime.fromisoformat((text or "").strip())
    except ValueError:
        return None
    return ((time if time.tzinfo else time.replace(tzinfo=datetime.UTC)) - _EPOCH) // _MICROSECOND


def format_time(number: int, feature: str) -> str:
    """Returns a time for messages."""
    if feature == "split_time_us":
        try:
            return (_EPOCH + number * _MICROSECOND).isoformat()
        except OverflowError:
            return f"{number} us"
    return f"{number / SPLIT_TIME_FEATURES[feature]:.15g}"


class TimeSplit:
    """Assigns times, from `parse_times`, to splits; `left_out` counts the rows in a gap."""

    def __init__(
        self, column: str, shares: Mapping[str, float], gap: str, feature: str, values: Iterable[Any]
    ) -> None:
        """Reads arrays of all times; raises SourceError if there are none, or they are all the same."""
        parts = [np.empty(0, np.int64), *(times.drop_null().to_numpy(False) for times in values)]
        times = np.sort(np.concatenate(parts))
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
        reached, self._names, starts = 0.0, list[str](), list[int]()
        for name in ("train", "validation", "test"):
            if name in shares:
                starts.append(int(times[min(round(reached * len(times)), len(times) - 1)]))
                self._names.append(name)
                reached += shares[name]
        self._starts, self._gap = np.array(starts[1:], np.int64), scaled_gap(gap, feature)
        self.left_out = int((self._indices(times) < 0).sum())

    def assign(self, times: Any) -> list[str]:
        """Returns the split of each time; `LEFT_OUT` in a gap."""
        names = [*self._names, LEFT_OUT]
        return [names[index] for index in self._indices(times.fill_null(0).to_numpy(False)).tolist()]

    def _indices(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        found = np.searchsorted(self._starts, times, side="right")
        if self._gap:
            following = np.append(self._starts, np.iinfo(np.int64).max)[found]
            is_last = found == len(self._starts)
            found[~is_last & (times >= following - self._gap)] = -1
        return found


def scaled_gap(gap: str, feature: str) -> int:
    """Returns a gap in the units in which a feature stores times."""
    return round(parse_gap(gap) * SPLIT_TIME_FEATURES[feature])
