"""Run directory: the files of a run on this machine, read while it runs and afterwards.

run.json                        this record
run.log                         output of all tasks, between kfp.local's own lines
outputs/RUN/TASK/               artifacts, and executor_output.json of each task
replicas/TASK/job.json, *.log   of each custom job: exits and output of its replicas
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from shardline.components.runs.causes import Failure, exit_code, explain, last_lines, own_error, readable
from shardline.components.runs.record import (
    ABANDONED,
    FAILED,
    JOB_FILE,
    LOG,
    RECORD_FILE,
    REPLICAS,
    RUNNING,
    SUCCEEDED,
    JobRecord,
    ReplicaRecord,
    RunRecord,
    State,
    TaskOutputs,
    collect_results,
)
from shardline.components.vertex.payload import list_at, literal_string, mapping_at
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import load
from shardline.trainer.base.errors import EXIT_BAD_INPUT, SettingsError

_EXECUTING = re.compile(r"\d\d:\d\d:\d\d\.\d+ - INFO - Executing task '(.+)'")
_ENDED = re.compile(r"\d\d:\d\d:\d\d\.\d+ - \w+ - Task '(.+)' finished with status (\w+)")
#: Our names of kfp.local's states.
_STATES = {"SUCCESS": SUCCEEDED, "FAILURE": FAILED, "SKIPPED": "not run"}
_FRAME = re.compile(r"\d\d:\d\d:\d\d\.\d+ - [A-Z]+ - |-{20,}$")
#: Indent of a task's output in kfp.local's log.
TASK_INDENT = "    "
#: Seconds between two reads of a growing log.
_PAUSE_S = 0.3
#: Messages of a shell for a program that was ended by a signal, and exit codes.
_SHELL = {"Killed": 137, "Segmentation fault": 139, "Aborted": 134, "Terminated": 143, "Bus error": 135}


def blessing(directory: Path) -> bool | None:
    """Returns whether the tasks of a run on this machine blessed its model; None where there is no verdict.

    For an unchanged run it is the verdict of the earlier one. Only outputs count, not what tasks print.
    """
    verdict: bool | None = None
    for task in _outputs(directory):
        name = "still_blessed" if task.parameters.get("changed") is False else "blessed"
        outputs = {**task.artifacts.get("exported", {}), **task.parameters}
        if name in outputs:
            verdict = outputs[name] is True
    return verdict


def local_runs(runs_dir: Path, limit: int = sys.maxsize) -> list[RunRecord]:
    """Returns the records of the newest runs in a directory, newest first, without damaged ones."""
    records: list[RunRecord] = []
    for path in sorted(runs_dir.glob(f"*/{RECORD_FILE}"), reverse=True):
        if len(records) < limit and not path.parent.is_symlink():
            with contextlib.suppress(SettingsError):
                records.append(RunRecord.read(path.parent))
    return records


def find_run(run: str, runs_dir: Path) -> Path:
    """Returns the directory of a run; `run` is the directory, or its name in `runs_dir`.

    Raises SettingsError when there is none.
    """
    for path in (Path(run), runs_dir / run):
        if (path / RECORD_FILE).is_file() and (path / LOG).is_file():
            return path.resolve() if path.is_symlink() else path
    raise SettingsError(f"there is no run {run!r}, neither as a directory nor in {runs_dir}")


def read_local_record(
    directory: Path, state: State | None = None, *, record: RunRecord | None = None
) -> RunRecord:
    """Returns the record of a run on this machine, with results, links and explanation from its files.

    `state` overrides the record's, which an exit task of the run needs. `record` is read from the directory
    where it is None.

    Raises:
        SettingsError: When it is no run directory, or damaged.
    """
    record = record or RunRecord.read(directory)
    state = state or record.state
    # Where outputs have been removed, the record has the results.
    outcome = {
        name: value or getattr(record, name) for name, value in collect_results(_outputs(directory)).items()
    }
    here = {"run": str(directory)}
    outcome["links"] = here | outcome["links"] | here
    explanation = explain(failure_of(directory, record)) if state == FAILED else None
    return replace(record, state=state, explanation=explanation, **outcome)


def failure_of(directory: Path, record: RunRecord) -> Failure:
    """Returns the failure of a run from its files; raises SettingsError without a log."""
    try:
        log = _read_lines(directory / LOG)
    except OSError as error:
        raise SettingsError(f"{directory} is not the directory of a run: {error}") from None
    failed = [end[1] for line in log if (end := _ENDED.fullmatch(line)) and end[2] == "FAILURE"]
    # Or the last task, where the run ended before KFP logged a failure.
    task = failed[-1] if failed else next(reversed(executed_tasks(log)), "")
    message = own_error(line.removeprefix(TASK_INDENT) for line in log)
    job = directory / REPLICAS / task
    if task and (job / JOB_FILE).is_file():
        ended = load(JobRecord, job / JOB_FILE, SettingsError)
        return _replica_failure(job, ended, message) or Failure(task=task, error=ended.error or "")
    lines = [line for name, line in lines_by_task(log) if name == task]
    codes = [code for line in lines[-3:] for prefix, code in _SHELL.items() if line.startswith(prefix)]
    return Failure(
        task=task,
        exit_code=codes[-1] if codes else None,
        error=message or ("" if task and record.error != ABANDONED else record.error or ""),
        is_own_message=bool(message),
        lines=last_lines(lines),
    )


def _replica_failure(directory: Path, record: JobRecord, message: str) -> Failure | None:
    """Returns the failure of the replica of a job that failed first; None where none has.

    Its error is the replica's own message, where it has left one, or else `message`, or that of the job.
    """
    last = {item: item.starts[-1] for item in record.replicas if item.starts}
    failed = [each for each, at in last.items() if at.exit != 0 and (at.stopped or at.exit is not None)]

    # A mistake is the cause of other failures; a replica that was stopped after another's failure comes last.
    def order(item: ReplicaRecord) -> tuple[bool, bool, float]:
        start = last[item]
        return start.exit != EXIT_BAD_INPUT, start.stopped, start.end_s or 0.0

    if not failed:
        return None
    first = min(failed, key=order)
    lines = []
    with contextlib.suppress(OSError):
        lines = _read_lines(directory / f"{first.name}.log")
    own, end = own_error(lines), last[first]
    return Failure(
        task=directory.name,
        replica=first.name,
        exit_code=None if end.exit is None else exit_code(end.exit),
        error=own or message or record.error or "",
        is_own_message=bool(own),
        lines=last_lines(lines),
        peak_memory=end.peak_memory_bytes,
        restarts=first.restarts,
    )


def lines_by_task(log: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the lines that tasks have printed, each with its task's name, without KFP's own lines.

    Lines of parallel tasks (ParallelFor) are not distinguished: kfp.local does not either.
    """
    task = ""

    def printed() -> Iterator[str]:
        nonlocal task
        for line in log:
            if (started := running_task(line)) is not None:
                task = started
            elif task and not _FRAME.match(line):
                yield line.removeprefix(TASK_INDENT)

    for line in readable(printed()):
        yield task, line


