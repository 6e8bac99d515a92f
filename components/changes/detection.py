"""Change detection, the first step of a run: its settings, the date in its source, and its history.

    HISTORY/latest.json             the last run that trained; replaced atomically
    HISTORY/datasets/<key>.json     the last dataset with the same content

A failed run writes neither: the next one trains. Content is identified by the names, sizes and versions of
its files; code by the text of Shardline's own and the user's plug-in modules, and by the versions of the
training libraries. No module of a user is imported for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from shardline.components.model_store import BLESSING_FILE, Verdict, champions, read_part
from shardline.components.preprocess.schema import read_schema
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import (
    bigquery,
    check_form,
    is_pattern,
    is_plugin,
    open_source,
    open_table,
)
from shardline.components.storage import (
    File,
    Storage,
    as_source_error,
    files_below,
    match_files,
    open_read,
    resolve,
)
from shardline.components.text import quality, truncate
from shardline.components.text import size as size_text
from shardline.components.train import read_training
from shardline.components.validate import Gate, check_formats
from shardline.trainer import manifest as manifests
from shardline.trainer.base import code, crash, files, plugins
from shardline.trainer.base.deserialize import read_options, restore
from shardline.trainer.base.errors import (
    DatasetError,
    ModelError,
    SettingsError,
    ShardlineError,
    SourceError,
)
from shardline.trainer.base.progress import fact, report
from shardline.trainer.base.settings import TrainSettings, initial_model_file, plugin_references

LATEST, DATASETS = "latest.json", "datasets"
_TOPIC = "changes"
_SCHEMA = "content of schema"
_DATE = re.compile(
    r"\{(?P<what>date|last (?P<days>\d{1,4}) days)(?: in (?P<zone>[\w+/-]+))?"
    r"(?::(?P<form>[^{}%]*(?:%[aAbBdeFGgHIjmMuUVwWyY%][^{}%]*)+))?\}"  # "YYYY" would be text
)
# A field of another name, but not a time of BigQuery, nor a class of characters such as \p{Lu}.
_OTHER = re.compile(r"(?<!\\[pP])\{(?!snapshot\})[A-Za-z][^{},]*\}")
_MAX_DAYS = 400
#: Without a schedule, the platform's schedule time is 0 in Unix time: 1970, or 1969 in the west.
_EPOCH = 1970
#: Most bytes of a table's header that are read.
_MAX_HEADER = 1 << 20
#: Largest number of changes that are listed, and of characters of a value that are shown.
_MAX_NAMED, _MAX_VALUE = 3, 60
#: How a listing is identified, by whether its versions are generations of a bucket's objects.
_LISTINGS = {
    frozenset({False}): "names, sizes and times",
    frozenset({True}): "names, sizes and generations",
    frozenset({False, True}): "names, sizes, times and generations",
}
#: Prefix of a version that is a digest of source files.
_DIGEST = "sha256:"

_OWN = ("shardline.trainer", "shardline.components")
_LIBRARIES = ("tensorflow", "keras")


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A source's content at some time.

    Attributes:
        known_by: How the content is identified; "" where it is not, and any two contents may differ.
        digest: Equal for equal content with the same `known_by`.
        text: Description for people: "1,234 files, 5.6 MB", or why the content is not known.
    """

    known_by: str
    digest: str
    text: str


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
            is_digest = _DIGEST in was + is_now
            changes.append(
                f"the code of {name} has changed" if is_digest else f"{name} was {was}, is {is_now}"
            )
    more = len(changes) - _MAX_NAMED
    return [*changes[:_MAX_NAMED], f"{more} more changes"] if more > 1 else changes


def run_time(scheduled: str, created: str) -> datetime:
    """Returns the time of a run in UTC: the scheduled one, which may be in the past, or that of its creation.

    Both are RFC 3339. Without a schedule, `scheduled` is the beginning of 1970 or no time at all; where
    `created` is empty, it is now. Raises SettingsError when `created` is another text that is not a time.
    """
    for text in (scheduled, created or datetime.now(UTC).isoformat()):
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            continue
        if time.year <= _EPOCH:
            continue
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    raise SettingsError(f"the run has no time: scheduled {scheduled!r}, created {created!r}")


