"""Preprocessing from end to end: a source string becomes a dataset directory.

`preprocess` is the sequence of `plan_dataset`, `write_shards` and `finish`, which can also run as tasks of
their own on machines that see the same directory. Whatever ends a run, the next one goes on from there.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardline.components.preprocess import copies, handover, marks, storage, work_directory
from shardline.components.preprocess import finish as finishing
from shardline.components.preprocess import schema as schemas
from shardline.components.preprocess.ahead import REPEATED, persistently
from shardline.components.preprocess.checks import check_anomalies
from shardline.components.preprocess.claims import Claim, Claims
from shardline.components.preprocess.deal import deal_rows
from shardline.components.preprocess.plan import Plan, PlannedShard, shard_name
from shardline.components.preprocess.pool import Processes
from shardline.components.preprocess.schema import Schema
from shardline.components.preprocess.screening import check_buckets, without_bad
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source, snapshots
from shardline.components.preprocess.survey import Rejected, survey
from shardline.components.preprocess.targets import describe
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.preprocess.write import write_planned
from shardline.trainer import progress
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import RunError, SettingsError, ShardlineError
from shardline.trainer.progress import Meter

_TOPIC = "preprocess"

# Until a task that has nothing left to claim looks again: short at first, then longer.
_FIRST_WAIT_SECONDS, _WAIT_SECONDS = 0.2, 10.0

# Objects that are made before Python looks for cycles among them, of which examples have none: with its own
# number, 700, that takes a tenth of the time that a survey takes.
_UNCOLLECTED = 50_000


def preprocess(settings: PreprocessSettings, out: Path, *, overwrite: bool = False) -> Manifest:
    """Writes a source as a dataset directory: balanced TFRecord shards, then their manifest.

    The same source and settings give the same bytes, with any number of processes and after any number of
    interruptions.

    Args:
        settings: The source, and how it becomes shards.
        out: A directory that is missing or empty, or in which an earlier run was interrupted.
        overwrite: Whether `out` may hold a dataset, which is replaced when the new one is complete.

    Raises:
        SettingsError: `out` cannot be used.
        SourceError: The source, or one of its examples, cannot be used, or does not fit its schema.
        RunError: Another run is at work in `out`, or writing failed.
    """
    _check_out(settings, out, overwrite=overwrite)
    settings, schema = _with_schema(settings)
    with _working(out) as work, _processes(settings) as processes:
        settings = _pinned(settings, work)
        complete = _complete_before(settings, schema, work, overwrite=overwrite)
        if complete is None:
            plan = _make_plan(settings, schema, work, processes)
            _write(plan, plan.shards, work, processes, work.claim)
            complete = _finish(work)
        return complete


def plan_dataset(settings: PreprocessSettings, out: Path, *, overwrite: bool = False) -> Plan:
    """Surveys the source and writes the plan, the first of three steps."""
    _check_out(settings, out, overwrite=overwrite)
    settings, schema = _with_schema(settings)
    with _working(out) as work, _processes(settings) as processes:
        settings = _pinned(settings, work)
        work.publishing.unlink(missing_ok=True)
        plan = _make_plan(settings, schema, work, processes)
        handover.put(plan, work)
        _report_repeated()
        return plan


def write_shards(out: Path, task: int, tasks: int) -> int:
    """Writes shards of a plan, one of `tasks` that do so together: the second of three steps.

    Each claims a few shards at a time, from its share on (`task` counts from 0), until all are written. It
    returns the number of records that this one has written.
    """
    if not 0 <= task < tasks:
        raise SettingsError(f"task must be 0..{tasks - 1}, not {task}")
    with _working(out, shared=True) as work:
        plan = handover.get(work)
        chunks = plan.chunks(tasks)
        first = task * len(chunks) // tasks
        with _processes(plan.settings) as processes:
            return _write_claimed(plan, [*chunks[first:], *chunks[:first]], work, processes)


def finish(out: Path) -> Manifest:
    """Makes a dataset of the shards, of which none may be missing: the last of three steps."""
    with _working(out) as work:
        plan = handover.get(work)
        handover.get_rows(work, [shard.file for shard in plan.shards])
        return _finish(work)


def _check_out(settings: PreprocessSettings, out: Path, *, overwrite: bool) -> None:
    """Refuses a directory that cannot become the dataset, or that the source would take for a part of it."""
    work_directory.check(out, overwrite=overwrite)
    form, _, rest = settings.source.partition(":")
    if settings.source.startswith(snapshots.PREFIX):
        snapshots.parse(settings.source)
        return
    path, shard = storage.resolve(rest), Path(os.path.realpath(out)) / shard_name("train", 0, 1)
    if form in ("images", "text") and not settings.labels:
        is_part = shard.is_relative_to(os.path.realpath(path))
    else:
        is_part = form == "tfrecord" and _matches(shard, os.path.abspath(path))
    if is_part and not storage.is_remote(path):
        raise SettingsError(
            f"{out} lies inside the source {settings.source}, of which the dataset would become a part; give "
            "a directory outside of it"
        )


def _matches(path: Path, pattern: str) -> bool:
    return fnmatch.fnmatch(str(path), pattern) if "**" in pattern else path.match(pattern)


@contextlib.contextmanager
def _working(out: Path, *, shared: bool = False) -> Iterator[WorkDirectory]:
    """Holds the work directory of `out`; what writing into it raises becomes one line."""
    with work_directory.locked(out, shared=shared) as work:
        try:
            with copies.kept_in(work.copies):
                yield work
        except (OSError, RunError) as error:
            with contextlib.suppress(OSError):  # why it cannot be asked has been said
                _check_claim(work)
            if isinstance(error, RunError):
                raise
            raise RunError(
                f"cannot write the dataset {out}: {error.strerror or error}; make room and run again, it "
                "will go on from there"
            ) from error


def _processes(settings: PreprocessSettings) -> Processes:
    return Processes(settings.processes or len(os.sched_getaffinity(0)), check_buckets, write_planned)


def _pinned(settings: PreprocessSettings, work: WorkDirectory) -> PreprocessSettings:
    """Returns the settings with the moment of their source: that of an interrupted run, if there was one."""
    earlier = ""
    if settings.source.startswith(snapshots.PREFIX):
        with contextlib.suppress(ShardlineError):
            is_published = work_directory.is_published(work)
            earlier = (
                manifests.load(work.out).source if is_published else Plan.load(work.plan).settings.source
            )
    return replace(settings, source=snapshots.pinned(settings.source, earlier=earlier))


def _complete_before(
    settings: PreprocessSettings, schema: Schema | None, work: WorkDirectory, *, overwrite: bool
) -> Manifest | None:
    """Returns the dataset of a run that was interrupted when all but its traces was done."""
    if not work_directory.is_published(work):
        return None
    manifest = manifests.load(work.out)
    recorded = finishing.recorded_settings(settings, schema.digest if schema else "")
    if (manifest.source, manifest.settings) == (settings.source, recorded):
        work.remove()
        progress.say(_TOPIC, f"{work.out} is complete already")
        return manifest
    work.publishing.unlink()
    work_directory.check(work.out, overwrite=overwrite)
    return None


def _with_schema(settings: PreprocessSettings) -> tuple[PreprocessSettings, Schema | None]:
    path = schemas.find(settings.source, settings.schema)
    if path != settings.schema:
        progress.say(_TOPIC, f"the source is checked against {path}")
    return replace(settings, schema=path), schemas.read(path) if path else None


def _make_plan(
    settings: PreprocessSettings, schema: Schema | None, work: WorkDirectory, processes: Processes
) -> Plan:
    """Surveys the source and writes the plan into the work directory.

    What an earlier run has done stays; what only its survey had made is made anew.
    """
    try:
        work.forget_plan()
        surveyed = time.time_ns()
        rejected = Rejected(settings.on_bad_record, work.rejected)
        with _rarely_collecting():
            found = survey(open_source(settings, schema), settings, work, rejected, schema)
        check_anomalies(found.anomalies, settings)
        plan = Plan(
            settings=settings,
            labels=found.labels,
            features=found.features,
            places=tuple(found.places),
            surveyed=surveyed,
            records_in=sum(found.codes) + found.bad,
            rejected={},
            shards=(),
            schema=schema.digest if schema else "",
            anomalies=found.anomalies,
        )
        if settings.on_bad_record == "skip":
            found = without_bad(found, plan, work, processes, rejected)
            rejected.check(plan.records_in, settings.max_bad_fraction)
            rejected.sort()
        plan = replace(plan, rejected=dict(rejected.reasons), shards=deal_rows(found, settings, work))
        _check_claim(work)
        work.bring_marks()
        marks.forget_others(plan, work)
        work.forget_shards({shard.file for shard in plan.shards})
        plan.save(work.plan)
        return plan
    except ShardlineError:
        _check_claim(work)
        # Nothing is left of a source that cannot be used, unless there was something before.
        work.forget_plan()
        if not work.has_marks():
            work.remove()
        raise


@contextlib.contextmanager
def _rarely_collecting() -> Iterator[None]:
    thresholds = gc.get_threshold()
    if 0 < thresholds[0] < _UNCOLLECTED:
        gc.set_threshold(_UNCOLLECTED, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _check_claim(work: WorkDirectory) -> None:
    """Ends a run that was taken over, before it changes what is another one's now."""
    if work.claim:
        work.claim.check()