def executed_tasks(log: Iterable[str]) -> list[str]:
    """Returns the names of the tasks that were executed, in order."""
    return list(dict.fromkeys(filter(None, map(running_task, log))))


def task_states(directory: Path, state: State) -> dict[str, str]:
    """Returns the states of the tasks that were executed, in order; `state` is that of the run."""
    states: dict[str, str] = {}
    for line in _read_lines(directory / LOG):
        if match := _EXECUTING.fullmatch(line):
            states[match[1]] = state
        elif match := _ENDED.fullmatch(line):
            states[match[1]] = _STATES.get(match[2], match[2].lower())
    return states


def running_task(line: str) -> str | None:
    """Returns the task that a line of kfp.local starts, "" where it ends one; None for any other line."""
    if match := _EXECUTING.fullmatch(line):
        return match[1]
    return "" if _ENDED.fullmatch(line) else None


def read_log(directory: Path, task: str = "", replica: str = "", *, follow: bool = False) -> Iterator[str]:
    """Yields the lines that tasks have printed, each after its task's name, or those of one replica.

    KFP's own lines are left out. A replica is one of a custom job, as in "worker-0". With `follow`, waits for
    more lines until the run has ended.

    Raises:
        SettingsError: When there is no such task or replica.
    """
    if replica:
        logs = sorted((directory / REPLICAS).glob("*/*.log"))
        matching = [path for path in logs if path.stem == replica and task in ("", path.parent.name)]
        if not matching:
            known = ", ".join(dict.fromkeys(f"{path.stem} of {path.parent.name}" for path in logs)) or "none"
            where = f" in {task!r}" if task else ""
            raise SettingsError(f"no replica {replica!r} has run{where}; these have: {known}")
        yield from readable(_lines(matching[0], directory, follow))
        return
    has_lines = False
    for name, line in lines_by_task(_lines(directory / LOG, directory, follow)):
        if name == task or not task:
            has_lines = True
            yield f"{name} | {line}"
    if task and not has_lines:
        ran = executed_tasks(_read_lines(directory / LOG))
        if task not in ran:
            raise SettingsError(f"no task {task!r} has run; these have: {', '.join(ran) or 'none'}")


def _lines(path: Path, directory: Path, follow: bool) -> Iterator[str]:
    """Yields the lines of a file, and with `follow` those that are added until the run has ended."""
    rest = ""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        while True:
            # Before the file: what the run writes before its end is read.
            record = RunRecord.read(directory) if follow else None
            ended = record is None or record.state != RUNNING
            *whole, rest = (rest + file.read()).split("\n")
            yield from whole
            if ended:
                break
            if not whole:
                time.sleep(_PAUSE_S)
    if rest:
        yield rest


def _outputs(directory: Path) -> Iterator[TaskOutputs]:
    for path in sorted(directory.glob("outputs/*/*/executor_output.json")):
        try:
            outputs = files.read_json(path, SettingsError)
        except SettingsError:
            continue  # a task is writing it
        named = {
            name: list_at(outputs, "artifacts", name, "artifacts")
            for name in mapping_at(outputs, "artifacts")
        }
        artifacts = {name: items[0] for name, items in named.items() if items}
        yield TaskOutputs(
            parameters=mapping_at(outputs, "parameterValues"),
            artifacts={name: mapping_at(item, "metadata") for name, item in artifacts.items()},
            uris={
                name: literal_string(item.get("uri"))
                for name, item in artifacts.items()
                if isinstance(item, dict)
            },
        )


def _read_lines(log: Path) -> list[str]:
    """Returns the lines of a log, which may hold any bytes; only a newline ends one."""
    return log.read_bytes().decode("utf-8", "replace").removesuffix("\n").split("\n")
