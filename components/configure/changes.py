"""The first step of a run: its three objects, the date in its source, and what has changed.

    HISTORY/latest.json             the last run that trained; replaced atomically
    HISTORY/datasets/<key>.json     the dataset that was made of the same content last

A run that failed writes neither, so that the next one trains.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from shardline.components import model_store
from shardline.components.configure.fingerprint import (
    DIGEST,
    Fingerprint,
    code_versions,
    fingerprint,
    initial_model_digest,
)
from shardline.components.model_store import Measured, Verdict, read_part
from shardline.components.model_store.catalog import champion_directory, refuse_container
from shardline.components.model_store.champions import check_champion, published_by, where
from shardline.components.preprocess.schema import schema
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import bigquery, columns
from shardline.components.text import quality, truncate
from shardline.components.train.settings import TrainingSettings
from shardline.components.validate.export.formats import check_installed
from shardline.components.validate.gate.gate import GateSettings
from shardline.trainer.base import crash, files
from shardline.trainer.base.deserialize import load, own_fields, read, restore
from shardline.trainer.base.errors import DatasetError, ModelError, RunError, SettingsError
from shardline.trainer.base.progress import fact, report
from shardline.trainer.data import manifest as manifests

LATEST, DATASETS = "latest.json", "datasets"
_TOPIC = "changes"
_SCHEMA = "content of schema"
_DATE = re.compile(r"\{(?:date|last (?P<days>\d{1,4}) days)(?::(?P<form>[^{}]*))?\}")
_MAX_DAYS = 400
#: The platform's time of a schedule where there is none is 0 seconds of Unix time, 1969 in the west.
_EPOCH = 1970
#: Changes that are named one by one, and characters of a value that are shown.
_MAX_NAMED, _MAX_VALUE = 3, 60


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
class RecordedRun:
    """Result of a run that trained (RFC 3339, UTC), latest.json; docs/reports.md has the file.

    `champion` is the version that its model has become, "" where it has not.
    """

    run: str
    finished: str
    reason: str
    blessed: bool
    verdict: str
    metrics: Mapping[str, float | None]
    champion: str
    state: State = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class CachedDataset:
    """Dataset by its content: what tells it from others of the same content, and its URI once it is whole."""

    nonce: str
    uri: str = ""


def describe_changes(last: State, now: State) -> list[str]:
    """Returns what has changed between two states, a few words each; nothing if nothing has.

    Settings that one of the two does not have are those of another version of the pipeline: a change too.
    """
    found, data, before = [], now.data, last.data
    if not data["known_by"]:
        found.append(f"whether the data has changed is not known: {data['text']}")
    elif data["known_by"] != before["known_by"]:
        known = f"by its {before['known_by']}" if before["known_by"] else "not known"
        found.append(f"the data is known by its {data['known_by']}, last time it was {known}")
    elif data["digest"] != before["digest"]:
        was = "as before" if data["text"] == before["text"] else f"was {before['text']}"
        found.append(f"the data has changed ({data['text']}, {was})")

    def shown(value: Any) -> str:
        return truncate(json.dumps(value, ensure_ascii=False), _MAX_VALUE)

    for name in {**now.settings, **last.settings}:
        if last.settings.get(name) != now.settings.get(name):
            found.append(f"{name} was {shown(last.settings.get(name))}, is {shown(now.settings.get(name))}")
    for name in {**now.code, **last.code}:
        was, is_now = last.code.get(name, "missing"), now.code.get(name, "missing")
        if was != is_now:
            of_files = DIGEST in was + is_now
            found.append(f"the code of {name} has changed" if of_files else f"{name} was {was}, is {is_now}")
    more = len(found) - _MAX_NAMED
    return [*found[:_MAX_NAMED], f"{more} more changes"] if more > 1 else found


def run_time(scheduled: str, created: str) -> datetime:
    """Returns the time that a run is for, in UTC: the scheduled one, which may be in the past.

    Both are RFC 3339; `scheduled` is anything else, or the beginning of 1970, where no schedule has started
    the run. Raises SettingsError when `created` is not a time either.
    """
    for text in (scheduled, created):
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            continue
        if time.year <= _EPOCH:
            continue
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    raise SettingsError(f"the run has no time: scheduled {scheduled!r}, created {created!r}")


def fill_in_date(source: str, time: datetime) -> str:
    """Returns a source with a date in the place of {date}, as in 2026-11-20, and {date:%Y/%m/%d}.

    {last 28 days} becomes the list of the 28 days that end with it, as in {2026-10-24,...,2026-11-20}; a
    number of days that is none raises SettingsError.
    """

    def filled(match: re.Match[str]) -> str:
        form = match["form"] or "%Y-%m-%d"
        if not match["days"]:
            return time.strftime(form)
        days = int(match["days"])
        if not 1 <= days <= _MAX_DAYS:
            raise SettingsError(f"source has {match[0]!r}; give 1 to {_MAX_DAYS} days")
        dates = (time - timedelta(days=before) for before in reversed(range(days)))
        return "{" + ",".join(dict.fromkeys(date.strftime(form) for date in dates)) + "}"

    return _DATE.sub(filled, source)


class Configured(NamedTuple):
    """Outputs of the first step, as `configure` describes them."""

    changed: bool
    source: str
    fingerprint: str
    reason: str
    state: str
    still_blessed: bool
    data: dict[str, Any]
    training: dict[str, Any]
    gate: dict[str, Any]


def detect_changes(
    *,
    history_uri: str,
    force: bool,
    scheduled: str,
    created: str,
    job_name: str,
    **settings: Any,
) -> Configured:
    """Compares data, settings and code with those of the last run that is remembered.

    The arguments are those of `configure`; `settings` are the parameters that a result depends on. Raises
    SettingsError when one is out of range or the history cannot be reached or written, SourceError when
    there is no such source or it cannot be read.
    """
    time = run_time(scheduled, created)
    source = bigquery.pin_snapshot(fill_in_date(settings["source"], time), time)
    if source != settings["source"]:
        report(_TOPIC, f"the source is {source}")
    kinds = {"data": PreprocessSettings, "training": TrainingSettings, "gate": GateSettings}
    objects = {name: own_fields(kind, {**settings, "source": source}) for name, kind in kinds.items()}
    data = read(PreprocessSettings, objects["data"], "data")
    training = read(TrainingSettings, objects["training"], "training")
    gate = read(GateSettings, objects["gate"], "gate")
    if data.schema:
        settings[_SCHEMA] = schema.read(data.schema).digest
    # Training takes hours: what would refuse its model then does so now.
    _check_formats(gate.formats, data)
    gate.gate.check_champion(gate.champion_uri)
    refuse_container("champion_uri", gate.champion_uri)
    refuse_container("history_uri", history_uri)
    if gate.champion_uri:
        check_champion(gate.champion_uri)

    def found(
        changed: bool, fingerprint: str, reason: str, state: str = "", blessed: bool = False
    ) -> Configured:
        return Configured(changed, source, fingerprint, reason, state, blessed, **objects)

    if not history_uri:
        return found(True, _unique_fingerprint(), "history_uri is empty: no run is remembered")
    history = champion_directory(history_uri)
    try:
        (history / DATASETS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot write to {history}: {error.strerror}; choose another history_uri"
        raise crash.output_error(error, what) from None
    content = fingerprint(data)
    start = training.train_options.get("initial_model")
    if start:
        settings["content of initial_model"] = (
            initial_model_digest(start) or f"not known ({_unique_fingerprint()})"
        )
    state = State(data=asdict(content), settings=settings, code=code_versions({**settings, "source": source}))
    last, reason = _compare(history, state, force)
    if last and not reason:
        return found(False, "", _report_unchanged(last, content), blessed=last.blessed)
    report(_TOPIC, f"training: {reason}")
    # KFP's cache does not know the weights: a model that began with older ones must not come from it.
    known = content.known_by and not force and not start
    key = dataset_key(history, _digest(content, state)) if known else _unique_fingerprint()
    return found(True, key, reason, json.dumps(asdict(state), ensure_ascii=False))


def _digest(content: Fingerprint, state: State) -> str:
    """Returns a dataset's key in KFP's cache: its content, its schema, and the code that uses it."""
    of_data = [content.known_by, content.digest, state.code]
    if of_schema := state.settings.get(_SCHEMA):  # the task's inputs have only its path
        of_data.append(of_schema)
    return hashlib.sha256(json.dumps(of_data, sort_keys=True).encode()).hexdigest()[:32]


def _check_formats(formats: Sequence[str], data: PreprocessSettings) -> None:
    """Refuses formats that are not installed, and any of a table without images."""
    check_installed(formats)
    form, _, path = data.source.partition(":")
    if formats and form in ("table", "bigquery") and "image" not in data.features:
        found = columns.open_table(path)[0] if form == "table" else bigquery.open_columns(data.source)
        check_installed(formats, table="image" not in found.types)


def _compare(history: Path, state: State, force: bool) -> tuple[RecordedRun | None, str]:
    """Returns the last run, and why this one has something to do; "" if it has nothing."""
    try:
        last = read_latest(history)
    except ModelError as error:
        return None, str(error)
    if last is None:
        return None, f"no run is remembered in {history}"
    return last, "force is set" if force else "; ".join(describe_changes(last.state, state))


def read_latest(history: Path) -> RecordedRun | None:
    """Returns the last run that trained, None where there is none; raises ModelError where it is damaged."""
    path = history / LATEST
    return load(RecordedRun, path, ModelError) if path.exists() else None


def _report_unchanged(last: RecordedRun, content: Fingerprint) -> str:
    """Ends the run with the result of the last one, and returns why."""
    reason = f"data ({content.text}), settings and code are those of {last.run}"
    fact("state", "unchanged", f"unchanged: {reason}, which finished {last.finished}")
    if reached := quality(last.metrics):
        fact("quality", reached, f"{reached} (of {last.run})")
    fact("blessed", last.blessed, f"{'yes' if last.blessed else 'no'}: {last.verdict} (of {last.run})")
    if last.champion:
        published = where(last.state.settings["champion_uri"], last.champion)
        fact("champion", published, f"{published} (of {last.run})")
    return reason


def _unique_fingerprint() -> str:
    """Returns a fingerprint that no other run has: nothing that is made of the data comes from a cache."""
    return f"run-{uuid.uuid4().hex}"


def dataset_key(history: Path, key: str) -> str:
    """Returns what a dataset with the content `key` is known by in KFP's cache.

    The cache does not look whether a dataset is still there, of which a lifecycle rule may have removed the
    shards: one that is not is known by another name, and made again.
    """
    path = history / DATASETS / f"{key}.json"
    try:
        made = load(CachedDataset, path, ModelError)
        if made.uri:
            manifests.load_whole(files.local_path(made.uri))
            return f"{key}-{made.nonce}"
    except ModelError:  # there is none yet, or its note is damaged
        pass
    except DatasetError:
        report(_TOPIC, f"the dataset {made.uri} is no longer whole: it is made again")
    made = CachedDataset(nonce=uuid.uuid4().hex[:8])
    files.write_json(path, asdict(made))
    return f"{key}-{made.nonce}"


def record_dataset(history_uri: str, fingerprint: str, uri: str) -> None:
    """Remembers that a dataset is whole; `fingerprint` is as `dataset_key` gave it."""
    key, _, nonce = fingerprint.rpartition("-")
    path = champion_directory(history_uri) / DATASETS / f"{key}.json"
    if path.exists():
        files.write_json(path, asdict(CachedDataset(nonce=nonce, uri=uri)))


def write_history(
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
    run = RecordedRun(
        run=job_name,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=reason,
        blessed=verdict.blessed,
        verdict=verdict.summary,
        metrics=evaluation.metrics,
        champion=published.version if published else "",
        state=restore(State, files.parse_json(state, "state", SettingsError), "state", SettingsError),
    )
    history = champion_directory(history_uri)
    try:
        files.write_json(history / LATEST, asdict(run))
    except OSError as error:  # the run before is still the last one
        raise RunError(f"cannot write to {history}: {error.strerror}; the run is not remembered") from error
    report(_TOPIC, f"remembered in {history_uri}: the next run trains if data, settings or code change")