def _write_claimed(
    plan: Plan, chunks: Sequence[Sequence[PlannedShard]], work: WorkDirectory, processes: Processes
) -> int:
    """Writes chunk after chunk that nobody else writes, until all are done, by whomever."""
    known, written, wait = Claims(work.path, work.pulse), 0, _FIRST_WAIT_SECONDS
    by_claim = {f"chunk-{chunk[0].file}": chunk for chunk in chunks}
    while True:
        done = finishing.find_done(plan, work)
        left = [name for name, chunk in by_claim.items() if any(shard.file not in done for shard in chunk)]
        if not left:
            _report_repeated()
            return written
        if wait == _FIRST_WAIT_SECONDS or wait >= 1:
            progress.say(_TOPIC, f"{len(done)} of {len(plan.shards)} shards done by all tasks")
        if claim := known.take(*left):
            chunk = by_claim[claim.path.name.rpartition(".")[0]]
            with claim:
                handover.get_rows(work, [shard.file for shard in chunk])
                _write(plan, chunk, work, processes, claim)
            written += sum(shard.records for shard in chunk)
            if missing := {shard.file for shard in chunk} - finishing.find_done(plan, work).keys():
                raise RunError(
                    f"{min(missing)} of {work.out} was written, and is not as the plan wants it; does "
                    "something else write there? Plan the dataset again"
                )
        else:
            time.sleep(wait)
            wait = min(2 * wait, _WAIT_SECONDS)


