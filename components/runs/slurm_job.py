"""Job of Slurm: its state, why it waits or has failed, and its end on request, by Slurm's own commands.

Sources: https://slurm.schedmd.com/scontrol.html, https://slurm.schedmd.com/sacct.html and
https://slurm.schedmd.com/squeue.html (job state codes, job reason codes).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardline.components.runs.causes import waiting_cause
from shardline.trainer.base.errors import PlatformError, SettingsError
from shardline.trainer.base.progress import EVENTS_VARIABLE

#: In the directory of a job: its script, what that prints, the exit code, which it writes last, and its id.
SCRIPT_FILE, SLURM_LOG, EXIT_FILE, ID_FILE = "job.sh", "slurm.log", "exit", "job.id"

_WAITING = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)
_FAILED = (
    "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "LAUNCH_FAILED"
)  # fmt: skip
#: Slurm's words by our states; any other, such as COMPLETING or SUSPENDED, is of a job that still has nodes.
_STATES = {
    **dict.fromkeys(_WAITING, "waiting"),
    **dict.fromkeys(_FAILED, "failed"),
    **dict.fromkeys(("CANCELLED", "REVOKED"), "cancelled"),
    "COMPLETED": "succeeded",
}
#: Keys of `scontrol show job -o`, where no value has a space but that of keys which are not read.
_FIELD = re.compile(
    r"(?:^|\s)(JobId|ArrayTaskId|HetJobOffset|JobState|Reason|Restarts|ExitCode|RunTime|StartTime|NodeList)=(\S*)"
)
_SACCT = ("JobID", "State", "ExitCode", "NodeList", "Elapsed", "Reason")
_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
#: Seconds after which Slurm's commands are ended; they try by themselves for about 20.
_TIMEOUT_S = 40.0
_UNKNOWN_JOB = "Invalid job id"


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job as Slurm sees it now.

    Attributes:
        id: Id, "1234".
        state: "waiting", "running", "succeeded", "failed" or "cancelled".
        word: Slurm's own word, such as OUT_OF_MEMORY; "" where Slurm no longer knows the job.
        reason: Slurm's reason of waiting or of a failure, such as Resources or NodeDown; "" for none.
        exit_code: Exit code of the script, of a signal as a shell reports it; None while it has none.
        restarts: How often Slurm has started it again.
        nodes: Its nodes, as in "n[1-2]"; "" where it has none.
        seconds: Seconds since its start; None before.
        start: When it has started, or is expected to (the cluster's local time); "" where unknown.
        elements: State of each element of an array, by its number; empty for any other job.
    """

    id: str
    state: str
    word: str
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    nodes: str = ""
    seconds: float | None = None
    start: str = ""
    elements: Mapping[int, str] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether its state is final."""
        return self.state in ("succeeded", "failed", "cancelled")


def read_job(job_id: str, directory: Path | None = None) -> SlurmJob:
    """Reads the state of a job, from Slurm, its accounting, or else the exit code in the job's directory.

    Raises:
        SettingsError: When Slurm knows no such job, which has left no exit code, or is not installed here.
        PlatformError: When Slurm is not reached.
    """
    if not re.fullmatch(r"\d+", job_id):
        raise SettingsError(f"the id of a Slurm job is a number, not {job_id!r}")
    job, why = None, f"Slurm knows no job {job_id}; squeue lists those that it knows"
    try:
        job = parse_jobs(job_id, run_slurm(["scontrol", "show", "job", "-o", job_id], accepts=_UNKNOWN_JOB))
        if job is None:  # Slurm forgets a job some minutes after its end (MinJobAge)
            accounts = ["sacct", "-X", "-P", "-n", "-j", job_id, "-o", ",".join(_SACCT)]
            job = parse_accounts(job_id, run_slurm(accounts, accepts="storage is disabled"))
    except SettingsError as error:  # not installed on this machine
        why = error.line
    if directory is not None:
        job = _with_exits(job_id, job, directory)
    if job is None:
        raise SettingsError(why)
    return job


def read_submitted(job_id: str, directory: Path) -> SlurmJob:
    """Reads a submitted job; one of which nothing is known any more has failed; raises as `read_job`."""
    try:
        return read_job(job_id, directory)
    except SettingsError:
        if shutil.which("scontrol") is None:
            raise
        return SlurmJob(id=job_id, state="failed", word="")


def read_jobs(job_ids: str, directory: Path) -> tuple[SlurmJob, ...]:
    """Reads the jobs of a run directory; raises as `read_job`."""
    places = job_directories(job_ids, directory)
    return tuple(read_submitted(job_id, place) for job_id, place in places.items())


def job_directories(job_ids: str, directory: Path) -> dict[str, Path]:
    """Returns the directory of each job of a run: that with its id, in the order of the ids."""
    places = {read_text(path): path.parent for path in directory.glob(f"*/*/{ID_FILE}")}
    return {job_id: places.get(job_id, directory) for job_id in job_ids.split()}


def read_text(path: Path) -> str:
    """Returns the text of a file; "" where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_exit(directory: Path) -> int | None:
    """Returns the exit code that a job's script has left in its directory; None where there is none."""
    text = read_text(directory / EXIT_FILE).strip()
    return int(text) if text.isdecimal() else None


