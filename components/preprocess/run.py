"""Preprocessing from end to end: a source string becomes a dataset directory.

`preprocess` is the sequence of `plan_dataset`, `write_shards` and `finish`, which can also run separately on
machines that see the same directory. The next run continues where an interrupted one ended.

As programs the later two are `python -m shardline.components.preprocess.run write OUT 0 8`, for the first of
eight parts, and `... finish OUT`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardline.components.preprocess import work_directory, write
from shardline.components.preprocess.plan import (
    Plan,
    PlannedShard,
    Rejected,
    assign_shards,
    load_part,
    shard_name,
    survey_batches,
    survey_source,
)
from shardline.components.preprocess.process_pool import Processes
from shardline.components.preprocess.schema import describe_label, read_schema
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import bigquery
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.storage import copies
from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import RunError, SettingsError, ShardlineError
from shardline.trainer.base.progress import Meter
from shardline.trainer.manifest import Manifest

_TOPIC = "preprocess"


def preprocess(
    settings: PreprocessSettings, out: str | os.PathLike[str], *, overwrite: bool = False
) -> Manifest:
    """Writes a source as a dataset directory: balanced TFRecord shards, then their manifest.

    The same source and settings give the same bytes, with any number of processes and after any number of
    interruptions.

    Args:
        settings: The source, and how it becomes shards.
        out: A directory that is missing or empty, or in which an earlier run was interrupted.
        overwrite: Whether `out` may hold a dataset, which is replaced when the new one is complete; in a
            bucket, it is gone when the first shard is written.

    Raises:
        SettingsError: `out` cannot be used.
        SourceError: The source or one of its examples cannot be used, or does not fit the schema.
        RunError: Another run is writing to `out`, or writing failed.
    """
    with _planning(settings, out, overwrite=overwrite) as run:
        if complete := run.completed_manifest(overwrite=overwrite):
            return complete
        plan = run.make_plan()
        _write(plan, plan.shards, run.work, run.processes)
        return _finish(plan, run.work)


def plan_dataset(
    settings: PreprocessSettings, out: str | os.PathLike[str], *, overwrite: bool = False
) -> Plan:
    """Surveys the source and writes the plan, the first of three steps; arguments as of `preprocess`."""
    with _planning(settings, out, overwrite=overwrite) as run:
        _check_again(run.work, overwrite=overwrite)
        plan = run.make_plan()
        run.work.upload_plan(shard.file for shard in plan.shards)
        return plan


def write_shards(out: str | os.PathLike[str], part: int, parts: int) -> int:
    """Writes part `part` (from 0) of `parts` of a plan, the second of three steps.

    Shards that are done stay, so that a part may be started again, or twice at once. Returns the number of
    records written.
    """
    if not 0 <= part < parts:
        raise SettingsError(f"part must be 0..{parts - 1}, not {part}")
    with _locked_work_directory(out, shared=True) as work:
        plan, shards = load_part(work, part, parts)
        with _start_processes(plan.settings.processes) as processes:
            return _write(plan, shards, work, processes)


def finish(out: str | os.PathLike[str]) -> Manifest:
    """Makes a dataset of the shards, which must be complete: the last of three steps."""
    with _locked_work_directory(out) as work:
        plan, _ = load_part(work)
        return _finish(plan, work)


@contextlib.contextmanager
def _locked_work_directory(out: str | os.PathLike[str], *, shared: bool = False) -> Iterator[WorkDirectory]:
    """Holds the work directory of `out`; errors of writing into it become one line."""
    with work_directory.hold(files.local_path(out), shared=shared) as work:
        try:
            with copies.kept_in(work.copies):
                yield work
        except OSError as error:
            reason = files.with_space(error.strerror or str(error), error.filename or work.path)
            raise RunError(
                f"cannot write the dataset {out}: {reason}; make room and run again to continue from there"
            ) from error


def _start_processes(count: int) -> Processes:
    count = count or len(os.sched_getaffinity(0))
    return Processes(count, survey_batches, write.check_buckets, write.write_planned)


@contextlib.contextmanager
def _planning(
    settings: PreprocessSettings, out: str | os.PathLike[str], *, overwrite: bool
) -> Iterator[_Planning]:
    """Holds the work directory of a run; the settings it yields have the snapshot time of their source."""
    out = files.local_path(out)
    work_directory.check_output(out, overwrite=overwrite)
    if settings.source.startswith(bigquery.PREFIX):
        bigquery.parse(settings.source)
    directory = Path(os.path.realpath(files.bucket_uri(out) or out))
    if settings.would_read(str(directory / shard_name("train", 0, 1))):
        raise SettingsError(
            f"{out} is inside the source {settings.source}, which would then include the dataset; name "
            "a directory outside it"
        )
    if settings.schema:
        read_schema(settings.schema)  # fails before any file is made
    with _locked_work_directory(out) as work, _start_processes(settings.processes) as processes:
        source, earlier = settings.source, ""
        if source.startswith(bigquery.PREFIX):  # the snapshot of an interrupted run, if there was one
            with contextlib.suppress(ShardlineError):
                published = work.is_published()
                earlier = work.dataset().source if published else Plan.load(work.plan).settings.source
            source = bigquery.pin_snapshot(source, earlier=earlier)
        yield _Planning(replace(settings, source=source), work, processes)


@dataclass(frozen=True)
class _Planning:
    """The planning of a run, which holds its work directory and processes."""

    settings: PreprocessSettings
    work: WorkDirectory
    processes: Processes

    def completed_manifest(self, *, overwrite: bool) -> Manifest | None:
        """Returns the dataset of an earlier run that is complete but for the cleaning up; else None."""
        settings, work = self.settings, self.work
        if work.is_published():
            manifest = work.dataset()
            schema = read_schema(settings.schema).digest if settings.schema else ""
            if (manifest.source, manifest.settings) == (settings.source, settings.recorded(schema)):
                work.remove()
                progress.report(_TOPIC, f"{work.out} is already complete")
                return manifest
        _check_again(work, overwrite=overwrite)
        return None

    def make_plan(self) -> Plan:
        """Surveys the source again and writes the plan; shards of an earlier run stay."""
        settings, work, rejected = self.settings, self.work, Rejected(self.settings.on_bad_record)
        try:
            work.discard_plan()
            found = survey_source(settings, work, self.processes, rejected)
            if settings.on_bad_record == "skip":
                found = write.drop_bad_images(found, work, self.processes, rejected)
                rejected.check_fraction(found.plan.records_in, settings.max_bad_fraction)
                rejected.write(work.rejected)
            plan = replace(found.plan, rejected=dict(rejected.reasons), shards=assign_shards(found, work))
            work.begin()
            write.remove_other_markers(plan, work)
            for path in {*work.path.glob("*.tfrecord")} - {work.path / shard.file for shard in plan.shards}:
                path.unlink()
            plan.save(work.plan)
            return plan
        except ShardlineError:
            # A source that cannot be used leaves nothing, unless an earlier run has left shards; in a bucket
            # it has written nothing yet.
            work.discard_plan()
            if not work.storage.is_remote and not work.markers():
                work.remove()
            raise


def _check_again(work: WorkDirectory, *, overwrite: bool) -> None:
    """Checks the directory that is held now: another run may have written here in the meantime."""
    if work.is_published():  # by a run that ended before its cleaning up
        work.publishing.unlink(missing_ok=True)
        if work.storage.is_remote:
            work.remove()
    work_directory.check_output(work.out, overwrite=overwrite)


def _write(plan: Plan, shards: Sequence[PlannedShard], work: WorkDirectory, processes: Processes) -> int:
    done = write.find_done(plan, shards, work)
    pending = [shard for shard in shards if shard.file not in done]
    if len(pending) < len(shards):
        progress.report(_TOPIC, f"{len(shards) - len(pending)} of {len(shards)} shards already done")
    pending.sort(key=lambda shard: -shard.records)
    records = sum(shard.records for shard in pending)
    meter = Meter("written", records, rejected=sum(plan.rejected.values()))
    try:
        names = [shard.file for shard in pending]
        processes.run_job(write.write_planned, work.arguments, names, meter.advance)
    except RunError as error:
        raise RunError(files.with_space(str(error), work.path, meter.bytes_left)) from error
    return records


def _finish(plan: Plan, work: WorkDirectory) -> Manifest:
    manifest = write.make_manifest(plan, work)
    work.publish(manifest)
    work.remove()
    _report(manifest)
    return manifest


def _report(manifest: Manifest) -> None:
    splits = manifest.splits
    first, *rest = (f"{name} {split.records:,} in {len(split.shards)}" for name, split in splits.items())
    messages = [f"{manifest.records:,} records: {', '.join([f'{first} shards', *rest])}"]
    for label in manifest.labels:
        tallies = [split.labels[label.name] for split in splits.values()]
        messages.append(f"label: {describe_label(label, tallies)}")
    messages += [
        f"warning: {reason}: it cannot judge a model; choose other shares or another split"
        for reason in manifest.find_constant("test")
    ]
    if rejected := sum(manifest.rejected.values()):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest.rejected.items())
        messages.append(f"{rejected:,} of {manifest.records_in:,} left out: {reasons}")
    if manifest.converted:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in manifest.converted.items())
        messages.append(f"images with something converted or left out: {kinds}")
    if manifest.duplicates.straddling:
        messages.append(
            f"{manifest.duplicates.straddling:,} groups of equal examples are in more than one split "
            f"({', '.join(manifest.duplicates.named[0])}); key=content keeps them together"
        )
    if manifest.duplicates.by_chance:
        share = f"{manifest.duplicates.examples / manifest.records:.0%} of the rows equal an earlier one"
        messages.append(
            f"warning: {share} by chance, and key=content moves them to one split together, with their "
            "label: name a column as key, or leave key=content out"
            if manifest.has_copies
            else f"{share}: in so few values that is chance, and they count as independent examples"
        )
    for message in messages:
        progress.report(_TOPIC, message)
    progress.fact("dataset", manifest.fingerprint)
    records = " / ".join(f"{name} {split.records:,}" for name, split in splits.items())
    progress.fact("records", manifest.records, records)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes one part, or finishes; an error ends the process with one line and its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=main.__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    writing = steps.add_parser("write", help="write the shards of one part")
    writing.add_argument("out", type=Path)
    writing.add_argument("part", type=int, help="number of the part, from 0")
    writing.add_argument("parts", type=int, help="number of parts")
    steps.add_parser("finish", help="write the manifest").add_argument("out", type=Path)
    given = parser.parse_args(arguments)
    with progress.exit_on_error(_TOPIC):
        if given.step == "write":
            write_shards(given.out, given.part, given.parts)
        else:
            finish(given.out)


if __name__ == "__main__":
    main()
