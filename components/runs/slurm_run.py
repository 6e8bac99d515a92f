"""Directory of a Slurm job, RUN/replicas/TASK: how its replicas have ended.

job.sh, job.id                  script, and id of the job
slurm.log, exit                 output of the script and of srun, and exit code of the script
NAME.log, 3/NAME.log            output of each replica, in an array of each element's
job.json                        exits of the replicas, as of a job on this machine, once it has been followed
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from pathlib import Path

from shardline.components.runs.causes import Failure, exit_code
from shardline.components.runs.logs import LAST_LINES, last_lines, own_error
from shardline.components.runs.record import JobRecord, ReplicaRecord, ReplicaStart
from shardline.components.runs.slurm_job import (
    SCRIPT_FILE,
    SLURM_LOG,
    SlurmJob,
    element_numbers,
    end_message,
    read_text,
)
from shardline.trainer.base.errors import EXIT_BAD_INPUT

_REPLICA_LOG = re.compile(r"(?:chief|worker|ps|evaluator)-\d+")
_ROLES = ("chief", "worker", "ps", "evaluator")
#: What srun says of a task that has not ended with 0, and that it ends the others.
_EXIT = re.compile(
    r"srun: error: (\S+): tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(.+?))(?: \(core dumped\))?"
)
_ABORT = re.compile(
    r"srun: .*(?:Terminating StepId|Job step aborted|Force Terminated)|\*\*\* STEP \S+ ON .* CANCELLED AT"
)
#: What the script says before all tasks start again; before a requeue by Slurm it says nothing.
_AGAIN = re.compile(r"exit code \d+: all tasks start again|asked to stop: requeued")
_SIGNALS = {signal.strsignal(item): item.name for item in signal.Signals} | {"Out Of Memory": "SIGKILL"}
_FIRST = re.compile(r"--first=(\d+)")
_POOLS = re.compile(r"--pools (\S+)")


def log_names(directory: Path) -> dict[Path, str]:
    """Returns the logs in a job's directory with the names of their replicas, "3/chief-0" in an array."""
    logs = [*directory.glob("slurm*.log"), *directory.glob("*/slurm*.log")]
    logs += [path for path in directory.rglob("*.log") if _REPLICA_LOG.fullmatch(path.stem)]
    return {
        path: f"{path.parent.name}/{path.stem}" if path.parent.name.isdecimal() else path.stem
        for path in sorted(logs)
        if path.is_file()
    }


def job_record(directory: Path, job: SlurmJob, error: str | None = None) -> JobRecord:
    """Returns the record of a job that has ended, in the order in which its replicas have ended."""
    names = replica_names(directory)
    attempts = read_exits(read_text(directory / SLURM_LOG), names)
    if job.state == "succeeded":  # srun says nothing of a task that ended with 0
        attempts[-1] = {name: attempts[-1].get(name, (0, False)) for name in names}
    order = [*attempts[-1], *(name for name in names if name not in attempts[-1])]
    starts = {
        name: tuple(
            ReplicaStart(start_s=0.0, exit=exit_status, stopped=stopped)
            for exit_status, stopped in (attempt.get(name, (None, False)) for attempt in attempts)
        )
        for name in order
    }
    return JobRecord(
        display_name=job.id,
        state="stopped" if job.state == "cancelled" else job.state,
        error=error,
        duration_s=job.seconds or 0.0,
        replicas=tuple(ReplicaRecord(name, len(attempts) - 1, starts[name]) for name in order),
    )


#: Exit status of each replica that has not ended with 0, and whether srun stopped it after another's failure.
Exits = dict[str, tuple[int | str, bool]]


def read_exits(text: str, names: Sequence[str]) -> list[Exits]:
    """Reads what srun says of its tasks, in the order of their ends, for each start of all of them.

    Args:
        text: Output of the script of a job.
        names: The names of the replicas, by the task's number.
    """
    attempts: list[Exits] = [{}]
    aborted, seen = False, set[tuple[str, int]]()
    for line in text.splitlines():
        match = _EXIT.fullmatch(line)
        tasks = [n for n in element_numbers(match[2] if match else "") if n < len(names)]
        if _AGAIN.match(line) or any((match[1], n) in seen for n in tasks if match):
            attempts.append({})
            aborted, seen = False, set()
        if match:
            seen.update((match[1], number) for number in tasks)
            status = int(match[3]) if match[3] else _SIGNALS.get(match[4], 1)
            for number in tasks:
                attempts[-1].setdefault(names[number], (status, aborted))
        aborted = aborted or bool(_ABORT.search(line))
    return attempts


def replica_names(directory: Path) -> list[str]:
    """Returns the names of a job's replicas in the order of their tasks, as its script says.

    A component of a heterogeneous job numbers its tasks from 0: "task-0" is that of any component.
    """
    script = read_text(directory / SCRIPT_FILE)
    logs = [path.stem for path in log_names(directory) if _REPLICA_LOG.fullmatch(path.stem)]
    found = _POOLS.search(script)
    counts = dict(pool.partition("=")[::2] for pool in found[1].split(",")) if found else {}
    names = []
    for role in _ROLES:
        logged = sum(name.startswith(f"{role}-") for name in logs)
        count = counts.get(role, "0") if found else str(logged)
        names += [f"{role}-{n}" for n in range(int(count) if count.isdecimal() else logged)]
    edges = [0, *map(int, _FIRST.findall(script)), len(names)]
    components = [names[edge:end] for edge, end in pairwise(edges)]
    named = zip_longest(*components)
    return [only[0] if len(only := [*filter(None, row)]) == 1 else f"task-{n}" for n, row in enumerate(named)]


def first_failure(record: JobRecord) -> ReplicaRecord | None:
    """Returns the replica whose last start failed first; None where none has."""
    ended = [item for item in record.replicas if item.starts and item.starts[-1].exit not in (0, None)]

    # A mistake is the cause of other failures; a replica that was stopped after another's failure comes last.
    def order(item: ReplicaRecord) -> tuple[bool, bool, float]:
        last = item.starts[-1]
        return last.exit != EXIT_BAD_INPUT, last.stopped, last.end_s or 0.0

    return min(ended, key=order, default=None)


def job_failure(directory: Path, job: SlurmJob) -> Failure:
    """Returns the failure of a job: that of the replica which failed first, or what Slurm says of the job."""
    first = first_failure(job_record(directory, job))
    texts = {name: read_text(path) for path, name in log_names(directory).items()}
    logs = {name: text.removesuffix("\n").split("\n") for name, text in texts.items()}
    # Where Slurm has ended the job, an error in a log is of an earlier start.
    is_own = job.word in ("FAILED", "")
    errors = {
        name: own_error(lines) for name, lines in logs.items() if is_own and not name.startswith("slurm")
    }
    if job.elements:
        failed = {f"{number}" for number, state in job.elements.items() if state == "failed"}
        errors = {name: error for name, error in errors.items() if name.partition("/")[0] in failed}
    name = first.name if first else "task-0"
    if name.startswith("task-"):  # which it is, srun does not say
        name = next((each for each in errors if errors[each]), first.name if first else "")
    status = first.starts[-1].exit if first else job.exit_code
    return Failure(
        task=directory.name,
        replica=name,
        exit_code=exit_code(status) if status and (name or job.word == "FAILED") else None,
        error=errors.get(name, "") or end_message(job),
        is_own_message=bool(errors.get(name)),
        lines=last_lines(logs[name]) if name in logs else tuple(logs.get("slurm", ()))[-LAST_LINES:],
        restarts=first.restarts if first else 0,
    )
