"""Record of a run, run.json: one schema, whether the run was on this machine or on the platform.

A run on this machine keeps its record in its run directory, and with it all that was printed:

    run.json                        this record
    run.log                         what every task has printed, between kfp.local's own lines
    outputs/RUN/TASK/               artifacts, and executor_output.json of each task
    replicas/TASK/job.json, *.log   of each custom job: how its replicas ended, and what each has printed

`observe` reads such a directory, also while the run is going on; `vertex.evidence` a run on the platform.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardline.components.vertex.causes import Explanation, Failure, exit_code, explain
from shardline.components.vertex.logs import last_lines, own_error, readable
from shardline.trainer import files
from shardline.trainer.errors import SettingsError
from shardline.trainer.records import load, restore

#: States of a run; all but "running" are final.
SUCCEEDED, FAILED, CANCELLED, RUNNING = "succeeded", "failed", "cancelled", "running"

RECORD_FILE = "run.json"
#: The run directory, in the environment of all processes of a run on this machine.
RUN_VARIABLE = "SHARDLINE_RUN"
#: In the run directory: the logs of replicas by job, and all that was printed.
REPLICAS, LOG = "replicas", "run.log"
JOB_FILE = "job.json"

_EXECUTING = re.compile(r"\d\d:\d\d:\d\d\.\d+ - INFO - Executing task '(.+)'")
_FAILED = re.compile(r"\d\d:\d\d:\d\d\.\d+ - ERROR - Task '(.+)' finished with status FAILURE")
_ENDED = re.compile(r"\d\d:\d\d:\d\d\.\d+ - \w+ - Task '(.+)' finished with status \w+")
_REPLICA = re.compile(r"[a-z]+-\d+")
_FRAME = re.compile(r"\d\d:\d\d:\d\d\.\d+ - [A-Z]+ - |-{20,}$")
#: How kfp.local marks the output of a task, as against its own words.
TASK_INDENT = "    "
#: The error of a run that has not said how it ended.
ABANDONED = "its process has ended without a word: it was killed, or could not write to the run directory"
#: Seconds between two looks at a log that grows.
_PAUSE_S = 0.3
#: What a shell says of a program that a signal has ended.
_SHELL = {"Killed": 137, "Segmentation fault": 139, "Aborted": 134, "Terminated": 143, "Bus error": 135}


@contextlib.contextmanager
def held(directory: Path, *, shared: bool = False) -> Iterator[bool]:
    """Locks a directory while the context lasts; yields whether nobody else has, and the disk has locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """How a run came out, what it was given, and what it ran on.

    Attributes:
        name: Name of the run.
        pipeline: Name of the pipeline.
        state: running, succeeded, failed or cancelled.
        created: When the run was submitted (UTC, RFC 3339).
        duration_s: How long it took; None while it is running.
        error: Why it failed, in the words of the platform or of kfp.local.
        verdict: "blessed", "not blessed", "unchanged" (nothing was trained), or "" where nothing was judged.
        reason: Why it is unchanged.
        metrics: Metrics of the exported model on the test split.
        links: Where to look, by name: URLs, gs:// or paths.
        explanation: Of a failure; None for a run that has not failed.
        parameters: Parameters of the pipeline, on this machine with their defaults.
        facts: What the tasks have reported, by name; on this machine only, as is all that follows.
        yaml: Path of the compiled pipeline.
        sha256: Its checksum, in hexadecimal.
        versions: Versions of Python and of the packages that matter.
        platform: Operating system and processor.
        cpus: Number of CPUs.
        locked: Whether the process of the run holds a lock on the run directory until it has ended.
    """

    name: str
    pipeline: str
    state: str
    created: str = ""
    duration_s: float | None = None
    error: str | None = None
    verdict: str = ""
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    explanation: Explanation | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    yaml: str = ""
    sha256: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    platform: str = ""
    cpus: int | None = None
    locked: bool = False

    def headline(self) -> str:
        """Returns the outcome in one line: "retrain failed: train, replica worker-0"."""
        if self.explanation is not None:
            return f"{self.pipeline} {self.state}: {self.explanation.failed}"
        accuracy = self.metrics.get("accuracy")
        figures = "" if accuracy is None else f", accuracy {accuracy:.4f}"
        verdict = f": {self.verdict}{figures}" if self.verdict else ""
        return f"{self.pipeline} {self.state}{verdict}" + (f" ({self.reason})" if self.reason else "")

    def as_json(self) -> dict[str, Any]:
        """Returns the content of run.json."""
        return asdict(self)

    def write(self, directory: Path) -> None:
        """Writes run.json into a directory, which is made where there is none; raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        files.write_json(directory / RECORD_FILE, self.as_json())

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        """Reads run.json of a directory; a run whose process has ended without a word is a failed one.

        Raises SettingsError when there is none, or it is damaged.
        """
        record = cls._read(directory)
        if record.state != RUNNING or not record.locked:
            return record
        with held(directory, shared=True) as ended:
            record = cls._read(directory)  # it may have ended just now
        if ended and record.state == RUNNING:
            return replace(record, state=FAILED, error=ABANDONED)
        return record

    @classmethod
    def _read(cls, directory: Path) -> RunRecord:
        try:
            content = {"name": directory.name, **files.read_json(directory / RECORD_FILE, SettingsError)}
            if content.get("state") == "stopped":  # in records of older versions
                content["state"] = CANCELLED
            return restore(cls, content, RECORD_FILE, SettingsError)
        except SettingsError as error:
            raise SettingsError(f"{directory} is not the directory of a run: {error}") from None


@dataclass(frozen=True, kw_only=True)
class TaskOutputs:
    """Output parameters of one task, and metadata and URIs of its output artifacts, by name."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    uris: Mapping[str, str] = field(default_factory=dict)


