"""Schedules as they are declared in schedules.toml."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.pipelines.check import registry
from shardline.pipelines.check.schedule import Schedule, split_zone
from shardline.pipelines.tables import read_tables
from shardline.trainer.errors import SettingsError

TABLE = "schedules"


@dataclass(frozen=True, kw_only=True)
class Declared(Schedule):
    """One schedule, [schedules.NAME]; the words are those of the Vertex AI API.

    Its display name is NAME, by which it is found on the platform, and its cron begins with a time zone.
    settings/schedules.toml.example explains the fields; None leaves it to the pipeline, or to `shardline
    schedule pause` and `resume`.
    """

    pipeline: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    enable_caching: bool | None = None
    max_concurrent_active_run_count: int | None = 1
    paused: bool | None = None

    def __post_init__(self) -> None:
        if not self.display_name.strip() or '"' in self.display_name:
            raise SettingsError(f"the name must be a text without quotes, got {self.display_name!r}")
        if not split_zone(self.cron)[0]:
            raise SettingsError(
                f"cron {self.cron!r} has no time zone; "
                "write it in front: TZ=Europe/Vienna 0 6 * * 1, or TZ=UTC"
            )
        from shardline.pipelines.check import rules  # noqa: F401  # the rules register themselves

        for finding in registry.apply({Schedule: [self]}):
            if finding.severity is registry.Severity.ERROR:
                raise SettingsError(f"{finding.why}; {finding.fix}")
        for name in ("start_time", "end_time"):
            moment = getattr(self, name)
            if moment is not None and moment.tzinfo is None:
                raise SettingsError(f"{name} {moment.isoformat()} has no offset; write 2027-01-01T00:00:00Z")
        if self.start_time and self.end_time and self.start_time >= self.end_time:
            raise SettingsError(f"end_time {self.end_time.isoformat()} is not after start_time")
        try:
            json.dumps(dict(self.parameters), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"parameters must be JSON values: {error}") from None


def load_schedules(path: Path) -> dict[str, Declared]:
    """Reads a file of schedules, by name; settings/schedules.toml.example shows all of its keys.

    A pipeline that is a file becomes an absolute path, or relative as `path` is.

    Raises:
        SettingsError: When the file is missing or no TOML, or a key is unknown, missing, mistyped or wrong.
    """
    return {name: _read(path, name, table) for name, table in read_tables(path, TABLE, Declared).items()}


def _read(path: Path, name: str, table: dict[str, Any]) -> Declared:
    if not table["pipeline"].startswith("https://"):
        table["pipeline"] = str(path.parent / table["pipeline"])
    try:
        return Declared(display_name=name, **table)
    except SettingsError as error:
        raise SettingsError(f"{path}: {TABLE}.{name}: {error}") from None