def _with_exits(job_id: str, job: SlurmJob | None, directory: Path) -> SlurmJob | None:
    """Returns a job with what its script has left of all that Slurm has forgotten: it, or elements of it."""
    array = re.search(r"^#SBATCH --array=0-(\d+)", read_text(directory / SCRIPT_FILE), re.MULTILINE)
    if array is None:
        code = _read_exit(directory)
        if job is not None or code is None:
            return job
        return SlurmJob(id=job_id, state="failed" if code else "succeeded", word="", exit_code=code)
    known = job.elements if job else {}
    codes = {n: _read_exit(directory / str(n)) for n in range(int(array[1]) + 1) if n not in known}
    if job is None and set(codes.values()) == {None}:
        return None
    elements = {**known, **{n: "succeeded" if code == 0 else "failed" for n, code in codes.items()}}
    job = replace(job or SlurmJob(id=job_id, state="succeeded", word="", exit_code=0), elements=elements)
    if job.state == "succeeded" and "failed" in elements.values():
        job = replace(job, state="failed", word="FAILED", exit_code=next(filter(None, codes.values()), None))
    return job


def describe(job: SlurmJob) -> str:
    """Returns the state of a job in a line: "waiting: Resources (no node is free at present)"."""
    why = f": {job.reason} ({waiting_cause(job.reason).description})" if job.reason else ""
    when = f"; expected start {job.start}" if job.start else ""
    known = {
        "waiting": f"waiting{why}{when}",
        "running": f"running on {job.nodes}{'' if job.word == 'RUNNING' else f' ({job.word})'}",
        "succeeded": "succeeded",
    }
    done = list(job.elements.values()).count("succeeded")
    parts = [known.get(job.state) or end_message(job)]
    parts += [f"restart {job.restarts}"] if job.restarts and not job.has_ended else []
    parts += [f"{done} of {len(job.elements)} elements succeeded"] if job.elements else []
    return ", ".join(parts)


def end_message(job: SlurmJob) -> str:
    """Returns why a job has not succeeded, in Slurm's words."""
    if not job.word and job.exit_code is None:
        return f"Slurm no longer knows job {job.id}, and it left no exit code"
    words = [job.word, "" if job.reason in (job.word, "NonZeroExitCode") else job.reason]
    words += [f"exit code {job.exit_code}" if job.exit_code else ""]
    failed = [str(number) for number, state in job.elements.items() if state == "failed"]
    words += [f"in elements {', '.join(failed[:9])}{', ...' * (len(failed) > 9)}" if failed else ""]
    return f"Slurm job {job.id} {job.state}: {', '.join(filter(None, words))}"


def cancel_job(job_id: str) -> bool:
    """Asks Slurm to end a job, or all elements of an array; returns whether it had not ended.

    Raises as `read_job`.
    """
    if read_job(job_id).has_ended:
        return False
    run_slurm(["scancel", job_id])
    return True