def results(tasks: Iterable[TaskOutputs]) -> dict[str, Any]:
    """Returns verdict, reason, metrics and links for a `RunRecord`, from what the tasks have put out."""
    found: dict[str, Any] = {"verdict": "", "reason": "", "metrics": {}, "links": {}}
    for task in tasks:
        if task.parameters.get("changed") is False:
            found["verdict"], found["reason"] = "unchanged", str(task.parameters.get("reason", ""))
        blessed = task.artifacts.get("exported", {}).get("blessed")
        if blessed is not None:
            found["verdict"] = "blessed" if blessed is True else "not blessed"
            metrics = task.artifacts.get("metrics", {})
            found["metrics"] = {name: value for name, value in metrics.items() if type(value) in (int, float)}
            links = {"report": task.uris.get("report", ""), "model": task.uris.get("exported", "")}
            found["links"] = {name: uri for name, uri in links.items() if uri}
    return found


def blessing(directory: Path) -> bool | None:
    """Returns whether the tasks of a run on this machine have blessed its model; None where none has judged.

    Of an unchanged run it is the verdict on the model that still holds. What tasks have printed says nothing.
    """
    verdict: bool | None = None
    for task in _outputs(directory):
        name = "still_blessed" if task.parameters.get("changed") is False else "blessed"
        if name in task.parameters:
            verdict = task.parameters[name] is True
    return verdict


def is_run_directory(directory: Path) -> bool:
    """Whether a directory is that of a run on this machine."""
    return (directory / RECORD_FILE).is_file() and (directory / LOG).is_file()


def observe(directory: Path, state: str = "", *, record: RunRecord | None = None) -> RunRecord:
    """Returns the record of a run on this machine with what its files tell besides, as far as it has come.

    `state` is its state where its own record cannot know it yet: "failed" to a task that runs at its end.
    `record` is its own record, which is read from the directory unless given.

    Raises:
        SettingsError: When it is no run directory, or damaged.
    """
    record = record or RunRecord.read(directory)
    state = state or record.state
    made = results(_outputs(directory))
    made["links"] = {"run": str(directory), **made["links"]}
    explanation = explain(failure_of(directory, record)) if state == FAILED else None
    return replace(record, state=state, explanation=explanation, **made)


def failure_of(directory: Path, record: RunRecord) -> Failure:
    """Returns what the files of a failed run tell of its failure; raises SettingsError without a log."""
    try:
        log = _read_lines(directory / LOG)
    except OSError as error:
        raise SettingsError(f"{directory} is not the directory of a run: {error}") from None
    failed = [match[1] for line in log if (match := _FAILED.fullmatch(line))]
    # The task that ran last where the run was ended before KFP could say that it failed.
    task = failed[-1] if failed else next(reversed(tasks(log)), "")
    said = own_error(line.removeprefix(TASK_INDENT) for line in log)
    job = directory / REPLICAS / task
    if task and (job / JOB_FILE).is_file():
        return _replica_failure(job, task, said)
    lines = [line for name, line in by_task(log) if name == task]
    codes = [code for line in lines[-3:] for words, code in _SHELL.items() if line.startswith(words)]
    return Failure(
        task=task,
        exit_code=codes[-1] if codes else None,
        error=said or ("" if task and record.error != ABANDONED else record.error or ""),
        own_words=bool(said),
        lines=last_lines(lines),
    )


