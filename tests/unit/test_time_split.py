"""Splits by time: training comes before validation, that before test, with a gap between them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.time_split import (
    LEFT_OUT,
    TimeSplit,
    format_time,
    parse_gap,
    parse_times,
    time_feature,
)
from shardline.trainer.base.errors import SettingsError, SourceError


def splits(times: Iterable[Any], feature: str = "split_number", gap: str = "", **shares: float) -> TimeSplit:
    """Returns the splits by a column day, of eight, one and one tenths unless others are given."""
    return TimeSplit(
        "day", shares or {"train": 0.8, "validation": 0.1, "test": 0.1}, gap, feature, [pa.array(times)]
    )


def test_times_are_numbers_dates_and_texts() -> None:
    day = datetime.date(2026, 11, 23)
    midnight = datetime.datetime(2026, 11, 23, tzinfo=datetime.UTC)
    micros = int(midnight.timestamp()) * 1_000_000

    def times(values: Any, feature: str = "split_time_us") -> list[int | None]:
        found: list[int | None] = parse_times(pa.array(values), feature).to_pylist()
        return found

    assert times([day, None]) == times([midnight, None]) == [micros, None]
    assert times([midnight.replace(tzinfo=None)]) == [micros]
    texts = ["2026-11-23", " 2026-11-23T00:00:00Z", "1969-12-31T23:59:59.999999+00:00", "yesterday", None]
    assert times(texts) == [micros, micros, -1, None, None]
    assert times([3], "split_number") == times([3.0], "split_number") == [3]
    numbers = [0.25, math.nan, math.inf, 1e300, None]
    assert times(numbers, "split_number_millionths") == [250_000, None, None, None, None]


def test_the_feature_of_times_names_its_unit() -> None:
    assert [time_feature(kind) for kind in ("int64", "float32", "string", "timestamp", "DATE")] == [
        "split_number",
        "split_number_millionths",
        *["split_time_us"] * 3,
    ]
    assert format_time(1_500_000, "split_time_us") == "1970-01-01T00:00:01.500000+00:00"
    assert format_time(2**62, "split_time_us") == f"{2**62} us"
    assert format_time(20261123, "split_number") == "20261123"
    assert format_time(250_000, "split_number_millionths") == "0.25"


def test_a_gap_is_a_duration_or_a_number() -> None:
    gaps = {"": 0, "7d": 604_800, "1.5h": 5400, "90m": 5400, "30s": 30, "12": 12}
    assert {text: parse_gap(text) for text in gaps} == gaps
    with pytest.raises(SettingsError, match="split_gap '7 weeks' is no duration; give 7d"):
        parse_gap("7 weeks")


def test_splits_follow_each_other_and_a_gap_is_left_out() -> None:
    times = list(range(100))
    plain = splits(times)
    found = plain.assign(pa.array(times))
    assert found == ["train"] * 80 + ["validation"] * 10 + ["test"] * 10
    gapped = splits(times, gap="3")
    found = gapped.assign(pa.array(times))
    assert [time for time in times if found[time] == LEFT_OUT] == [77, 78, 79, 87, 88, 89]
    assert gapped.left_out == 6


@pytest.mark.parametrize(
    "times", [[1_767_225_600_000, 1_767_225_700_000], [20_260_101, 20_260_301], [2020, 2026]]
)
def test_a_duration_needs_numbers_that_are_seconds(times: list[int]) -> None:
    with pytest.raises(SourceError, match="which are not seconds since 1970; give split_gap as a number in"):
        splits(times, gap="7d")
    splits(times, gap="7")
    seconds = [1_767_225_600, 1_777_225_600]
    splits(seconds, gap="7d")


def test_rows_of_one_time_are_in_one_split() -> None:
    times = [0] * 70 + [1] * 20 + [2] * 10
    found = splits(times, train=0.8, test=0.2)
    assert found.assign(pa.array([0, 1, 2])) == ["train", "test", "test"]


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(SourceError, match="'day' holds no times to split by"):
        splits([None, None], "split_time_us")
    assert parse_times(pa.array([[1, 2]]), "split_time").to_pylist() == [None]
    with pytest.raises(SourceError, match="all rows have the same time in 'day'"):
        splits([3, 3])
    with pytest.raises(SettingsError, match="group and split_by_time cannot both"):
        PreprocessSettings(source="table:x.csv", group="a", split_by_time="b")
    with pytest.raises(SettingsError, match="split_gap belongs to split_by_time"):
        PreprocessSettings(source="table:x.csv", split_gap="7d")
