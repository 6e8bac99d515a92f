"""Slurm as an engine: submits the worker pools of a custom job, and follows the job to its end.

The directory of a job has its script, Slurm's own log, the script's exit code, and a log of each replica.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from shardline.components.runs import slurm_job
from shardline.components.runs.causes import Failure, exit_meaning
from shardline.components.runs.slurm_job import ID_FILE, SCRIPT_FILE, SlurmJob, describe
from shardline.components.runs.slurm_run import job_failure, job_record, log_names
from shardline.components.vertex.job import SEVEN_DAYS_S
from shardline.pipelines.engines.custom_job import ROLES, CustomJob, ShowLine
from shardline.pipelines.engines.slurm.replica import write_job
from shardline.pipelines.engines.slurm.script import POOLS_FILE, BatchJob, batch_script
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import (
    EXIT_BAD_INPUT,
    CancelledRunError,
    PlatformError,
    RunError,
    SettingsError,
    ShardlineError,
)

#: What sbatch says of a job that it would refuse again; other refusals may be of limits or rights.
_MISTAKE = re.compile(
    r"[Ii]nvalid|not available|unrecognized|can ?not be satisfied|More processors|[Uu]nable to open|ambiguous"
)
#: Seconds between two reads of the logs, and between two questions to Slurm at first and later.
_LOGS_S, _STATE_S = 0.5, (2.0, 5.0)
#: Seconds after which Slurm is asked less often.
_EARLY_S = 60.0
#: Seconds for which Slurm may not be reached while a job is followed.
_OUTAGE_S = 300.0
#: Seconds that a cancelled job has to end; Slurm's own KillWait is 30.
_CANCEL_S = 60.0
#: Bytes of one log that are read at once.
_CHUNK = 2**20
#: Exit codes of mistakes; the last two are a command that cannot be executed.
_USER_ERRORS = (EXIT_BAD_INPUT, 126, 127)


def batch_job(job: CustomJob, directory: Path) -> BatchJob:
    """Returns a job for Slurm whose script shows the command of a custom job, which all its pools share."""
    return replace(pools_job(job, directory), command=tuple(job.worker_pools[0].argv))


def pools_job(job: CustomJob, directory: Path, elements: int = 0) -> BatchJob:
    """Returns a custom job whose commands and variables are in POOLS_FILE.

    Commands of components are whole programs, which would make the script unreadable.
    """
    roles = zip(ROLES, job.worker_pools, strict=False)
    tasks = {role: pool.replicas for role, pool in roles if pool.replicas}
    return BatchJob(name=job.display_name, tasks=tasks, directory=directory.absolute(), elements=elements)


def submit(job: BatchJob, settings: SlurmSettings) -> str:
    """Writes the script into the job's directory and submits it; returns the id of the job.

    Raises SettingsError when Slurm refuses the job as a mistake, such as an unknown partition, PlatformError
    when it refuses it for another reason, or is not reached.
    """
    job.directory.mkdir(parents=True, exist_ok=True)
    answer = _sbatch(job, settings, "--parsable")
    job_id = answer.strip().partition(";")[0]  # a federation's answer is ID;CLUSTER
    files.write_text(job.directory / ID_FILE, job_id)
    return job_id


def check(settings: SlurmSettings) -> None:
    """Asks Slurm, which starts nothing, whether it takes jobs with these settings; raises as `submit`."""
    with tempfile.TemporaryDirectory() as directory:
        job = BatchJob(name="check", tasks={"chief": 1}, directory=Path(directory), command=("true",))
        _sbatch(job, settings, "--test-only")


def _sbatch(job: BatchJob, settings: SlurmSettings, option: str) -> str:
    script = job.directory / SCRIPT_FILE
    files.write_text(script, batch_script(job, settings))
    try:
        return slurm_job.run_slurm(["sbatch", option, str(script)])
    except PlatformError as error:
        if _MISTAKE.search(str(error)):
            raise SettingsError(f"{error}; correct [engine.slurm]") from None
        raise


def limited(job: CustomJob, settings: SlurmSettings) -> SlurmSettings:
    """Returns the settings with the job's own time limit, unless they have one, and its rule for restarts."""
    # The platform's own limit is no wish.
    if job.timeout and job.timeout < SEVEN_DAYS_S and not settings.time:
        settings = replace(settings, time=str(math.ceil(job.timeout / 60)))
    return replace(settings, restarts=0) if job.disable_retries else settings


def run_job(job: CustomJob, directory: Path, settings: SlurmSettings, *, show_line: ShowLine) -> None:
    """Submits a job and follows it to its end; an exception in between, as of a stop signal, cancels it.

    Raises:
        ShardlineError: As `submit` and `follow`.
    """
    logs = Logs(directory, show_line)
    logs.skip()
    directory.mkdir(parents=True, exist_ok=True)
    write_job(job, directory / POOLS_FILE)
    with submitted(pools_job(job, directory), limited(job, settings), "train") as job_id:
        follow(job_id, directory, topic="train", logs=logs)


