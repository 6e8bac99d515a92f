"""Change detection, the first step of a run: its settings, the date in its source, and its history.

    HISTORY/latest.json             the last run that trained; replaced atomically
    HISTORY/datasets/<key>.json     the last dataset with the same content

A failed run writes neither: the next one trains.
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

from shardline.components.configure.fingerprint import (
    DIGEST,
    Fingerprint,
    code_versions,
    fingerprint,
    initial_model_digest,
)
from shardline.components.model_store import BLESSING_FILE, Verdict, read_part
from shardline.components.model_store.champions import (
    VERSIONS,
    champion_directory,
    check_champion,
    open_store,
    published_by,
    refuse_container_path,
)
from shardline.components.preprocess.schema import schema
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import bigquery, columns, is_plugin, open_source
from shardline.components.text import quality, truncate
from shardline.components.train.settings import TrainingSettings
from shardline.components.validate.export.formats import check_formats
from shardline.components.validate.gate.gate import GateSettings
from shardline.trainer.base import crash, files, plugins
from shardline.trainer.base.deserialize import load, own_fields, read, restore
from shardline.trainer.base.errors import DatasetError, ModelError, RunError, SettingsError, SourceError
from shardline.trainer.base.progress import fact, report
from shardline.trainer.data import manifest as manifests

LATEST, DATASETS = "latest.json", "datasets"
_TOPIC = "changes"
_SCHEMA = "content of schema"
_DATE = re.compile(r"\{(?:date|last (?P<days>\d{1,4}) days)(?::(?P<form>[^{}]*))?\}")
_MAX_DAYS = 400
#: Without a schedule, the platform's schedule time is 0 in Unix time: 1970, or 1969 in the west.
_EPOCH = 1970
#: Largest number of changes that are listed, and of characters of a value that are shown.
_MAX_NAMED, _MAX_VALUE = 3, 60


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that a result depends on: the source's `Fingerprint`, settings, and versions of the code."""

    data: Fingerprint
    settings: Mapping[str, Any]
    code: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Result of a run that trained, latest.json (docs/reports.md); times in RFC 3339, UTC.

    `champion` is the version of its model in the model store, "" where it was not published.
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
    """Dataset of some content: a nonce that distinguishes it from others, and its URI once it is complete."""

    nonce: str
    uri: str = ""


def describe_changes(last: State, now: State) -> list[str]:
    """Returns the changes between two states, a few words each; empty where there are none.

    A setting that only one of them has, as after an upgrade of the pipeline, is a change too.
    """
    changes, data, before = [], now.data, last.data
    if not data.known_by:
        changes.append(f"whether the data has changed is not known: {data.text}")
    elif data.known_by != before.known_by:
        known = f"by its {before.known_by}" if before.known_by else "not known"
        changes.append(f"the data is known by its {data.known_by}, last time it was {known}")
    elif data.digest != before.digest:
        was = "as before" if data.text == before.text else f"was {before.text}"
        changes.append(f"the data has changed ({data.text}, {was})")

    def shown(value: Any) -> str:
        return truncate(json.dumps(value, ensure_ascii=False), _MAX_VALUE)

    for name in {**now.settings, **last.settings}:
        if last.settings.get(name) != now.settings.get(name):
            changes.append(f"{name} was {shown(last.settings.get(name))}, is {shown(now.settings.get(name))}")
    for name in {**now.code, **last.code}:
        was, is_now = last.code.get(name, "missing"), now.code.get(name, "missing")
        if was != is_now:
            is_digest = DIGEST in was + is_now
            changes.append(
                f"the code of {name} has changed" if is_digest else f"{name} was {was}, is {is_now}"
            )
    more = len(changes) - _MAX_NAMED
    return [*changes[:_MAX_NAMED], f"{more} more changes"] if more > 1 else changes