def fill_in_date(source: str, time: datetime) -> str:
    """Replaces {date} (2026-11-20), {date:%Y/%m/%d} and {date in America/Los_Angeles} in a source.

    {last 28 days} becomes the list of the 28 days that end with the date, {2026-10-24,...,2026-11-20}. Raises
    SettingsError for any other field, an unknown zone, and a number of days that is out of range.
    """

    def replacement(match: re.Match[str]) -> str:
        form, days, day = match["form"] or "%Y-%m-%d", int(match["days"] or 1), time
        if not 1 <= days <= _MAX_DAYS:
            raise SettingsError(f"source has {match[0]!r}; the number of days must be 1 to {_MAX_DAYS}")
        if match["zone"]:
            try:
                day = time.astimezone(ZoneInfo(match["zone"]))
            except (KeyError, ValueError, OSError):
                raise SettingsError(f"source has {match[0]!r}; there is no such time zone") from None
        if not match["days"]:
            return day.strftime(form)
        # By the calendar: a day of another zone may have 23 hours.
        dates = (day - timedelta(days=before) for before in reversed(range(days)))
        return "{" + ",".join(dict.fromkeys(date.strftime(form) for date in dates)) + "}"

    if wrong := _OTHER.search(_DATE.sub("", source)):
        raise SettingsError(
            f"source has {wrong[0]!r}, which is no field; write {{date}}, {{date:%Y/%m}} or {{last 28 days}}"
        )
    return _DATE.sub(replacement, source)


def in_zone(source: str, zone: str) -> str:
    """Returns a source whose dates are days of a time zone, where they name none."""

    def replacement(match: re.Match[str]) -> str:
        head = f"{{{match['what']}"
        return match[0] if match["zone"] else f"{head} in {zone}{match[0].removeprefix(head)}"

    return _DATE.sub(replacement, source)


class Changes(NamedTuple):
    """Outputs of the first step, as the component `detect_changes` describes them."""

    changed: bool
    source: str
    fingerprint: str
    reason: str
    state: str = ""
    still_blessed: bool = False


def read_settings(values: Mapping[str, Any]) -> tuple[PreprocessSettings, TrainSettings, Gate]:
    """Returns the settings of all steps from parameters of `detect_changes`.

    Raises SettingsError for wrong ones, SourceError or ModelError for an unknown form of source or model.
    """
    data = read_options(PreprocessSettings, values, "data_options")
    training = read_training(values, "train_options")
    gate = read_options(Gate, values, "gate_options")
    check_form(data.source)
    plugins.import_string(training.model)
    if known := data.known_labels:
        gate.for_labels(known)
    return data, training, gate


def detect_changes(*, history_uri: str, force: bool, scheduled: str, created: str, **given: Any) -> Changes:
    """Compares data, settings and code with those of the last run in the history.

    The arguments are those of the component, `given` those that a result depends on. Raises SettingsError
    when one is wrong or the history cannot be used, SourceError when the source cannot be read.
    """
    time = run_time(scheduled, created)
    source = bigquery.pin_snapshot(fill_in_date(given["source"], time), time)
    if source != given["source"]:
        report(_TOPIC, f"the source is {source}")
    data, training, gate = read_settings({**given, "source": source})
    # Fail before the training, which takes hours.
    _check_export(gate.formats, data)
    gate.check_champion()
    _check_rules(gate, data)
    champions.refuse_container_path("champion_uri", gate.champion_uri)
    champions.refuse_container_path("history_uri", history_uri)
    if gate.champion_uri:
        champions.check_champion(gate.champion_uri)
    if not history_uri:
        return Changes(True, source, _unique_fingerprint(), "history_uri is empty: there is no history")
    history = open_history(history_uri)
    history.check()
    content = fingerprint(data)
    named = {"model": training.model, "train_options": vars(training), "source": source}
    settings = _settings(data, training, gate, given["source"])
    state = State(data=content, settings=settings, code=code_versions(named))
    last, reason = _compare(history, state, force)
    if last and not reason:
        return Changes(False, source, "", _report_unchanged(last, content), still_blessed=last.blessed)
    report(_TOPIC, f"training: {reason}")
    # KFP's cache does not know the initial weights: the key must not repeat.
    known = content.known_by and not force and not training.initial_model
    key = dataset_key(history, _digest(content, state)) if known else _unique_fingerprint()
    state_text = json.dumps({"reason": reason, **asdict(state)}, ensure_ascii=False)
    return Changes(True, source, key, reason, state_text)


def _settings(data: PreprocessSettings, training: TrainSettings, gate: Gate, source: str) -> dict[str, Any]:
    """Returns all that a result depends on by name, as JSON gives it back; `source` has its {date}."""
    settings = {**vars(data), **vars(training), **vars(gate), "source": source}
    for name in ("dataset", "model_dir", "processes"):  # the last does not affect a result
        del settings[name]
    if data.schema:
        settings[_SCHEMA] = read_schema(data.schema).digest
    if start := training.initial_model:
        weights = initial_model_digest(start) or f"not known ({_unique_fingerprint()})"
        settings["content of initial_model"] = weights
    return dict(json.loads(json.dumps(settings)))


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
        table = open_table(path)[0] if form == "table" else bigquery.QueryColumns(data.source)
        check_formats(formats, table="image" not in table.types)


