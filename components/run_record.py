"""A run on this machine, as its directory tells of it, also while it is running.

How a run came out, wherever it ran, and what of it is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardline.components.vertex.causes import Failure, exit_code, explain
from shardline.components.vertex.logs import readable
from shardline.trainer import files
from shardline.trainer.errors import SettingsError

#: Final states; a run that has not ended is "running".
SUCCEEDED, FAILED, CANCELLED, RUNNING = "succeeded", "failed", "cancelled", "running"


@dataclass(frozen=True, kw_only=True)
class TaskOutputs:
    """What one task has made.

    Attributes:
        task: Name of the task.
        parameters: Output parameters by name.
        artifacts: Metadata of output artifacts by name.
        uris: Their URIs.
    """

    task: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    uris: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run came out.

    Attributes:
        name: Of the run.
        pipeline: Name of the pipeline.
        state: "succeeded", "failed", "cancelled" or "running".
        verdict: "blessed", "not blessed", "unchanged" (nothing was trained), or "" where nothing was judged.
        reason: Why it is unchanged.
        metrics: Of the exported model on the test split.
        links: Where to look, by name: URLs, gs:// or paths.
        failure: What is known of the task that failed.
    """

    name: str
    pipeline: str
    state: str
    verdict: str = ""
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    failure: Failure | None = None

    def headline(self) -> str:
        """Returns the outcome in one line: "retrain failed: train, replica worker-0"."""
        if self.failure is not None:
            return f"{self.pipeline} {self.state}: {explain(self.failure).failed}"
        accuracy = self.metrics.get("accuracy")
        figures = "" if accuracy is None else f", accuracy {accuracy:.4f}"
        verdict = f": {self.verdict}{figures}" if self.verdict else ""
        return f"{self.pipeline} {self.state}{verdict}" + (f" ({self.reason})" if self.reason else "")

    def as_json(self) -> dict[str, Any]:
        """Returns the content of run.json."""
        content = asdict(self)
        del content["failure"]
        explanation = None if self.failure is None else asdict(explain(self.failure))
        return content | {"explanation": explanation}

    def write(self, directory: Path) -> Path:
        """Writes run.json and returns its path.

        Raises:
            OSError: When it cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        files.write_json(directory / "run.json", self.as_json())
        return directory / "run.json"


def results(tasks: Iterable[TaskOutputs]) -> dict[str, Any]:
    """Returns verdict, reason, metrics and links for an `Outcome`, from what the tasks have made."""
    found: dict[str, Any] = {"verdict": "", "reason": "", "metrics": {}, "links": {}}
    for task in tasks:
        if task.parameters.get("changed") is False:
            found["verdict"], found["reason"] = "unchanged", str(task.parameters.get("reason", ""))
        blessed = task.artifacts.get("exported", {}).get("blessed")
        if blessed is not None:
            found["verdict"] = "blessed" if blessed else "not blessed"
            found["metrics"] = dict(task.artifacts.get("metrics", {}))
            links = {"report": task.uris.get("report", ""), "model": task.uris.get("exported", "")}
            found["links"] = {name: uri for name, uri in links.items() if uri}
    return found


#: The run directory, in the environment of all processes of a local run.
RUN_VARIABLE = "SHARDLINE_RUN"
#: In the run directory: the logs of replicas by job, and all that was printed.
REPLICAS, LOG = "replicas", "run.log"
JOB_FILE = "job.json"

#: How many of the last lines explain a failure.
LAST_LINES = 12

_STATES = {"stopped": CANCELLED}
_EXECUTING = re.compile(r"\d\d:\d\d:\d\d\.\d+ - INFO - Executing task '(.+)'")
_FAILED = re.compile(r"\d\d:\d\d:\d\d\.\d+ - ERROR - Task '(.+)' finished with status FAILURE")
_ENDED = re.compile(r"\d\d:\d\d:\d\d\.\d+ - \w+ - Task '(.+)' finished with status \w+")
_ERROR = re.compile(r"(?!pipeline:)(\w+): error: (.*)")
_FRAME = re.compile(r"\d\d:\d\d:\d\d\.\d+ - [A-Z]+ - |-{20,}$")
#: How kfp.local marks the output of a task, as against its own words.
_INDENT = "    "
#: What a shell says of a program that a signal has ended.
_SHELL = {"Killed": 137, "Segmentation fault": 139, "Aborted": 134, "Terminated": 143, "Bus error": 135}


def is_run_directory(directory: Path) -> bool:
    """Whether a directory is that of a local run."""
    return (directory / "run.json").is_file() and (directory / LOG).is_file()


def read_outcome(directory: Path, state: str = "") -> Outcome:
    """Returns how a run came out, as far as it has come.

    Args:
        directory: The run directory.
        state: Where the run's own record cannot know it yet: "failed" to a task that runs at its end.

    Raises:
        SettingsError: When it is no run directory, or damaged.
    """
    try:
        record = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        log = (directory / LOG).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SettingsError(f"{directory} is not the directory of a run: {error}") from None
    state = state or _STATES.get(record["state"], record["state"])
    found = results(_outputs(directory))
    found["links"] = {"run": str(directory), **found["links"]}
    return Outcome(
        name=directory.name,
        pipeline=str(record["pipeline"]),
        state=state,
        failure=_failure(directory, log, record) if state == FAILED else None,
        **found,
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
                yield line.removeprefix(_INDENT)

    for line in readable(printed()):
        yield task, line


def tasks(log: list[str]) -> list[str]:
    """Returns the names of the tasks that were executed, in order."""
    return list(dict.fromkeys(match[1] for line in log if (match := _EXECUTING.fullmatch(line))))


def _outputs(directory: Path) -> Iterator[TaskOutputs]:
    for path in sorted(directory.glob("outputs/*/*/executor_output.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # of a task that is writing it
        made = {name: items["artifacts"][0] for name, items in content.get("artifacts", {}).items()}
        yield TaskOutputs(
            task=path.parent.name,
            parameters=content.get("parameterValues", {}),
            artifacts={name: item.get("metadata", {}) for name, item in made.items()},
            uris={name: str(item.get("uri", "")) for name, item in made.items()},
        )


def _failure(directory: Path, log: list[str], record: dict[str, Any]) -> Failure:
    failed = [match[1] for line in log if (match := _FAILED.fullmatch(line))]
    # The task that ran last where the run was ended before KFP could say that it failed.
    task = failed[-1] if failed else next(reversed(tasks(log)), "")
    said = [match[2] for line in log if (match := _ERROR.fullmatch(line))]
    job = directory / REPLICAS / task
    if task and (job / JOB_FILE).is_file():
        return _replica_failure(job, task, said)
    lines = [line for name, line in by_task(log) if name == task]
    codes = [code for line in lines[-3:] for words, code in _SHELL.items() if line.startswith(words)]
    return Failure(
        task=task,
        exit_code=codes[-1] if codes else None,
        error=said[-1] if said else ("" if task else str(record.get("error") or "")),
        own_words=bool(said),
        lines=_last(line for line in lines if not _ERROR.fullmatch(line)),
    )


def _replica_failure(job: Path, task: str, said: list[str]) -> Failure:
    """Returns the failure of a custom job: of the replica that ended first, with an error, the last time."""
    record = json.loads((job / JOB_FILE).read_text(encoding="utf-8"))
    replicas = [item for item in record["replicas"] if item["starts"]]
    ended = [item for item in replicas if item["starts"][-1]["exit"] not in (0, None)]
    if not ended:
        return Failure(task=task, error=str(record.get("error") or ""))
    # One that was stopped because another had failed did not fail by itself.
    first = min(ended, key=lambda item: (item["starts"][-1]["stopped"], item["starts"][-1]["end_s"]))
    name, last = first["name"], first["starts"][-1]
    log = job / f"{name}.log"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return Failure(
        task=task,
        replica=name,
        exit_code=exit_code(last["exit"]),
        error=said[-1] if said else str(record.get("error") or ""),
        own_words=any(_ERROR.fullmatch(line) for line in lines),
        lines=_last(line for line in readable(lines) if not _ERROR.fullmatch(line)),
        peak_memory=last["peak_memory_bytes"],
        restarts=first["restarts"],
    )


def _last(lines: Iterator[str]) -> tuple[str, ...]:
    return tuple(lines)[-LAST_LINES:]
