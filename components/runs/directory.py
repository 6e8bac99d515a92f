"""Run directory: the files of a run on this machine, read while it runs and afterwards.

run.json                        the record of the run
run.log                         output of all tasks, between kfp.local's own lines
outputs/RUN/TASK/               artifacts, and executor_output.json of each task
replicas/TASK/job.json, *.log   of each custom job: exits and output of its replicas
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from shardline.components.custom_job import list_at, literal_string, mapping_at
from shardline.components.runs.causes import (
    Explanation,
    KfpLines,
    exit_code,
    explain,
    own_error,
    readable,
    split_replica,
)
from shardline.components.runs.run import RECORD_FILE, Run, Task, results
from shardline.trainer.base import files, progress
from shardline.trainer.base.deserialize import load, restore
from shardline.trainer.base.errors import EXIT_BAD_INPUT, SettingsError

_TIME = r"(\d\d):(\d\d):(\d\d\.\d+)"
_EXECUTING = re.compile(rf"{_TIME} - INFO - Executing task '(.+)'")
_ENDED = re.compile(rf"{_TIME} - \w+ - Task '(.+)' finished with status (\w+)")
#: Our names of kfp.local's states.
_STATES = {"SUCCESS": "succeeded", "FAILURE": "failed", "SKIPPED": "not run"}
_FRAME = re.compile(rf"{_TIME} - [A-Z]+ - |-{{20,}}$")
#: Messages of a shell for a program that was ended by a signal, and exit codes.
_SHELL = {"Killed": 137, "Segmentation fault": 139, "Aborted": 134, "Terminated": 143, "Bus error": 135}
#: Seconds between two reads of a growing log, and that a run here has to end, which is more than its own
#: processes have.
_PAUSE_S, _CANCEL_S = 0.3, 15.0
#: The error of a run whose process ended without a record of it.
_ABANDONED = "its process ended without a record: it was killed, or could not write to the run directory"
#: Mount of all buckets in every task on Vertex AI, and on hardly any other machine.
_BUCKETS = Path("/gcs")


@dataclass(frozen=True, kw_only=True)
class _ReplicaStart:
    """A start of a replica; `exit` is its status or the name of a signal, None while it runs."""

    end_s: float | None = None
    exit: int | str | None = None
    stopped: bool = False
    peak_memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Replica:
    name: str
    restarts: int
    starts: tuple[_ReplicaStart, ...]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is read of job.json, which the supervisor of the job writes."""

    error: str | None = None
    replicas: tuple[_Replica, ...]


class TaskLog:
    """Parser of the log of kfp.local.

    Attributes:
        task: The task that runs; "" between two. Of parallel tasks (ParallelFor) it is the one that was
            started last, whichever prints: kfp.local does not distinguish them either.
        replica: The replica that has printed the last line; "" for none.
        tasks: The tasks that were executed, in order.
    """

    #: Indent of what tasks print.
    INDENT: ClassVar[str] = "    "

    def __init__(self) -> None:
        self.task = self.replica = ""
        self.tasks: dict[str, Task] = {}
        self._running: list[str] = []
        self._began: dict[str, float] = {}
        self._number = count()
        self._kfp = KfpLines()

    def read(self, line: str) -> str | None:
        """Reads the next line; returns what a task has printed in it, None for empty lines and KFP's own."""
        if match := _EXECUTING.fullmatch(line):
            *time, self.task = match.groups()
            self._running.append(self.task)
            self._began[self.task] = _seconds(*time)
            self.tasks[self.task] = Task(name=self.task, path=self.task, state="running")
        elif match := _ENDED.fullmatch(line):
            *time, name, status = match.groups()
            began = self._began.get(name)  # the log has no dates: a task may end on the next day
            took = None if began is None else round((_seconds(*time) - began) % 86400, 3)
            state = _STATES.get(status, status.lower())
            self.tasks[name] = Task(name=name, path=name, state=state, seconds=took, ended=next(self._number))
            with contextlib.suppress(ValueError):
                self._running.remove(name)
            self.task = self._running[-1] if self._running else ""
        elif self.task and not _FRAME.match(line):
            printed = line.removeprefix(self.INDENT)
            self.replica, text = split_replica(printed)
            return None if self._kfp.has(text, self.replica) else printed
        return None


