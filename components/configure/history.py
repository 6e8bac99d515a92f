"""History of the runs that reached their end, which the last step of each writes and the next run reads.

    HISTORY/runs/<job name>.json    result of a run, one file per run
    HISTORY/latest.json             the last run that trained; replaced atomically

A run that failed writes neither, so that the next one trains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.model_store import champion_directory, current, read_part
from shardline.trainer import files
from shardline.trainer.errors import ModelError, RunError, SettingsError
from shardline.trainer.progress import say

RUNS = "runs"
LATEST = "latest.json"


@dataclass(frozen=True, kw_only=True)
class State:
    """State that a result follows from: the source's `Fingerprint`, settings, and versions of the code."""

    data: Mapping[str, str]
    settings: Mapping[str, Any]
    code: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of a run that reached its end (RFC 3339, UTC); docs/reports.md has the file.

    `outcome` is "trained" or "unchanged"; of an unchanged run, `same_as` is the run whose result still holds.
    `champion` is the version that its model has become, "" where it has not.
    """

    run: str
    outcome: str
    finished: str
    reason: str
    blessed: bool
    verdict: str
    metrics: Mapping[str, float | None]
    champion: str
    same_as: str = ""
    state: State = field(repr=False)


def make_directory(history: Path) -> None:
    """Makes the directory that remembers; raises SettingsError when it cannot be written."""
    try:
        (history / RUNS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"cannot write to {history}: {error.strerror}; choose another history_uri"
        ) from None


def read_latest(history: Path) -> Run | None:
    """Returns the last run that trained, None where there is none; raises ModelError where it is damaged."""
    path = history / LATEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Run(**{**content, "state": State(**content["state"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None


def write_run(history: Path, run: Run) -> None:
    """Writes the result of a run; a run that trained is the one that the next is compared with.

    When writing fails, which raises RunError, the run before is still the last one.
    """
    try:
        files.write_json(history / RUNS / f"{run.run}.json", asdict(run))
        if run.outcome == "trained":
            files.write_json(history / LATEST, asdict(run))
    except OSError as error:
        raise RunError(f"cannot write to {history}: {error.strerror}; the run is not remembered") from error


def remember(
    exported: Path, state: str, reason: str, history_uri: str, champion_uri: str, job_name: str
) -> None:
    """Writes the result of a run that trained into the history; the arguments are those of `record_run`.

    Raises ModelError when `exported` is no complete validation, RunError when writing fails.
    """
    if not history_uri:
        return
    blessing = read_part(exported, model_store.BLESSING_FILE)
    evaluation = read_part(exported, model_store.EVALUATION_FILE)
    blessed = blessing["blessed"] is True
    published = current(champion_directory(champion_uri)) if blessed and champion_uri else None
    run = Run(
        run=job_name,
        outcome="trained",
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=reason,
        blessed=blessed,
        verdict=str(blessing["reason"]),
        metrics=evaluation["metrics"],
        champion=published.version if published else "",
        state=State(**json.loads(state)),
    )
    write_run(champion_directory(history_uri), run)
    say("changes", f"remembered in {history_uri}: the next run trains if data, settings or code change")
