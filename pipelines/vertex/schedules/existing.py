"""Schedules as they are on the platform."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACTIVE = "ACTIVE"
PAUSED = "PAUSED"
COMPLETED = "COMPLETED"


@dataclass(frozen=True, kw_only=True)
class Existing:
    """One schedule.

    Attributes:
        name: Resource name.
        display_name: The name that people give.
        state: ACTIVE, PAUSED or COMPLETED.
        cron: Cron expression, with or without a zone.
        max_concurrent_run_count: How many runs may be being started at the same time.
        max_concurrent_active_run_count: How many runs may be running at the same time; None for no limit.
        allow_queueing: Whether a run that finds too many others waits.
        max_run_count: After how many runs it ends; None for never.
        started_run_count: How many there have been.
        start_time: Before it no run is started.
        end_time: After it no run is started; None for never.
        create_time: When it was made.
        next_run_time: When it fires next; None for never.
        request: CreatePipelineJobRequest of each run, in the API's JSON form.
    """

    name: str
    display_name: str
    state: str
    cron: str
    max_concurrent_run_count: int
    max_concurrent_active_run_count: int | None
    allow_queueing: bool
    max_run_count: int | None
    started_run_count: int
    start_time: datetime.datetime | None
    end_time: datetime.datetime | None
    create_time: datetime.datetime | None
    next_run_time: datetime.datetime | None
    request: Mapping[str, Any]

    def fires(self, now: datetime.datetime) -> bool:
        """Whether it starts runs already."""
        return self.state == ACTIVE and (self.start_time is None or self.start_time <= now)


def read_existing(content: Mapping[str, Any]) -> Existing:
    """Reads a Schedule in the API's JSON form."""
    return Existing(
        name=content["name"],
        display_name=content.get("displayName", ""),
        state=content.get("state", ""),
        cron=content.get("cron", ""),
        max_concurrent_run_count=int(content.get("maxConcurrentRunCount", 0)),
        max_concurrent_active_run_count=_count(content, "maxConcurrentActiveRunCount"),
        allow_queueing=content.get("allowQueueing", False),
        max_run_count=_count(content, "maxRunCount"),
        started_run_count=int(content.get("startedRunCount", 0)),
        start_time=_time(content, "startTime"),
        end_time=_time(content, "endTime"),
        create_time=_time(content, "createTime"),
        next_run_time=_time(content, "nextRunTime"),
        request=content["createPipelineJobRequest"],
    )


def _count(content: Mapping[str, Any], key: str) -> int | None:
    # JSON has 64-bit numbers as text, and 0 is what is not set.
    return int(content.get(key, 0)) or None


def _time(content: Mapping[str, Any], key: str) -> datetime.datetime | None:
    text = content.get(key)
    return datetime.datetime.fromisoformat(text) if text else None
