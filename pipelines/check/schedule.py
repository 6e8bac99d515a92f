"""When a pipeline is to run, and how often at the same time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule, as the Vertex AI API has it.

    Attributes:
        cron: "TZ=Europe/Vienna 0 6 * * 1".
        max_concurrent_run_count: How many runs may be being started at the same time.
        max_concurrent_active_run_count: How many runs may be running at the same time; None for no limit.
        max_run_count: After how many runs the schedule ends; None for never.
        display_name: Its name.
    """

    cron: str
    max_concurrent_run_count: int = 1
    max_concurrent_active_run_count: int | None = None
    max_run_count: int | None = None
    display_name: str = ""

    @property
    def where(self) -> str:
        """What the schedule is called in a finding."""
        return "schedule"