@contextlib.contextmanager
def submitted(job: BatchJob, settings: SlurmSettings, topic: str) -> Iterator[str]:
    """Submits a job and yields its id; an exception in the context, as of a stop signal, cancels it."""
    job_id, stop = "", {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
    # Slurm's commands inherit what is blocked: no signal to all processes of a run ends them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    try:
        job_id = submit(job, settings)
        progress.report(topic, f"submitted as job {job_id} of Slurm")
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield job_id
    except BaseException:
        signal.pthread_sigmask(signal.SIG_BLOCK, stop)
        with contextlib.suppress(ShardlineError):
            _cancel(job_id, topic)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow(
    job_id: str,
    directory: Path,
    *,
    topic: str,
    show_line: ShowLine = lambda name, line: None,
    logs: Logs | None = None,
) -> None:
    """Shows state and output of a job until it has ended, and writes job.json into its directory.

    `logs` are by default the whole logs of the directory, shown by `show_line`.

    Raises:
        RunError: When the job failed; its exit_code is EXIT_BAD_INPUT after a user error.
        CancelledRunError: When somebody cancelled it.
        PlatformError: When Slurm is not reached for some minutes.
    """
    logs = logs or Logs(directory, show_line)
    job = _watch(job_id, directory, topic, logs.read)
    logs.read(at_end=True)
    progress.report(topic, describe(job))
    error: ShardlineError | None = None
    if job.state == "cancelled":
        error = CancelledRunError(f"Slurm job {job_id} was cancelled")
    elif job.state == "failed":
        error = _error(job_failure(directory, job), job, directory)
    job_record(directory, job, str(error) if error else None).write(directory)
    if error:
        raise error


def _error(failure: Failure, job: SlurmJob, directory: Path) -> RunError:
    """Returns the error of a job, with the replica's own message where it has left one."""
    text = failure.error
    if failure.replica and failure.exit_code and not failure.is_own_message:
        text = f"{failure.replica} ended with {exit_meaning(failure.exit_code)}; its log is in {directory}"
    error = RunError(text)
    if failure.exit_code in _USER_ERRORS or job.exit_code in _USER_ERRORS:
        error.exit_code = EXIT_BAD_INPUT
    return error


def _watch(job_id: str, directory: Path, topic: str, read_logs: Callable[[], None]) -> SlurmJob:
    """Waits for the end of a job and reports its state whenever it changes; returns its last state."""
    began = reached = time.monotonic()
    shown: tuple[str, bool] | None = None
    while True:
        try:
            job = slurm_job.read_submitted(job_id, directory)
            reached, line = time.monotonic(), describe(job)
            state = describe(replace(job, start="")), bool(job.start)  # the expected start moves all the time
        except PlatformError as error:
            if time.monotonic() - reached > _OUTAGE_S:
                raise
            job, line = None, f"{error.line}; asking again"
            state = line, False
        if job is not None and job.has_ended:
            return job
        if state != shown:
            progress.report(topic, line)
            shown = state
        until = time.monotonic() + _STATE_S[time.monotonic() - began > _EARLY_S]
        while (now := time.monotonic()) < until:
            read_logs()
            time.sleep(max(_LOGS_S, 5 * (time.monotonic() - now)))  # an array has a thousand logs


class Logs:
    """The logs of a job's directory, which grow while it runs; shows complete lines."""

    def __init__(self, directory: Path, show_line: ShowLine) -> None:
        self._directory = directory
        self._show_line = show_line
        self._offsets: dict[Path, int] = {}

    def skip(self) -> None:
        """Leaves out what the logs have now, of an earlier job."""
        self._offsets = {path: path.stat().st_size for path in log_names(self._directory)}

    def read(self, *, at_end: bool = False) -> None:
        """Shows the lines that have been added since the last call, `at_end` also one without its end."""
        for path, name in log_names(self._directory).items():
            while lines := self._added(path, at_end):
                for line in lines:
                    self._show_line(name, line)

    def _added(self, path: Path, at_end: bool) -> list[str]:
        try:
            with path.open("rb") as file:  # opened anew: other nodes' writes are seen on NFS
                file.seek(self._offsets.get(path, 0))
                lines = file.readlines(_CHUNK)
        except OSError:
            return []
        if lines and not lines[-1].endswith(b"\n") and not at_end:
            lines.pop()
        self._offsets[path] = self._offsets.get(path, 0) + sum(map(len, lines))
        return [line.decode("utf-8", "replace").removesuffix("\n") for line in lines]


def _cancel(job_id: str, topic: str) -> None:
    if not job_id or not slurm_job.cancel_job(job_id):
        return
    progress.report(topic, f"cancelled Slurm job {job_id}")
    until = time.monotonic() + _CANCEL_S
    while not slurm_job.read_job(job_id).has_ended and time.monotonic() < until:
        time.sleep(_LOGS_S)
