"""Run of a pipeline, on this machine or on Vertex AI: its state, tasks and results, and why it failed."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardline.components.runs.causes import Explanation
from shardline.components.text import duration, quality
from shardline.trainer.base import files

#: States of a run; all but "running" are final.
RunState = Literal["running", "succeeded", "failed", "cancelled"]
#: Further states of a run on Vertex AI, none of them final.
VertexState = Literal["unknown", "queued", "waiting", "being cancelled", "paused"]
FINAL = ("succeeded", "failed", "cancelled")

RECORD_FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a run.

    Attributes:
        name: Its name; its path where the run has several tasks of that name, as in a loop.
        path: Name after those of the tasks that contain it: "condition-1.train".
        state: As of a run; also "from the cache" and "not run".
        seconds: Seconds that it took, or has taken so far; None where they are not known.
        error: Why it failed, as the platform reports it.
        jobs: Resource names of its custom jobs, the most relevant last: failed attempts, the last attempt,
            then what that attempt (GCPC's launcher) has launched.
        is_group: Whether it only contains other tasks.
        ended: Time of its end, in seconds; infinity while it runs.
        parameters: Its output parameters.
        artifacts: Metadata of its output artifacts.
        uris: URIs of its output artifacts.
    """

    name: str
    path: str
    state: str
    seconds: float | None = None
    error: str = ""
    jobs: tuple[str, ...] = ()
    is_group: bool = False
    ended: float = float("inf")
    parameters: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    uris: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """State, and the duration where it has ended: "succeeded after 48 s"."""
        took = duration(self.seconds)
        return f"{self.state} after {took}" if took and self.state in FINAL else self.state


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, its outcome, its parameters, and what it ran on.

    Attributes:
        name: Name of the run, its id on Vertex AI.
        pipeline: Name of the pipeline.
        state: running, succeeded, failed or cancelled; on Vertex AI others, too.
        created: Time of the submission (UTC, RFC 3339); "" where it is not known.
        duration_s: Duration in seconds; None while it is running on this machine.
        error: Why it failed, as the platform or kfp.local reports it.
        verdict: "blessed", "not blessed", "unchanged" (nothing was trained), or "" without a verdict.
        reason: Why it is unchanged, or not blessed.
        remedy: What may help a model that is not blessed.
        metrics: Metrics of the exported model on the test split.
        data: Metadata of the dataset's artifact: fingerprint, classes, records of each split.
        links: URLs, gs:// or paths by name.
        training: Directory of the trained model, with history.csv; "" without one.
        explanation: Explanation of the failure; None where the run has not failed.
        parameters: Parameters of the pipeline, on this machine with their defaults.
        facts: Facts that tasks have reported, by name; these and all until `pid` on this machine only.
        yaml: Path of the compiled pipeline.
        sha256: Its checksum, in hexadecimal.
        versions: Versions of Python and of the packages that matter.
        platform: Operating system and processor.
        cpus: Number of CPUs.
        locked: Whether the process of the run holds a lock on the run directory until it has ended.
        host: Name of the machine that it runs on, the only one where the lock is reliable.
        pid: Process id of the run's process there; 0 where it is not known.
        resource: Resource name on Vertex AI; the run directory on this machine. It and what follows is read
            from the run itself, and not recorded.
        schedule: Resource name of the schedule that started it; "" for none.
        tasks: Its tasks in the order of their starts; empty in a list of runs.
    """

    name: str
    pipeline: str
    state: RunState | VertexState
    created: str = ""
    duration_s: float | None = None
    error: str | None = None
    verdict: str = ""
    reason: str = ""
    remedy: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    training: str = ""
    explanation: Explanation | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    yaml: str = ""
    sha256: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    platform: str = ""
    cpus: int | None = None
    locked: bool = False
    host: str = ""
    pid: int = 0
    resource: str = ""
    schedule: str = ""
    tasks: tuple[Task, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether its state is final."""
        return self.state in FINAL

    @property
    def link(self) -> str:
        """URL of its page in the console; its directory on this machine."""
        return self.links.get("run", "")

    @property
    def directory(self) -> Path:
        """Directory of a run on this machine."""
        return Path(self.resource)

    @property
    def began(self) -> datetime.datetime | None:
        """Time of the submission, in the zone of this machine; None where it is not known."""
        with contextlib.suppress(ValueError):
            return datetime.datetime.fromisoformat(self.created).astimezone()
        return None

    @property
    def seconds(self) -> float | None:
        """Seconds that it took, or has taken so far; None where they are not known."""
        if self.duration_s is not None or self.state != "running" or self.began is None:
            return self.duration_s
        return (datetime.datetime.now(datetime.UTC) - self.began).total_seconds()

    @property
    def failed_task(self) -> Task | None:
        """The task that failed first; the innermost of nested ones."""
        failed = [task for task in self.tasks if task.state == "failed"]
        inner = [
            task for task in failed if not any(other.path.startswith(f"{task.path}.") for other in failed)
        ]
        return min(inner, key=lambda task: task.ended, default=None)

    @property
    def blessed(self) -> bool | None:
        """Whether its tasks blessed its model; None without a verdict. An unchanged run has the earlier one.

        Only outputs of tasks count, not what they print.
        """
        verdict: bool | None = None
        for task in self.tasks:
            name = "still_blessed" if task.parameters.get("changed") is False else "blessed"
            outputs = {**task.artifacts.get("exported", {}), **task.parameters}
            if name in outputs:
                verdict = outputs[name] is True
        return verdict

    @property
    def outcome(self) -> str:
        """The step that failed, or the verdict with the primary metric; "" for neither."""
        if self.explanation is not None:
            return self.explanation.failed
        if self.verdict == "unchanged":
            return f"unchanged ({self.reason})"
        return ", ".join(filter(None, (self.verdict, quality(self.metrics)))) if self.verdict else ""

    def headline(self) -> str:
        """Returns the outcome in one line: "retrain failed: train, replica worker-0"."""
        return f"{self.pipeline} {self.state}{f': {self.outcome}' if self.outcome else ''}"

    def rows(self) -> list[tuple[str, str]]:
        """Returns names and values of why it failed, or its model is not blessed, and what to do."""
        if self.explanation:
            return self.explanation.rows()
        why = [("why", self.reason), ("next step", self.remedy)] if self.verdict == "not blessed" else []
        return [(name, value) for name, value in why if value]

    def record(self) -> dict[str, Any]:
        """Returns the content of run.json."""
        content = asdict(self)
        for name in ("resource", "schedule", "tasks"):
            del content[name]
        return content

    def status(self) -> dict[str, Any]:
        """Returns state, times and tasks, without parameters and outputs."""
        shown = ("name", "path", "state", "seconds", "error", "jobs", "is_group")
        tasks = [{name: getattr(task, name) for name in shown} for task in self.tasks]
        own = {name: getattr(self, name) for name in ("pipeline", "state", "seconds", "created")}
        own |= {"name": self.resource, "error": self.error or "", "schedule": self.schedule}
        return {"run": self.name, **own, "link": self.link, "tasks": tasks}

    def write(self, directory: Path) -> None:
        """Writes run.json into a directory, which is made where there is none; raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        files.write_json(directory / RECORD_FILE, self.record())


def results(tasks: Iterable[Task]) -> dict[str, Any]:
    """Returns the fields of a run that follow from the outputs of its tasks, such as its verdict."""
    found: dict[str, Any] = {"verdict": "", "reason": "", "remedy": "", "training": ""}
    found |= {name: {} for name in ("metrics", "data", "links")}
    for task in tasks:
        if "fingerprint" in (data := task.artifacts.get("dataset", {})):
            found["data"] = data
        if "model_function" in task.artifacts.get("model", {}):
            found["training"] = task.uris.get("model", "")
        if task.parameters.get("changed") is False:
            found["verdict"], found["reason"] = "unchanged", str(task.parameters.get("reason", ""))
        exported = task.artifacts.get("exported", {})
        if (blessed := exported.get("blessed")) is not None:
            found["verdict"] = "blessed" if blessed is True else "not blessed"
            found |= {name: str(exported.get(name, "")) for name in ("reason", "remedy")}
            metrics = task.artifacts.get("metrics", {})
            found["metrics"] = {name: value for name, value in metrics.items() if type(value) in (int, float)}
            links = {"report": task.uris.get("report", ""), "model": task.uris.get("exported", "")}
            found["links"] = {name: uri for name, uri in links.items() if uri}
    return found