def run_time(scheduled: str, created: str) -> datetime:
    """Returns the time of a run in UTC: the scheduled one, which may be in the past, or that of its creation.

    Both are RFC 3339. Without a schedule, `scheduled` is the beginning of 1970 or no time at all. Raises
    SettingsError when `created` is not a time either.
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
    """Replaces {date} (2026-11-20) and {date:%Y/%m/%d} in a source.

    {last 28 days} becomes the list of the 28 days that end with the date, {2026-10-24,...,2026-11-20}. Raises
    SettingsError when the number of days is out of range.
    """

    def replacement(match: re.Match[str]) -> str:
        form = match["form"] or "%Y-%m-%d"
        if not match["days"]:
            return time.strftime(form)
        days = int(match["days"])
        if not 1 <= days <= _MAX_DAYS:
            raise SettingsError(f"source has {match[0]!r}; the number of days must be 1 to {_MAX_DAYS}")
        dates = (time - timedelta(days=before) for before in reversed(range(days)))
        return "{" + ",".join(dict.fromkeys(date.strftime(form) for date in dates)) + "}"

    return _DATE.sub(replacement, source)


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
    **settings: Any,
) -> Configured:
    """Compares data, settings and code with those of the last run in the history.

    The arguments are those of `configure`, `settings` those that a result depends on. Raises SettingsError
    when one is wrong or the history cannot be used, SourceError when the source cannot be read.
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
    # Fail before the training, which takes hours.
    _check_export(gate.formats, data)
    gate.gate.check_champion(gate.champion_uri)
    _check_rules(gate, data)
    refuse_container_path("champion_uri", gate.champion_uri)
    refuse_container_path("history_uri", history_uri)
    if gate.champion_uri:
        check_champion(gate.champion_uri)

    def result(changed: bool, digest: str, reason: str, state: str = "", blessed: bool = False) -> Configured:
        return Configured(changed, source, digest, reason, state, blessed, **objects)

    if not history_uri:
        return result(True, _unique_fingerprint(), "history_uri is empty: there is no history")
    history = champion_directory(history_uri)
    with crash.output_errors(f"write to {history}", "choose another history_uri"):
        (history / DATASETS).mkdir(parents=True, exist_ok=True)
    content = fingerprint(data)
    if start := training.train_options.get("initial_model"):
        weights = initial_model_digest(start) or f"not known ({_unique_fingerprint()})"
        settings["content of initial_model"] = weights
    state = State(data=content, settings=settings, code=code_versions({**settings, "source": source}))
    last, reason = _compare(history, state, force)
    if last and not reason:
        return result(False, "", _report_unchanged(last, content), blessed=last.blessed)
    report(_TOPIC, f"training: {reason}")
    # KFP's cache does not know the initial weights: the key must not repeat.
    known = content.known_by and not force and not start
    key = dataset_key(history, _digest(content, state)) if known else _unique_fingerprint()
    return result(True, key, reason, json.dumps(asdict(state), ensure_ascii=False))


def _digest(content: Fingerprint, state: State) -> str:
    """Returns a dataset's key in KFP's cache: a digest of its content, its schema, and the code."""
    parts = [content.known_by, content.digest, state.code]
    if schema_digest := state.settings.get(_SCHEMA):  # the task's inputs have only its path
        parts.append(schema_digest)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _check_export(formats: Sequence[str], data: PreprocessSettings) -> None:
    """Refuses export formats that are not installed, and any for a table without images."""
    check_formats(formats)
    form, _, path = data.source.partition(":")
    if formats and form in ("table", "bigquery") and "image" not in data.features:
        table = columns.open_table(path)[0] if form == "table" else bigquery.QueryColumns(data.source)
        check_formats(formats, table="image" not in table.types)


def _check_rules(gate: GateSettings, data: PreprocessSettings) -> None:
    """Refuses a rule about a metric that the labels do not have, if they are known before preprocessing."""
    known = data.known_labels
    if not known and (gate.rules or gate.min_accuracy):
        from shardline.components.preprocess.plan.survey import check_labels

        # Other sources are read from end to end for their labels.
        if data.source.startswith("table:") or is_plugin(data.source):
            with plugins.calling("the source failed", SourceError):
                known = check_labels(open_source(data, schema.read(data.schema) if data.schema else None))
    if known:
        gate.gate.for_labels(known)