def _check_rules(gate: Gate, data: PreprocessSettings) -> None:
    """Refuses a rule about a metric that the labels of a table or a plug-in do not have."""
    # Other sources are read from end to end for their labels.
    is_known = data.source.startswith("table:") or is_plugin(data.source)
    if is_known and gate.rules and not data.known_labels:
        from shardline.components.preprocess.plan import check_labels

        with plugins.calling("the source failed", SourceError):
            labels = check_labels(open_source(data, read_schema(data.schema) if data.schema else None))
        gate.for_labels(labels)


def open_history(uri: str) -> Storage:
    """Returns the history of runs at a path or URI."""
    return champions.open_directory(uri, "history_uri", "the run is not recorded")


def _compare(history: Storage, state: State, force: bool) -> tuple[RecordedRun | None, str]:
    """Returns the last run, and why this one must train; "" if it need not."""
    try:
        last = read_latest(history)
    except ModelError as error:
        return None, str(error)
    if last is None:
        return None, f"no run is recorded in {history.root}"
    return last, "force is set" if force else "; ".join(describe_changes(last.state, state))


def read_latest(history: Storage) -> RecordedRun | None:
    """Returns the last run that trained, None where there is none; raises ModelError where it is damaged."""
    return history.read(LATEST).restore(RecordedRun)


def _report_unchanged(last: RecordedRun, content: Fingerprint) -> str:
    reason = f"data ({content.text}), settings and code are those of {last.run}"
    fact("state", "unchanged", f"unchanged: {reason}, which finished {last.finished}")
    if reached := quality(last.metrics):
        fact("quality", reached, f"{reached} (of {last.run})")
    fact("blessed", last.blessed, f"{last.verdict} (of {last.run})")
    if last.champion:
        version = f"{champions.VERSIONS}/{last.champion}"
        published = champions.open_store(last.state.settings["champion_uri"]).location(version)
        fact("champion", published, f"{published} (of {last.run})")
    return reason


def _unique_fingerprint() -> str:
    """Returns a fingerprint that no other run has: no task that uses it is taken from the cache."""
    return f"run-{uuid.uuid4().hex}"


def dataset_key(history: Storage, key: str) -> str:
    """Returns the name of a dataset with the content `key` in KFP's cache.

    The cache does not check that a dataset still exists; a lifecycle rule may have removed its shards. Then
    it gets another name, and is written again.
    """
    name = f"{DATASETS}/{key}.json"
    try:
        dataset = history.read(name).restore(CachedDataset)
        if dataset and dataset.uri:
            manifests.load_whole(files.local_path(dataset.uri))
            return f"{key}-{dataset.nonce}"
    except ModelError:  # its record is damaged
        pass
    except DatasetError:
        assert dataset
        report(_TOPIC, f"the dataset {dataset.uri} is no longer complete: it is written again")
    dataset = CachedDataset(nonce=uuid.uuid4().hex[:8])
    history.replace(name, files.to_json(asdict(dataset), name))
    return f"{key}-{dataset.nonce}"


def record_dataset(history_uri: str, fingerprint: str, uri: str) -> None:
    """Records that a dataset is complete; `fingerprint` comes from `dataset_key`."""
    key, _, nonce = fingerprint.rpartition("-")
    history, name = open_history(history_uri), f"{DATASETS}/{key}.json"
    if history.read(name).text is not None:
        history.replace(name, files.to_json(asdict(CachedDataset(nonce=nonce, uri=uri)), name))


def write_history(exported: Path, state: str, history_uri: str, champion_uri: str, job_name: str) -> None:
    """Writes the result of a run that trained into the history; the arguments are those of `record_run`.

    Raises ModelError when `exported` has no complete validation, RunError when writing fails.
    """
    if not history_uri:
        return
    verdict = read_part(exported, BLESSING_FILE, Verdict)
    is_published = verdict.blessed and champion_uri
    content = files.parse_json(state, "state", SettingsError)
    run = RecordedRun(
        run=job_name,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=content.get("reason", ""),
        blessed=verdict.blessed,
        verdict=verdict.summary,
        metrics=verdict.metrics,
        champion=champions.published_by(exported, champion_uri, job_name) if is_published else "",
        state=restore(State, content, "state", SettingsError),
    )
    open_history(history_uri).replace(LATEST, files.to_json(asdict(run), LATEST))
    report(_TOPIC, f"remembered in {history_uri}: the next run trains if data, settings or code change")