def _write(
    plan: Plan,
    shards: Sequence[PlannedShard],
    work: WorkDirectory,
    processes: Processes,
    claim: Claim | None,
) -> None:
    done = finishing.find_done(plan, work)
    left = [shard for shard in shards if shard.file not in done]
    if len(left) < len(shards):
        progress.say(_TOPIC, f"{len(shards) - len(left)} of {len(shards)} shards already done")
    left.sort(key=lambda shard: -shard.records)
    meter = Meter("written", sum(shard.records for shard in left), rejected=sum(plan.rejected.values()))

    def report(written: int, size: int) -> None:
        if claim:
            claim.check(ask=False)
        meter.advance(written, size)

    processes.do(write_planned, work.given, [shard.file for shard in left], report)


def _finish(work: WorkDirectory) -> Manifest:
    plan = Plan.load(work.plan)
    manifest = finishing.describe(plan, work)

    def publish(shards: list[str]) -> None:
        work_directory.publish(work, shards, manifest.fingerprint)
        _check_claim(work)
        manifests.save(manifest, work.out)

    shards = [shard.file for shard in plan.shards]
    if work.is_far:
        persistently(publish, shards)
    else:
        publish(shards)
    work.remove()
    _report(manifest)
    return manifest


def _report_repeated() -> None:
    if repeated := REPEATED.take():
        progress.say(_TOPIC, f"{repeated:,} requests were sent again after an error that passed")


def _report(manifest: Manifest) -> None:
    splits = manifest.splits
    total = manifest.records
    first, *rest = (f"{name} {split.records:,} in {len(split.shards)}" for name, split in splits.items())
    shards = ", ".join([f"{first} shards", *rest])
    progress.say(_TOPIC, f"{total:,} records: {shards}")
    for label in manifest.labels:
        tallies = [split.labels[label.name] for split in splits.values()]
        progress.say(_TOPIC, f"label: {describe(label, tallies)}")
    for reason in manifest.find_constant("test"):
        progress.say(
            _TOPIC, f"warning: {reason}: it cannot judge a model; take other shares or another split"
        )
    rejected = sum(manifest.rejected.values())
    if rejected:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest.rejected.items())
        progress.say(_TOPIC, f"{rejected:,} of {manifest.records_in:,} left out: {reasons}")
    if manifest.converted:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in manifest.converted.items())
        progress.say(_TOPIC, f"images of which something is converted or left out: {kinds}")
    _report_repeated()
    if manifest.duplicates.straddling:
        progress.say(
            _TOPIC,
            f"{manifest.duplicates.straddling:,} groups of equal examples lie in more than one split "
            f"({', '.join(manifest.duplicates.named[0])}); key=content keeps them together",
        )
    progress.fact("dataset", manifest.fingerprint)
    progress.fact("records", total, " / ".join(f"{name} {split.records:,}" for name, split in splits.items()))
