"""When schedules fire, across changes of the clock."""

from __future__ import annotations

import datetime
from itertools import pairwise

import pytest

from shardline.pipelines.remote.schedules.steps import fire_times, next_times
from tests.contract.fake.pipeline_rules import fire_times as debian_times

UTC = datetime.UTC


def texts(cron: str, after: str, count: int = 3) -> list[str]:
    moments = next_times(cron, datetime.datetime.fromisoformat(after), count)
    return [f"{moment:%Y-%m-%d %H:%M %Z} {moment.astimezone(UTC):%H:%M}" for moment in moments]


@pytest.mark.parametrize(
    ("cron", "after", "expected"),
    [
        # Summer time begins: the same hour of the day is another hour of UTC.
        (
            "TZ=Europe/Vienna 0 6 * * *",
            "2027-03-26T12:00:00Z",
            ["2027-03-27 06:00 CET 05:00", "2027-03-28 06:00 CEST 04:00", "2027-03-29 06:00 CEST 04:00"],
        ),
        (
            "TZ=America/New_York 0 6 * * *",
            "2027-03-12T12:00:00Z",
            ["2027-03-13 06:00 EST 11:00", "2027-03-14 06:00 EDT 10:00", "2027-03-15 06:00 EDT 10:00"],
        ),
        # Summer time ends.
        (
            "TZ=Europe/Vienna 0 6 * * *",
            "2026-10-23T12:00:00Z",
            ["2026-10-24 06:00 CEST 04:00", "2026-10-25 06:00 CET 05:00", "2026-10-26 06:00 CET 05:00"],
        ),
        (
            "TZ=America/New_York 0 6 * * *",
            "2026-10-30T12:00:00Z",
            ["2026-10-31 06:00 EDT 10:00", "2026-11-01 06:00 EST 11:00", "2026-11-02 06:00 EST 11:00"],
        ),
        # An hour that is left out: 28 March in Vienna, 14 March in New York.
        (
            "TZ=Europe/Vienna 30 2 * * *",
            "2027-03-26T12:00:00Z",
            ["2027-03-27 02:30 CET 01:30", "2027-03-29 02:30 CEST 00:30", "2027-03-30 02:30 CEST 00:30"],
        ),
        (
            "TZ=America/New_York 30 2 * * *",
            "2027-03-12T12:00:00Z",
            ["2027-03-13 02:30 EST 07:30", "2027-03-15 02:30 EDT 06:30", "2027-03-16 02:30 EDT 06:30"],
        ),
        # An hour that comes twice: from two to three in Vienna, from one to two in New York.
        (
            "TZ=Europe/Vienna 30 2 * * *",
            "2026-10-24T12:00:00Z",
            ["2026-10-25 02:30 CEST 00:30", "2026-10-25 02:30 CET 01:30", "2026-10-26 02:30 CET 01:30"],
        ),
        (
            "TZ=America/New_York 30 1 * * *",
            "2026-10-31T12:00:00Z",
            ["2026-11-01 01:30 EDT 05:30", "2026-11-01 01:30 EST 06:30", "2026-11-02 01:30 EST 06:30"],
        ),
        # Begun in the hour that comes twice, between its two half pasts.
        (
            "TZ=Europe/Vienna */30 * * * *",
            "2026-10-25T00:30:00Z",
            ["2026-10-25 02:00 CET 01:00", "2026-10-25 02:30 CET 01:30", "2026-10-25 03:00 CET 02:00"],
        ),
        # No day of February 29 in 2100.
        (
            "TZ=UTC 0 0 29 2 *",
            "2096-03-01T00:00:00Z",
            ["2104-02-29 00:00 UTC 00:00", "2108-02-29 00:00 UTC 00:00", "2112-02-29 00:00 UTC 00:00"],
        ),
        # A time is not after itself.
        (
            "0 6 * * *",
            "2026-11-20T06:00:00Z",
            ["2026-11-21 06:00 UTC 06:00", "2026-11-22 06:00 UTC 06:00", "2026-11-23 06:00 UTC 06:00"],
        ),
    ],
)
def test_the_next_times(cron: str, after: str, expected: list[str]) -> None:
    assert texts(cron, after) == expected


def test_a_schedule_ends() -> None:
    after = datetime.datetime(2026, 11, 20, tzinfo=UTC)
    until = datetime.datetime(2026, 11, 22, 6, tzinfo=UTC)

    assert [moment.day for moment in fire_times("TZ=UTC 0 6 * * *", after, until=until)] == [20, 21, 22]


def test_a_schedule_that_never_fires_ends_as_well() -> None:
    after = datetime.datetime(2026, 11, 20, tzinfo=UTC)

    assert list(fire_times("TZ=UTC 0 6 30 2 *", after)) == []


@pytest.mark.parametrize("zone", ["Europe/Vienna", "America/New_York", "Australia/Lord_Howe", "UTC"])
@pytest.mark.parametrize("fields", ["*/15 * * * *", "5 4 * * 1-5", "0 12 1,15 * *", "30 23 * 2 MON"])
def test_another_implementation_agrees_away_from_the_hours_of_change(zone: str, fields: str) -> None:
    cron = f"TZ={zone} {fields}"
    after = datetime.datetime(2026, 9, 1, tzinfo=UTC)
    ours = next_times(cron, after, 200)
    theirs = debian_times(cron, after)

    assert [moment.astimezone(UTC) for moment in ours] == [next(theirs).astimezone(UTC) for _ in ours]
    assert all(first.astimezone(UTC) < second.astimezone(UTC) for first, second in pairwise(ours))
