"""History of the runs that reached their end, which the last step of each writes and the next run reads.

    HISTORY/runs/<job name>.json    result of a run, one file per run
    HISTORY/latest.json             the last run that trained; replaced atomically
    HISTORY/datasets/<key>.json     the dataset that was made of the same content last

A run that failed writes neither, so that the next one trains.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.model_store import Measured, Verdict, read_part
from shardline.components.model_store.catalog import champion_directory
from shardline.components.model_store.champions import published_by
from shardline.trainer import crash, files
from shardline.trainer.data import manifest as manifests
from shardline.trainer.errors import DatasetError, ModelError, RunError, SettingsError
from shardline.trainer.progress import say
from shardline.trainer.records import load, restore

RUNS = "runs"
LATEST = "latest.json"
DATASETS = "datasets"

_NAME = re.compile(r"\w[\w.-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class State:
    """State that a result follows from: the source's `Fingerprint`, settings, and versions of the code."""

    data: Mapping[str, str]
    settings: Mapping[str, Any]
    code: Mapping[str, str]

    def __post_init__(self) -> None:
        if missing := {"known_by", "digest", "text"} - set(self.data):
            raise ValueError(f"data has no {', '.join(sorted(missing))}")


@dataclass(frozen=True, kw_only=True)
class RunResult:
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

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.run):
            raise SettingsError(f"a run's name has letters, digits, '.', '_' and '-', got {self.run!r}")


@dataclass(frozen=True, kw_only=True)
class Made:
    """Dataset by its content: what tells it from others of the same content, and its URI once it is whole."""

    nonce: str
    uri: str = ""


def make_directory(history: Path) -> None:
    """Makes the directory that remembers; raises SettingsError when it cannot be written."""
    try:
        (history / RUNS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise crash.of_place(
            error, f"cannot write to {history}: {error.strerror}; choose another history_uri"
        ) from None


def read_latest(history: Path) -> RunResult | None:
    """Returns the last run that trained, None where there is none; raises ModelError where it is damaged."""
    path = history / LATEST
    if not path.exists():
        return None
    return load(RunResult, path, ModelError)


def dataset_key(history: Path, key: str) -> str:
    """Returns what a dataset with the content `key` is known by in KFP's cache.

    The cache does not look whether a dataset is still there, of which a lifecycle rule may have removed the
    shards: one that is not is known by another name, and made again.
    """
    path = history / DATASETS / f"{key}.json"
    try:
        made = load(Made, path, ModelError) if path.exists() else None
    except ModelError:
        made = None
    if made is None or not made.uri or not _is_whole(files.local_path(made.uri)):
        if made and made.uri:
            say("changes", f"the dataset {made.uri} is no longer whole: it is made again")
        made = Made(nonce=uuid.uuid4().hex[:8])
        path.parent.mkdir(exist_ok=True)
        files.write_json(path, asdict(made))
    return f"{key}-{made.nonce}"


def keep_dataset(history_uri: str, fingerprint: str, uri: str) -> None:
    """Remembers that a dataset is whole; `fingerprint` is as `dataset_key` gave it."""
    key, _, nonce = fingerprint.rpartition("-")
    path = champion_directory(history_uri) / DATASETS / f"{key}.json"
    if path.exists():
        files.write_json(path, asdict(Made(nonce=nonce, uri=uri)))


def _is_whole(dataset: Path) -> bool:
    """Whether all files of a dataset are there, in their size."""
    try:
        manifests.load_whole(dataset)
    except DatasetError:
        return False
    return True


def write_run(history: Path, run: RunResult) -> None:
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
    verdict = read_part(exported, model_store.BLESSING_FILE, Verdict)
    evaluation = read_part(exported, model_store.EVALUATION_FILE, Measured)
    published = published_by(champion_uri, job_name) if verdict.blessed and champion_uri else None
    run = RunResult(
        run=job_name,
        outcome="trained",
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=reason,
        blessed=verdict.blessed,
        verdict=verdict.words,
        metrics=evaluation.metrics,
        champion=published.version if published else "",
        state=restore(State, files.parse_json(state, "state", SettingsError), "state", SettingsError),
    )
    write_run(champion_directory(history_uri), run)
    say("changes", f"remembered in {history_uri}: the next run trains if data, settings or code change")
