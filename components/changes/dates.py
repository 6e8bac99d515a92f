"""The date of a run in its source: images:gs://bucket/{date:%Y/%m/%d}."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from shardline.trainer.errors import SettingsError

_DATE = re.compile(r"\{date(?::([^{}]*))?\}")
_USUAL = "%Y-%m-%d"


def run_time(scheduled: str, created: str) -> datetime:
    """Returns the time that a run is for, in UTC: the scheduled one, which may be in the past.

    Args:
        scheduled: RFC 3339, or anything else where the run was not started by a schedule.
        created: RFC 3339.

    Raises:
        SettingsError: When `created` is no time either.
    """
    for text in (scheduled, created):
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            continue
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    raise SettingsError(f"the run has no time: scheduled {scheduled!r}, created {created!r}")


def fill_in_date(source: str, time: datetime) -> str:
    """Returns a source with a date in the place of {date} and {date:FORMAT}, other braces as they are.

    Args:
        source: {date} is 2026-11-20, {date:%Y/%m/%d} what strftime makes of the format.
        time: Of the run.
    """
    return _DATE.sub(lambda match: time.strftime(match[1] or _USUAL), source)