def _seconds(hours: str, minutes: str, seconds: str) -> float:
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run on this machine. Nothing but `cancel` has an effect on the run.

    `VARIABLE` is the environment variable with its path, in all processes of the run.
    """

    path: Path
    VARIABLE: ClassVar[str] = "SHARDLINE_RUN"
    #: Name, next to run directories, of a link to the newest.
    LATEST: ClassVar[str] = "latest"

    @classmethod
    def find(cls, run: str, runs_dir: Path) -> RunDirectory:
        """Returns the directory of a run; `run` is the directory, or its name in `runs_dir`.

        Raises SettingsError when there is none.
        """
        for here in map(cls, (Path(run), runs_dir / run)):
            if (here.path / RECORD_FILE).is_file() and here.log.is_file():
                return cls(here.path.resolve()) if here.path.is_symlink() else here
        raise SettingsError(f"there is no run {run!r}, neither as a directory nor in {runs_dir}")

    @classmethod
    def newest(cls, runs_dir: Path, limit: int = sys.maxsize) -> list[Run]:
        """Returns the records of the newest runs in a directory, newest first, without damaged ones."""
        records: list[Run] = []
        for path in sorted(runs_dir.glob(f"*/{RECORD_FILE}"), reverse=True):
            if len(records) < limit and not path.parent.is_symlink():
                with contextlib.suppress(SettingsError):
                    records.append(cls(path.parent).record())
        return records

    @property
    def log(self) -> Path:
        """Output of all tasks."""
        return self.path / "run.log"

    @property
    def pipeline(self) -> Path:
        """Copy of the compiled pipeline."""
        return self.path / "pipeline.yaml"

    @property
    def replicas(self) -> Path:
        """Logs of replicas, by job."""
        return self.path / "replicas"

    @property
    def buckets(self) -> Path:
        """Local directory for /gcs/."""
        return self.path / "gcs"

    @contextlib.contextmanager
    def lock(self, *, shared: bool = False) -> Iterator[bool]:
        """Locks the directory while the context lasts; yields whether it is locked: no other process has."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                free = files.lock(descriptor, shared=shared)
            except OSError:
                free = False
            yield free
        finally:
            os.close(descriptor)

    def record(self) -> Run:
        """Reads run.json; a run whose process has ended without a record of it has failed.

        Only the machine that it ran on can detect this: on many mounts locks are not shared.

        Raises SettingsError when there is none, or it is damaged.
        """
        record = self._record()
        if record.state != "running" or not _has_reliable_lock(record):
            return record
        with self.lock(shared=True) as free:
            record = self._record()  # it may have ended just now
        return replace(record, state="failed", error=_ABANDONED) if free and not record.has_ended else record

    def _record(self) -> Run:
        own = {"resource": str(self.path), "schedule": "", "tasks": ()}
        try:
            content = files.read_json(self.path / RECORD_FILE, SettingsError)
            run = restore(Run, {"name": self.path.name, **content, **own}, RECORD_FILE, SettingsError)
        except SettingsError as error:
            raise SettingsError(f"{self.path} is not the directory of a run: {error}") from None
        return replace(run, links={**run.links, "run": str(self.path)})

    def read(self, record: Run | None = None, *, watching: bool = False) -> Run:
        """Reads tasks and results of the run, as far as they are there.

        `record` is read where it is None. Raises SettingsError as `record`.
        """
        record, log, outputs = record or self.record(), TaskLog(), dict(self._outputs())
        for line in self._lines():
            log.read(line)
        tasks = []
        for name in dict.fromkeys((*log.tasks, *outputs)):
            task = log.tasks.get(name) or Task(name=name, path=name, state="unknown")
            state = record.state if task.state == "running" else task.state
            tasks.append(replace(task, state=state, **outputs.get(name, {})))
        # Where outputs have been removed, the record has the results.
        found = {name: value or getattr(record, name) for name, value in results(tasks).items()}
        found["links"] = {"run": str(self.path)} | found["links"]
        return replace(record, tasks=tuple(tasks), **found)

    def explain(self, run: Run) -> Run:
        """Returns the run with the explanation of its failure, from its logs; None if it has not failed."""
        return replace(run, explanation=self.explanation(run) if run.state == "failed" else None)

    def explanation(self, run: Run) -> Explanation:
        """Explains the failure of the run from its logs."""
        # Or the last task, where the run ended before KFP logged a failure.
        last = next((task for task in reversed(run.tasks) if task.state != "unknown"), None)
        task = run.failed_task or last
        name, lines, log = task.name if task else "", self._lines(), TaskLog()
        message = own_error(line.removeprefix(log.INDENT) for line in lines)
        job = self.replicas / name
        if name and (job / "job.json").is_file():
            ended = load(_Job, job / "job.json", SettingsError)
            return _explain_replica(job, ended, message) or explain(task=name, error=ended.error or "")
        printed = [text for line in lines if (text := log.read(line)) is not None and log.task == name]
        codes = [code for line in printed[-3:] for prefix, code in _SHELL.items() if line.startswith(prefix)]
        return explain(
            task=name,
            exit_code=codes[-1] if codes else None,
            error="" if name and run.error != _ABANDONED else run.error or "",
            own_message=message,
            log=printed,
        )

    def read_log(self, task: str = "", replica: str = "", *, follow: bool = False) -> Iterator[str]:
        """Yields the lines that tasks have printed, each after its task's name, or those of one replica.

        KFP's own lines are left out. A replica is one of a custom job, as in "worker-0". With `follow`, waits
        for more lines until the run has ended.

        Raises:
            SettingsError: When there is no such task or replica.
        """
        if replica:
            logs = sorted(self.replicas.glob("*/*.log"))
            matching = [path for path in logs if path.stem == replica and task in ("", path.parent.name)]
            if not matching:
                known = ", ".join(dict.fromkeys(f"{path.stem} of {path.parent.name}" for path in logs))
                where = f" in {task!r}" if task else ""
                raise SettingsError(f"no replica {replica!r} has run{where}; these have: {known or 'none'}")
            yield from readable(self._follow(matching[0], follow))
        else:
            log, has_lines = TaskLog(), False
            for line in self._follow(self.log, follow):
                if (text := log.read(line)) is not None and task in ("", log.task):
                    has_lines = True
                    yield f"{log.task} | {text}"
            if task and not has_lines and task not in log.tasks:
                raise SettingsError(f"no task {task!r} has run; these have: {', '.join(log.tasks) or 'none'}")
        if follow and (record := self.record()).error == _ABANDONED:
            progress.report("logs", f"no longer following {record.name}: {_ABANDONED}")

    def cancel(self) -> None:
        """Ends its process by SIGTERM; raises SettingsError for a process of another machine."""
        record = self.record()
        # The process of this id holds the lock: it is the run's, not another that has got the id since.
        if not _has_reliable_lock(record) or not record.pid:  # 0 would be the caller's own group
            raise SettingsError(
                f"the run {record.name} is not known to run on this machine; end its process on {record.host}"
            )
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
        until = time.monotonic() + _CANCEL_S
        while not self.record().has_ended and time.monotonic() < until:
            time.sleep(0.1)

    def _follow(self, path: Path, follow: bool) -> Iterator[str]:
        """Yields the lines of a file, and with `follow` those that are added until the run has ended."""
        rest = ""
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            while True:
                # Before the file: what the run writes before its end is read.
                ended = not follow or self.record().has_ended
                *whole, rest = (rest + file.read()).split("\n")
                yield from whole
                if ended:
                    break
                if not whole:
                    time.sleep(_PAUSE_S)
        if rest:
            yield rest

    def _lines(self) -> list[str]:
        """Returns the lines of the log as far as it is there."""
        with contextlib.suppress(OSError):
            return _read_lines(self.log)
        return []

    def _outputs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the name of each task that has outputs, and the fields of a `Task` with them."""
        for path in sorted(self.path.glob("outputs/*/*/executor_output.json")):
            try:
                outputs = files.read_json(path, SettingsError)
            except SettingsError:
                continue  # a task is writing it
            named = {
                name: list_at(outputs, "artifacts", name, "artifacts")
                for name in mapping_at(outputs, "artifacts")
            }
            artifacts = {name: mapping_at(items[0]) for name, items in named.items() if items}
            yield (
                path.parent.name,
                {
                    "parameters": mapping_at(outputs, "parameterValues"),
                    "artifacts": {name: mapping_at(item, "metadata") for name, item in artifacts.items()},
                    "uris": {name: literal_string(item.get("uri")) for name, item in artifacts.items()},
                },
            )


def on_platform() -> bool:
    """Whether this process is a task on Vertex AI, and not one of a run on this machine."""
    return RunDirectory.VARIABLE not in os.environ and _BUCKETS.is_dir()


def _has_reliable_lock(run: Run) -> bool:
    """Whether the lock shows on this machine that the run's process has ended."""
    return run.locked and run.host == socket.gethostname()


