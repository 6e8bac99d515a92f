"""Directory of a Slurm job, RUN/replicas/TASK: how its replicas have ended.

job.sh, job.id                  script, and id of the job
slurm.log, exit                 output of the script and of srun, and exit code of the script
NAME.log, NAME.json             output and starts of each replica; those of an array's element 3 are in 3/
job.json                        the starts of all, as of a job on this machine, once it has been followed
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shardline.components.runs.causes import Failure, exit_code
from shardline.components.runs.logs import last_lines, own_error
from shardline.components.runs.record import JobRecord, ReplicaRecord, ReplicaStart
from shardline.components.runs.slurm_job import SLURM_LOG, SlurmJob, end_message, read_text
from shardline.trainer.base.errors import EXIT_BAD_INPUT

_REPLICA = re.compile(r"(?:chief|worker|ps|evaluator)-\d+")


def log_names(directory: Path) -> dict[Path, str]:
    """Returns the logs in a job's directory with the names of their replicas, "3/chief-0" in an array."""
    logs = {*directory.glob("slurm*.log"), *directory.glob("*/slurm*.log"), *_of_replicas(directory, ".log")}
    return {path: _name(path) for path in sorted(logs) if path.is_file()}


def _of_replicas(directory: Path, suffix: str) -> Iterator[Path]:
    return (path for path in directory.rglob(f"*{suffix}") if _REPLICA.fullmatch(path.stem))


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}" if path.parent.name.isdecimal() else path.stem


def job_record(directory: Path, job: SlurmJob, error: str | None = None) -> JobRecord:
    """Returns the record of a job that has ended, from those of its replicas; raises SettingsError."""
    records = [
        replace(ReplicaRecord.read(path), name=_name(path))
        for path in sorted(_of_replicas(directory, ".json"))
    ]
    began = min((start.start_s for record in records for start in record.starts), default=0.0)

    def since(start: ReplicaStart) -> ReplicaStart:
        begin, end = round(start.start_s - began, 3), start.end_s and round(start.end_s - began, 3)
        # One that Slurm has killed with all its processes has left no end.
        return replace(start, start_s=begin, end_s=end, stopped=start.stopped or end is None)

    return JobRecord(
        display_name=job.id,
        state="stopped" if job.state == "cancelled" else job.state,
        error=error,
        duration_s=job.seconds or 0.0,
        replicas=tuple(replace(record, starts=tuple(map(since, record.starts))) for record in records),
    )


def first_failure(record: JobRecord) -> ReplicaRecord | None:
    """Returns the replica whose last start failed first; None where none has."""
    last = {item: item.starts[-1] for item in record.replicas if item.starts}
    failed = [each for each, at in last.items() if at.exit != 0 and (at.stopped or at.exit is not None)]

    # A mistake is the cause of other failures; a replica that was stopped after another's failure comes last.
    def order(item: ReplicaRecord) -> tuple[bool, bool, float]:
        start = last[item]
        return start.exit != EXIT_BAD_INPUT, start.stopped, start.end_s or 0.0

    return min(failed, key=order, default=None)


def replica_failure(directory: Path, record: JobRecord, error: str, *, hears: bool = True) -> Failure | None:
    """Returns the failure of the replica of a job that failed first; None where none has.

    Its error is the replica's own message, where it has left one and `hears`, or else `error`.
    """
    if (first := first_failure(record)) is None:
        return None
    last = first.starts[-1]
    lines = read_text(directory / f"{first.name}.log").removesuffix("\n").split("\n")
    message = own_error(lines) if hears else ""
    return Failure(
        task=directory.name,
        replica=first.name,
        exit_code=None if last.exit is None else exit_code(last.exit),
        error=message or error,
        is_own_message=bool(message),
        lines=last_lines(lines),
        peak_memory=last.peak_memory_bytes,
        restarts=first.restarts,
    )


def job_failure(directory: Path, job: SlurmJob) -> Failure:
    """Returns the failure of a job: that of the replica which failed first, or what Slurm says of the job."""
    # Where Slurm has ended the job, an error in a log is of an earlier start.
    hears = job.word in ("FAILED", "")
    return replica_failure(directory, job_record(directory, job), end_message(job), hears=hears) or Failure(
        task=directory.name,
        exit_code=job.exit_code if job.word == "FAILED" else None,
        error=end_message(job),
        lines=last_lines(read_text(directory / SLURM_LOG).splitlines()),
    )