def run_slurm(command: Sequence[str], *, accepts: str | None = None) -> str:
    """Runs one of Slurm's commands and returns its output, "" after a failure with the words `accepts`.

    Raises:
        SettingsError: When Slurm is not installed here.
        PlatformError: When Slurm is not reached, or refuses.
    """
    own = ("SLURM_CONF", "SLURM_CLUSTERS")
    # sbatch hands its variables on; those of a job or run in which this process runs are not the new job's.
    environ = {
        name: value
        for name, value in os.environ.items()
        if name in own or not name.startswith(("SLURM_", EVENTS_VARIABLE))
    }
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env=environ,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise SettingsError(
            f"Slurm is not installed here: there is no command {command[0]}; run this on a node from which "
            "jobs are submitted"
        ) from None
    except subprocess.TimeoutExpired:
        raise PlatformError(
            f"Slurm did not answer {command[0]} within {_TIMEOUT_S:.0f} s; 'scontrol ping' shows whether its "
            "controller runs"
        ) from None
    if done.returncode == 0:
        return done.stdout
    if accepts is not None and accepts in done.stderr:
        return ""
    raise PlatformError(f"{command[0]} failed: {one_line(done.stderr) or f'exit code {done.returncode}'}")


def one_line(text: str) -> str:
    """Returns what a command of Slurm has printed as errors, in one line without repetitions."""
    lines = (re.sub(r"^\w+: (?:(?:error|fatal): )?", "", line.strip()) for line in text.splitlines())
    return "; ".join(dict.fromkeys(filter(None, lines)))


def parse_jobs(job_id: str, text: str) -> SlurmJob | None:
    """Reads the output of `scontrol show job -o`: a line for the job, each component or array element."""
    rows = [dict(_FIELD.findall(line)) for line in text.splitlines() if line.strip()]
    return _join(job_id, [row for row in rows if "JobState" in row])


def parse_accounts(job_id: str, text: str) -> SlurmJob | None:
    """Reads the output of `sacct -X -P -n` with the fields of `_SACCT`."""
    rows = []
    for line in text.splitlines():
        row = dict(zip(_SACCT, line.split("|"), strict=False))
        match = re.fullmatch(r"\d+(?:_\[?([^]+]*)\]?)?(?:\+(\d+))?", row["JobID"])
        if match and len(row) == len(_SACCT):
            state = row["State"].partition(" ")[0]  # "CANCELLED by 1000"
            place = {"ArrayTaskId": match[1] or "", "HetJobOffset": match[2] or "0"}
            rows.append({**row, **place, "JobState": state, "RunTime": row["Elapsed"]})
    return _join(job_id, rows)


def _join(job_id: str, rows: Sequence[Mapping[str, str]]) -> SlurmJob | None:
    """Returns a job of its rows: one, one of each component, or one or more of an array's elements."""
    if not rows:
        return None
    elements = {number: _state(row) for row in rows for number in element_numbers(row.get("ArrayTaskId", ""))}
    # The script of a heterogeneous job runs on its first component, which ends with the whole job; an array
    # has ended when all elements have.
    order = ("running", "waiting", "failed", "cancelled", "succeeded")
    row = min(rows, key=lambda row: order.index(_state(row)) if elements else int(row.get("HetJobOffset", 0)))
    reasons = [each.get("Reason", "") for each in (row, *rows) if _state(each) == _state(row)]
    status, _, signal = row.get("ExitCode", "0:0").partition(":")
    code = 128 + int(signal) if signal not in ("", "0") else int(status)
    nodes = [each.get("NodeList", "") for each in rows]
    state, start = _state(row), row.get("StartTime", "")
    return SlurmJob(
        id=job_id,
        state=state,
        word=row["JobState"],
        reason=next((text.replace("_", " ") for text in reasons if text not in ("", "None")), ""),
        exit_code=code if state in ("succeeded", "failed", "cancelled") else None,
        restarts=int(row.get("Restarts", 0)),
        nodes=",".join(dict.fromkeys(text for text in nodes if text not in ("", "(null)", "None assigned"))),
        seconds=None if state == "waiting" else _seconds(row.get("RunTime", "")),
        start="" if start in ("Unknown", "N/A") else start,
        elements=elements,
    )


def _seconds(text: str) -> float:
    """Returns a duration, such as "1-02:03:04", in seconds; 0 for any other text."""
    match = _TIME.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _state(row: Mapping[str, str]) -> str:
    return _STATES.get(row["JobState"], "running")


def element_numbers(text: str) -> Iterator[int]:
    """Yields the numbers in "3", "0-5,8" or "0-9:2%4", Slurm's form for elements of an array."""
    for first, last, step in re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", text.partition("%")[0]):
        yield from range(int(first), int(last or first) + 1, int(step or 1))