def _compare(history: Path, state: State, force: bool) -> tuple[RecordedRun | None, str]:
    """Returns the last run, and why this one must train; "" if it need not."""
    try:
        last = read_latest(history)
    except ModelError as error:
        return None, str(error)
    if last is None:
        return None, f"no run is recorded in {history}"
    return last, "force is set" if force else "; ".join(describe_changes(last.state, state))


def read_latest(history: Path) -> RecordedRun | None:
    """Returns the last run that trained, None where there is none; raises ModelError where it is damaged."""
    path = history / LATEST
    return load(RecordedRun, path, ModelError) if path.exists() else None


def _report_unchanged(last: RecordedRun, content: Fingerprint) -> str:
    reason = f"data ({content.text}), settings and code are those of {last.run}"
    fact("state", "unchanged", f"unchanged: {reason}, which finished {last.finished}")
    if reached := quality(last.metrics):
        fact("quality", reached, f"{reached} (of {last.run})")
    fact("blessed", last.blessed, f"{last.verdict} (of {last.run})")
    if last.champion:
        published = open_store(last.state.settings["champion_uri"]).location(f"{VERSIONS}/{last.champion}")
        fact("champion", published, f"{published} (of {last.run})")
    return reason


def _unique_fingerprint() -> str:
    """Returns a fingerprint that no other run has: no task that uses it is taken from the cache."""
    return f"run-{uuid.uuid4().hex}"


def dataset_key(history: Path, key: str) -> str:
    """Returns the name of a dataset with the content `key` in KFP's cache.

    The cache does not check that a dataset still exists; a lifecycle rule may have removed its shards. Then
    it gets another name, and is written again.
    """
    path = history / DATASETS / f"{key}.json"
    try:
        dataset = load(CachedDataset, path, ModelError)
        if dataset.uri:
            manifests.load_whole(files.local_path(dataset.uri))
            return f"{key}-{dataset.nonce}"
    except ModelError:  # there is none yet, or its record is damaged
        pass
    except DatasetError:
        report(_TOPIC, f"the dataset {dataset.uri} is no longer complete: it is written again")
    dataset = CachedDataset(nonce=uuid.uuid4().hex[:8])
    files.write_json(path, asdict(dataset))
    return f"{key}-{dataset.nonce}"


def record_dataset(history_uri: str, fingerprint: str, uri: str) -> None:
    """Records that a dataset is complete; `fingerprint` comes from `dataset_key`."""
    key, _, nonce = fingerprint.rpartition("-")
    path = champion_directory(history_uri) / DATASETS / f"{key}.json"
    if path.exists():
        files.write_json(path, asdict(CachedDataset(nonce=nonce, uri=uri)))


def write_history(
    exported: Path, state: str, reason: str, history_uri: str, champion_uri: str, job_name: str
) -> None:
    """Writes the result of a run that trained into the history; the arguments are those of `record_run`.

    Raises ModelError when `exported` has no complete validation, RunError when writing fails.
    """
    if not history_uri:
        return
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    run = RecordedRun(
        run=job_name,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=reason,
        blessed=verdict.blessed,
        verdict=verdict.summary,
        metrics=verdict.metrics,
        champion=published_by(exported, champion_uri, job_name) if verdict.blessed and champion_uri else "",
        state=restore(State, files.parse_json(state, "state", SettingsError), "state", SettingsError),
    )
    history = champion_directory(history_uri)
    try:
        files.write_json(history / LATEST, asdict(run))
    except OSError as error:  # the previous run remains the last one
        raise RunError(f"cannot write to {history}: {error.strerror}; the run is not recorded") from error
    report(_TOPIC, f"remembered in {history_uri}: the next run trains if data, settings or code change")