def fingerprint(settings: PreprocessSettings) -> Fingerprint:
    """Returns the fingerprint of the source that the settings name.

    Files are identified by name, size and modification time, or in a bucket by the object's generation, not
    by the path of their directory. A plug-in is identified by the text that its method `fingerprint()`
    returns, and not at all without one. The digits, and datasets of TFDS without data_dir, change with their
    package only; tables of BigQuery are identified by modification time, rows and bytes where possible.
    Raises SourceError when the source cannot be read.
    """
    form, _, rest = settings.source.partition(":")
    if settings.source == "digits" or (form == "tfds" and not settings.data_dir):
        package = "tensorflow-datasets" if form == "tfds" else "scikit-learn"
        if version := plugins.installed_version(package):
            return Fingerprint(known_by="version", digest=version, text=f"{package} {version}")
        return Fingerprint(known_by="", digest="", text=f"{package} is not installed")
    if form == "bigquery":
        content, text = bigquery.version(settings.source, settings.features)
        digest = hashlib.sha256(content.encode()).hexdigest() if content else ""
        return Fingerprint(known_by="version" if content else "", digest=digest, text=text)
    if not rest or form not in ("images", "text", "tfds", "tfrecord", "table"):
        return _fingerprint_of_plugin(settings)
    if form in ("images", "text"):
        labels = match_files(settings.labels) if settings.labels else iter(())
        return _fingerprint_of_files(itertools.chain(labels, files_below(rest)))
    if form == "tfds":
        return _fingerprint_of_files(files_below(f"{settings.data_dir.rstrip('/')}/{rest.partition(':')[0]}"))
    if form == "table" and _has_images(rest, settings):
        _, directory = open_table(rest)
        return _fingerprint_of_files(itertools.chain(match_files(rest), files_below(directory or ".")))
    return _fingerprint_of_files(match_files(rest))


def _has_images(table: str, settings: PreprocessSettings) -> bool:
    """Whether a table may name image files, which are below its directory."""
    if "image" in settings.features:
        return True
    path = next(match_files(table)).path if is_pattern(table) else resolve(table)
    if not path.lower().endswith(".csv"):
        return "image" in open_table(path)[0].types  # any of the JSON lines may name one
    with as_source_error(path), open_read(path) as file:
        return b"image" in file.readline(_MAX_HEADER)


def _fingerprint_of_files(found: Iterable[File]) -> Fingerprint:
    digest, kinds = hashlib.sha256(), set[bool]()
    count = size = 0
    for file in found:
        count += 1
        size += file.size
        kinds.add(file.is_generation)
        digest.update(repr((file.name, file.size, file.version)).encode())
    text = f"{count:,} file{'' if count == 1 else 's'}, {size_text(size)}"
    return Fingerprint(known_by=_LISTINGS[frozenset(kinds or {False})], digest=digest.hexdigest(), text=text)


def _fingerprint_of_plugin(settings: PreprocessSettings) -> Fingerprint:
    source = open_source(settings)
    own = getattr(source, "fingerprint", None)
    if own is None:
        why = f"{settings.source} has no method fingerprint() -> str"
        return Fingerprint(known_by="", digest="", text=why)
    with plugins.calling(f"fingerprint() of {settings.source!r} failed", SourceError):
        text = own()
    if not isinstance(text, str) or not text:
        raise SourceError(f"fingerprint() of {settings.source!r} must return a text, got {text!r}")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Fingerprint(known_by="its own fingerprint", digest=digest, text=text[:80])


def initial_model_digest(uri: str) -> str:
    """Returns the digest of the model file that training starts from; "" where it cannot be read here.

    `uri` is a file, a directory that holds one, or a model store, as in the trainer's option.
    """
    try:
        with initial_model_file(uri).open("rb") as file:
            return _DIGEST + hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except (OSError, ShardlineError) as error:
        if crash.is_machine_failure(error):
            raise
        return ""  # only the replicas mount it, or it is missing, which training reports


def code_versions(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns the versions of all code that may change a result, by name; imports none of it.

    A plug-in's version is a digest of all Python files of its top-level package, or of its module's directory
    where it has no package: it may import any of them. Unpacked code is known by all of its files.
    """
    versions = {"shardline": _code_digest(path for name in _OWN for path in plugins.python_files(name))}
    for name in plugins.packages(plugins_of(parameters).values()):
        versions[name] = _code_digest(plugins.python_files(name))
    versions |= code.versions(code.unpacked_files())
    return versions | {name: version for name in _LIBRARIES if (version := plugins.installed_version(name))}


def plugins_of(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns the import strings among the parameters of a run, by the parameter that names each."""
    options = parameters.get("train_options")
    if isinstance(options, str):  # from a command line
        with contextlib.suppress(ValueError):
            options = json.loads(options)
    options = options if isinstance(options, Mapping) else {}
    training = plugin_references({**options, "model": parameters.get("model")})
    plugin_names = {
        name if name == "model" else f"train_options.{name}": value for name, value in training.items()
    }
    source = parameters.get("source")
    if isinstance(source, str) and is_plugin(source):
        plugin_names["source"] = source
    return plugin_names


def _code_digest(paths: Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.parent.name}/{path.name}\0".encode(errors="surrogateescape"))
        digest.update(path.read_bytes())
    return _DIGEST + digest.hexdigest()[:16]