def by_task(log: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields what tasks have printed, without KFP's own: the task's name and a line.

    Where tasks run side by side (ParallelFor) their lines are not told apart: kfp.local does not.
    """
    task = ""

    def printed() -> Iterator[str]:
        nonlocal task
        for line in log:
            if begin := _EXECUTING.fullmatch(line):
                task = begin[1]
            elif _ENDED.fullmatch(line):
                task = ""
            elif task and not _FRAME.match(line):
                yield line.removeprefix(TASK_INDENT)

    for line in readable(printed()):
        yield task, line


def tasks(log: Iterable[str]) -> list[str]:
    """Returns the names of the tasks that were executed, in order."""
    return list(dict.fromkeys(match[1] for line in log if (match := _EXECUTING.fullmatch(line))))


def read_log(directory: Path, task: str = "", replica: str = "", *, follow: bool = False) -> Iterator[str]:
    """Yields what tasks have printed, each line after its task's name, or what a replica has printed.

    What KFP writes of a task's input is left out; the files have it. A replica is one of a custom job, as in
    "worker-0"; with `follow`, waits for more until the run has ended.

    Raises:
        SettingsError: When there is no such task or replica.
    """
    if replica:
        yield from readable(_lines(_replica_log(directory, task, replica), directory, follow))
        return
    found = False
    for name, line in by_task(_lines(directory / LOG, directory, follow)):
        if name == task or not task:
            found = True
            yield f"{name} | {line}"
    if task and not found and not follow:
        known = tasks(_read_lines(directory / LOG))
        if task not in known:
            raise SettingsError(f"no task {task!r} has run; these have: {', '.join(known) or 'none'}")


def _replica_log(directory: Path, task: str, replica: str) -> Path:
    logs = sorted((directory / REPLICAS).glob(f"{task or '*'}/*.log"))
    for path in logs:
        if path.stem == replica:
            return path
    known = ", ".join(dict.fromkeys(path.stem for path in logs))
    raise SettingsError(
        f"no replica {replica!r} has run"
        + (f" in {task!r}" if task else "")
        + f"; these have: {known or 'none'}"
    )


def _lines(path: Path, directory: Path, follow: bool) -> Iterator[str]:
    """Yields the lines of a file, and with `follow` those that come until the run has ended."""
    rest = ""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        while True:
            # Asked before reading: what is written before the end is read after it.
            ended = not follow or RunRecord.read(directory).state != RUNNING
            *whole, rest = (rest + file.read()).split("\n")
            yield from whole
            if ended:
                break
            if not whole:
                time.sleep(_PAUSE_S)
    if rest:
        yield rest


@dataclass(frozen=True)
class _Artifact:
    """An output artifact in executor_output.json."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    uri: str = ""


@dataclass(frozen=True)
class _Artifacts:
    artifacts: tuple[_Artifact, ...] = ()


@dataclass(frozen=True)
class _Outputs:
    """Content of executor_output.json."""

    parameterValues: Mapping[str, Any] = field(default_factory=dict)  # noqa: N815  # KFP's name
    artifacts: Mapping[str, _Artifacts] = field(default_factory=dict)


@dataclass(frozen=True)
class _Start:
    """A start of a replica in job.json; `exit` is its status or the name of a signal."""

    exit: int | str | None
    end_s: float | None
    stopped: bool
    peak_memory_bytes: int

    def __post_init__(self) -> None:
        if isinstance(self.exit, str) and self.exit not in signal.Signals.__members__:
            raise ValueError(f"exit is {self.exit!r}, neither a status nor a signal")


@dataclass(frozen=True)
class _Replica:
    name: str
    restarts: int
    starts: tuple[_Start, ...]

    def __post_init__(self) -> None:
        if not _REPLICA.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not the name of a replica")


@dataclass(frozen=True)
class _Job:
    """Content of job.json."""

    replicas: tuple[_Replica, ...]
    error: str | None = None


def _outputs(directory: Path) -> Iterator[TaskOutputs]:
    for path in sorted(directory.glob("outputs/*/*/executor_output.json")):
        try:
            found = load(_Outputs, path, SettingsError)
        except SettingsError:
            continue  # of a task that is writing it
        made = {name: items.artifacts[0] for name, items in found.artifacts.items() if items.artifacts}
        yield TaskOutputs(
            parameters=found.parameterValues,
            artifacts={name: item.metadata for name, item in made.items()},
            uris={name: item.uri for name, item in made.items()},
        )


def _replica_failure(job: Path, task: str, said: str) -> Failure:
    """Returns the failure of a custom job: of the replica that ended first, with an error, the last time."""
    record = load(_Job, job / JOB_FILE, SettingsError)
    ended = [item for item in record.replicas if item.starts and item.starts[-1].exit not in (0, None)]
    if not ended:
        return Failure(task=task, error=record.error or "")
    # One that was stopped because another had failed did not fail by itself.
    first = min(ended, key=lambda item: (item.starts[-1].stopped, item.starts[-1].end_s or 0.0))
    last, log = first.starts[-1], job / f"{first.name}.log"
    lines = _read_lines(log) if log.is_file() else []
    return Failure(
        task=task,
        replica=first.name,
        exit_code=exit_code(last.exit or 0),
        error=said or record.error or "",
        own_words=bool(own_error(lines)),
        lines=last_lines(lines),
        peak_memory=last.peak_memory_bytes,
        restarts=first.restarts,
    )


def _read_lines(log: Path) -> list[str]:
    """Returns the lines of a log, which may hold any bytes; only a newline ends one."""
    return log.read_bytes().decode("utf-8", "replace").removesuffix("\n").split("\n")