def _explain_replica(directory: Path, job: _Job, message: str) -> Explanation | None:
    """Explains the failure of the replica of a job that failed first; None where none has.

    Its error is the replica's own message, where it has left one, or else `message`, or that of the job.
    """
    last = {item: item.starts[-1] for item in job.replicas if item.starts}
    failed = [each for each, at in last.items() if at.exit != 0 and (at.stopped or at.exit is not None)]

    # A mistake is the cause of other failures; a replica that was stopped after another's failure comes last.
    def order(item: _Replica) -> tuple[bool, bool, float]:
        start = last[item]
        return start.exit != EXIT_BAD_INPUT, start.stopped, start.end_s or 0.0

    if not failed:
        return None
    first = min(failed, key=order)
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = _read_lines(directory / f"{first.name}.log")
    end = last[first]
    return explain(
        task=directory.name,
        replica=first.name,
        exit_code=None if end.exit is None else exit_code(end.exit),
        error=message or job.error or "",
        own_message=own_error(lines),
        log=lines,
        peak_memory=end.peak_memory_bytes,
        restarts=first.restarts,
    )


def _read_lines(log: Path) -> list[str]:
    """Returns the lines of a log, which may hold any bytes; only a newline ends one."""
    return log.read_bytes().decode("utf-8", "replace").removesuffix("\n").split("\n")
