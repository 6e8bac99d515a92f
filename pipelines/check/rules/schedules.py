"""Schedules of the Vertex AI API, and the rules about their cron expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zoneinfo import ZoneInfo

from shardline.pipelines.check.registry import Found, rules
from shardline.trainer.base.deserialize import Count
from shardline.trainer.base.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule, [schedules.NAME]; the fields are those of the Vertex AI API.

    Its display name is NAME, by which it is found on the platform, and its cron expression begins with a time
    zone: "TZ=Europe/Vienna 0 6 * * 1". `params` is a file of parameters, which `parameters` override.
    settings/schedules.toml.example explains the fields; a count of None is no limit, and `paused` None leaves
    it as it is on the platform.
    """

    cron: str
    display_name: str
    pipeline: str
    params: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    max_concurrent_active_run_count: Count | None = 1
    max_run_count: Count | None = None
    paused: bool | None = None

    where = "schedule"  # its name in a finding

    def __post_init__(self) -> None:
        name = self.display_name
        if not name.strip() or '"' in name or not name.isprintable():
            raise SettingsError(f"display_name must be a text without quotes and line breaks, got {name!r}")


def split_zone(expression: str) -> tuple[str, str]:
    """Splits "TZ=ZONE FIELDS" (or CRON_TZ=) into zone and fields; the zone is "" without one."""
    match = re.match(r"(?s)(?:CRON_)?TZ=(\S*)\s*(.*)", expression.strip())
    return (match[1], match[2]) if match else ("", expression)


@rules(Schedule)
def times(schedule: Schedule) -> Found:
    """Times at which a schedule fires. The API itself refuses wrong values in a cron expression at once.

    SL901 error: A cron expression has five fields.
        Fix: write minute, hour, day, month and weekday with a time zone: TZ=Europe/Vienna 0 6 * * 1
        Source: Schedule.cron.
    SL902 error: A cron expression has a time zone of the IANA database.
        Fix: put the zone in front, an IANA name: TZ=Europe/Vienna 0 6 * * 1
        Source: Schedule.cron.
    SL909 warning: A schedule fires at most once an hour.
        Fix: name one minute, and the hours that you mean: TZ=Europe/Vienna 0 6 * * 1
        Source: vertex-ai/pricing: each run costs a fee.
    """
    name, expression = split_zone(schedule.cron)
    fields = expression.split()
    if len(fields) != 5:
        yield "SL901", f"cron {schedule.cron!r} has {len(fields)} fields, not 5"
    elif not fields[0].isdecimal():
        yield "SL909", f"cron {schedule.cron!r} names several minutes of an hour"
    if not name:
        yield "SL902", f"cron {schedule.cron!r} has no time zone"
    elif zone_of(name) is None:
        yield "SL902", f"there is no time zone {name!r}"


def zone_of(name: str) -> ZoneInfo | None:
    """Returns a time zone; None if this machine knows none of this name."""
    try:
        return ZoneInfo(name) if name else None
    except (KeyError, ValueError, OSError):
        return None
