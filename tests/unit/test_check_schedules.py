"""Rules about schedules, and how cron expressions are read."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.pipelines.check.rules.schedules import Schedule, parse, split_zone
from tests.helpers.checks import codes, pipeline


def schedule(cron: str = "TZ=Europe/Vienna 0 6 * * 1", **fields: Any) -> Schedule:
    return Schedule(**{"cron": cron, "max_concurrent_active_run_count": 1, **fields})


ROWS = [
    ("SL901", schedule("TZ=UTC 0 6 * *"), schedule("TZ=UTC 0 6 * * *")),
    ("SL901", schedule("TZ=UTC 60 6 * * *"), schedule("TZ=UTC 59 6 * * *")),
    ("SL902", schedule("0 6 * * *"), schedule("CRON_TZ=UTC 0 6 * * *")),
    ("SL903", schedule("TZ=Europe/Wien 0 6 * * *"), schedule("TZ=Europe/Vienna 0 6 * * *")),
    ("SL903", schedule("TZ=../etc/passwd 0 6 * * *"), schedule("TZ=America/New_York 0 6 * * *")),
    ("SL904", schedule("TZ=UTC 0 6 30 2 *"), schedule("TZ=UTC 0 6 29 2 *")),
    # Either will do where both are given.
    ("SL904", schedule("TZ=UTC 0 6 31 4,6 *"), schedule("TZ=UTC 0 6 31 4 1")),
    ("SL909", schedule("TZ=UTC */15 * * * *"), schedule("TZ=UTC 0 * * * *")),
    ("SL906", schedule(max_concurrent_active_run_count=None), schedule()),
    ("SL906", schedule(max_concurrent_active_run_count=2), schedule()),
    ("SL907", schedule(max_concurrent_run_count=0), schedule(max_concurrent_run_count=1)),
]


@pytest.mark.parametrize(("code", "broken", "repaired"), ROWS, ids=[row[0] for row in ROWS])
def test_a_rule_finds_what_is_broken_and_not_what_is_right(
    code: str, broken: Schedule, repaired: Schedule
) -> None:
    assert code in codes(pipeline(), schedule=broken)
    assert code not in codes(pipeline(), schedule=repaired)


def test_a_schedule_that_is_right() -> None:
    assert codes(pipeline(), schedule=schedule()) == set()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("*/20", {0, 20, 40}),
        ("10-30/10", {10, 20, 30}),
        ("50/4", {50, 54, 58}),  # from 50 on
        ("1,3", {1, 3}),
    ],
)
def test_a_field(field: str, values: set[int]) -> None:
    assert parse(f"{field} * * * *")[0] == values


def test_names() -> None:
    assert parse("0 6 ? JAN-mar sun,7")[3:] == [{1, 2, 3}, {0, 7}]


@pytest.mark.parametrize(
    "fields",
    [
        "",
        "* * * * * *",
        "5-1 * * * *",
        "*/0 * * * *",
        "? * * * *",
        "* 24 * * *",
        "* * * foo *",
        "-1 * * * *",
    ],
)
def test_what_is_no_cron_expression(fields: str) -> None:
    with pytest.raises(ValueError, match=r"not |fields"):
        parse(fields)


def test_the_zone_stands_in_front() -> None:
    assert split_zone("CRON_TZ=Asia/Tokyo  0 6 * * *") == ("Asia/Tokyo", "0 6 * * *")
    assert split_zone("0 6 * * *") == ("", "0 6 * * *")
