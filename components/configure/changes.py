"""The first step of a run: its three objects, the date in its source, and what has changed."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from shardline.components.configure import history as last_run
from shardline.components.configure.fingerprint import (
    DIGEST,
    Fingerprint,
    code_versions,
    fingerprint,
    initial_model,
)
from shardline.components.configure.history import RunResult, State
from shardline.components.model_store.catalog import champion_directory, refuse_container
from shardline.components.model_store.champions import check_champion, where
from shardline.components.preprocess import schema
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import bigquery, columns
from shardline.components.preprocess.sources.snapshots import pinned
from shardline.components.text import quality, short
from shardline.components.train.settings import TrainingSettings
from shardline.components.validate.formats import check_installed, refuse_table
from shardline.components.validate.gate import GateSettings
from shardline.trainer.errors import ModelError, SettingsError
from shardline.trainer.progress import fact, say
from shardline.trainer.records import own_fields, read

_TOPIC = "changes"
_SCHEMA = "content of schema"
_DATE = re.compile(r"\{(?:date|last (?P<days>\d{1,4}) days)(?::(?P<form>[^{}]*))?\}")
_MOST_DAYS = 400
#: The platform's time of a schedule where there is none is 0 seconds of Unix time, 1969 in the west.
_EPOCH = 1970
#: Changes that are named one by one, and characters of a value that are shown.
_SHOWN, _LONGEST = 3, 60


def differences(last: State, now: State) -> list[str]:
    """Returns what has changed between two states, a few words each; nothing if nothing has.

    Settings that one of the two does not have are those of another version of the pipeline: a change too.
    """
    found = [
        *_data(last.data, now.data),
        *_named(last.settings, now.settings),
        *_code(last.code, now.code),
    ]
    more = len(found) - _SHOWN
    return [*found[:_SHOWN], f"{more} more changes"] if more > 1 else found


def _data(last: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    if not now["known_by"]:
        yield f"whether the data has changed is not known: {now['text']}"
    elif now["known_by"] != last["known_by"]:
        before = f"by its {last['known_by']}" if last["known_by"] else "not known"
        yield f"the data is known by its {now['known_by']}, last time it was {before}"
    elif now["digest"] != last["digest"]:
        text = (
            f"{now['text']}, as before"
            if now["text"] == last["text"]
            else f"{now['text']}, was {last['text']}"
        )
        yield f"the data has changed ({text})"


def _named(last: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in [*now, *(name for name in last if name not in now)]:
        if last.get(name) != now.get(name):
            yield f"{name} was {_json(last.get(name))}, is {_json(now.get(name))}"


def _code(last: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in [*now, *(name for name in last if name not in now)]:
        before, after = last.get(name, "missing"), now.get(name, "missing")
        if before != after:
            of_files = DIGEST in before + after
            yield f"the code of {name} has changed" if of_files else f"{name} was {before}, is {after}"


def _json(value: Any) -> str:
    return short(json.dumps(value, ensure_ascii=False), _LONGEST)


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
        if not 1 <= days <= _MOST_DAYS:
            raise SettingsError(f"source has {match[0]!r}; give 1 to {_MOST_DAYS} days")
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


def look(
    *,
    history_uri: str,
    force: bool,
    deep: bool,
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
    source = pinned(fill_in_date(settings["source"], time), time)
    if source != settings["source"]:
        say(_TOPIC, f"the source is {source}")
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
        return found(True, _unique(), "history_uri is empty: no run is remembered")
    history = champion_directory(history_uri)
    last_run.make_directory(history)
    content = fingerprint(data, deep=deep)
    start = training.train_options.get("initial_model")
    if start:
        settings["content of initial_model"] = initial_model(start) or f"not known ({_unique()})"
    state = State(data=asdict(content), settings=settings, code=code_versions({**settings, "source": source}))
    last, reason = _compare(history, state, force)
    if last and not reason:
        return found(False, "", _say_unchanged(history, last, content, job_name), blessed=last.blessed)
    say(_TOPIC, f"training: {reason}")
    # KFP's cache does not know the weights: a model that began with older ones must not come from it.
    known = content.known_by and not force and not start
    key = last_run.dataset_key(history, _key(state)) if known else _unique()
    return found(True, key, reason, json.dumps(asdict(state), ensure_ascii=False))


def _check_formats(formats: Sequence[str], data: PreprocessSettings) -> None:
    """Refuses formats that are not installed, and any of a table without images."""
    check_installed(formats)
    form, _, path = data.source.partition(":")
    if formats and form in ("table", "bigquery") and "image" not in data.features:
        found = columns.open_table(path)[0] if form == "table" else bigquery.open_columns(data.source)
        if "image" not in found.types:
            refuse_table(formats)


def _compare(history: Path, state: State, force: bool) -> tuple[RunResult | None, str]:
    """Returns the last run, and why this one has something to do; "" if it has nothing."""
    try:
        last = last_run.read_latest(history)
    except ModelError as error:
        return None, str(error)
    if last is None:
        return None, f"no run is remembered in {history}"
    if force:
        return last, "force is set"
    return last, "; ".join(differences(last.state, state))


def _say_unchanged(history: Path, last: RunResult, content: Fingerprint, job_name: str) -> str:
    """Ends the run with the result of the last one, and returns why."""
    reason = f"data ({content.text}), settings and code are those of {last.run}"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    again = replace(last, run=job_name, outcome="unchanged", reason=reason, finished=now, same_as=last.run)
    last_run.write_run(history, again)
    fact("state", "unchanged", f"unchanged: {reason}, which finished {last.finished}")
    if reached := quality(last.metrics):
        fact("quality", reached, f"{reached} (of {last.run})")
    fact("blessed", last.blessed, f"{'yes' if last.blessed else 'no'}: {last.verdict} (of {last.run})")
    if last.champion:
        published = where(last.state.settings["champion_uri"], last.champion)
        fact("champion", published, f"{published} (of {last.run})")
    return reason


def _key(state: State) -> str:
    """Returns a dataset's key in KFP's cache: its content, its schema, and the code that uses it."""
    found = [state.data["known_by"], state.data["digest"], state.code]
    # The task's inputs have only the path of a schema.
    if of_schema := state.settings.get(_SCHEMA):
        found.append(of_schema)
    text = json.dumps(found, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _unique() -> str:
    """Returns a fingerprint that no other run has: nothing that is made of the data comes from a cache."""
    return f"run-{uuid.uuid4().hex}"
