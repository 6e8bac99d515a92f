"""Record of a run, run.json: one schema for runs on this machine and on the platform.

`directory` reads the record of a run on this machine, `logs` that of one on the platform.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from shardline.components.runs.causes import Explanation
from shardline.components.text import quality
from shardline.trainer.base import files
from shardline.trainer.base.deserialize import restore
from shardline.trainer.base.errors import SettingsError

#: States of a run; all but "running" are final.
State = Literal["running", "succeeded", "failed", "cancelled"]
RUNNING: Final = "running"
SUCCEEDED: Final = "succeeded"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"

RECORD_FILE, PIPELINE_FILE = "run.json", "pipeline.yaml"
#: Environment variable with the run directory, in all processes of a run on this machine.
RUN_VARIABLE = "SHARDLINE_RUN"
#: In the run directory: the logs of replicas by job, and the output of all tasks.
REPLICAS, LOG = "replicas", "run.log"
JOB_FILE = "job.json"
#: In the run directory: the local directory for /gcs/.
GCS_DIRECTORY = "gcs"
#: Next to the run directories: a link to the newest.
LATEST = "latest"

#: The error of a run whose process ended without a record of it.
ABANDONED = "its process ended without a record: it was killed, or could not write to the run directory"

#: Mount of all buckets in every task on Vertex AI, and on hardly any other machine.
_BUCKETS = Path("/gcs")


def on_platform() -> bool:
    """Whether this process is a task on Vertex AI, and not one of a run on this machine."""
    return RUN_VARIABLE not in os.environ and _BUCKETS.is_dir()


@contextlib.contextmanager
def directory_lock(directory: Path, *, shared: bool = False) -> Iterator[bool]:
    """Locks a directory while the context lasts; yields whether it is locked: no other process holds it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            free = files.lock(descriptor, shared=shared)
        except OSError:
            free = False
        yield free
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Outcome of a run, its parameters, and what it ran on.

    Attributes:
        name: Name of the run.
        pipeline: Name of the pipeline.
        state: running, succeeded, failed or cancelled.
        created: Time of the submission (UTC, RFC 3339).
        duration_s: Duration in seconds; None while it is running.
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
        facts: Facts that tasks have reported, by name; these and all that follow on this machine only.
        yaml: Path of the compiled pipeline.
        sha256: Its checksum, in hexadecimal.
        versions: Versions of Python and of the packages that matter.
        platform: Operating system and processor.
        cpus: Number of CPUs.
        locked: Whether the process of the run holds a lock on the run directory until it has ended.
        host: Name of the machine that it runs on, the only one where the lock is reliable.
        pid: Process id of the run's process there; 0 where it is not known.
    """

    name: str
    pipeline: str
    state: State
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

    @property
    def has_reliable_lock(self) -> bool:
        """Whether the lock shows on this machine that the run's process has ended."""
        return self.locked and self.host == socket.gethostname()

    def headline(self) -> str:
        """Returns the outcome in one line: "retrain failed: train, replica worker-0"."""
        if self.explanation is not None:
            return f"{self.pipeline} {self.state}: {self.explanation.failed}"
        figures = f", {figures}" if (figures := quality(self.metrics)) else ""
        verdict = f": {self.verdict}{figures}" if self.verdict else ""
        return f"{self.pipeline} {self.state}{verdict}" + (
            f" ({self.reason})" if self.verdict == "unchanged" else ""
        )

    def rows(self) -> list[tuple[str, str]]:
        """Returns names and values of why it failed, or its model is not blessed, and what to do."""
        if self.explanation:
            return self.explanation.rows()
        why = [("why", self.reason), ("next step", self.remedy)] if self.verdict == "not blessed" else []
        return [(name, value) for name, value in why if value]

    def write(self, directory: Path) -> None:
        """Writes run.json into a directory, which is made where there is none; raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        files.write_json(directory / RECORD_FILE, asdict(self))

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        """Reads run.json of a directory; a run whose process has ended without a record of it has failed.

        Only the machine that it ran on can detect this: on many mounts locks are not shared.

        Raises SettingsError when there is none, or it is damaged.
        """
        record = cls._read(directory)
        if record.state != RUNNING or not record.has_reliable_lock:
            return record
        with directory_lock(directory, shared=True) as free:
            record = cls._read(directory)  # it may have ended just now
        if free and record.state == RUNNING:
            return replace(record, state=FAILED, error=ABANDONED)
        return record

    @classmethod
    def _read(cls, directory: Path) -> RunRecord:
        try:
            content = {"name": directory.name, **files.read_json(directory / RECORD_FILE, SettingsError)}
            return restore(cls, content, RECORD_FILE, SettingsError)
        except SettingsError as error:
            raise SettingsError(f"{directory} is not the directory of a run: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ReplicaStart:
    """A start of a replica, in seconds since the start of the job.

    `exit` is its status or the name of a signal, None while it runs; `stopped` whether the job ended it.
    """

    start_s: float
    end_s: float | None = None
    exit: int | str | None = None
    stopped: bool = False
    peak_memory_bytes: int = 0


@dataclass(frozen=True)
class ReplicaRecord:
    """The starts of one replica of a job; its name is as in "worker-0"."""

    name: str
    restarts: int
    starts: tuple[ReplicaStart, ...]


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Record of a custom job on this machine, the content of job.json.

    `state` is "succeeded", "failed" or "stopped"; `error` is why it failed.
    """

    display_name: str = ""
    state: str = ""
    error: str | None = None
    created: str = ""
    duration_s: float = 0.0
    replicas: tuple[ReplicaRecord, ...]


@dataclass(frozen=True, kw_only=True)
class TaskOutputs:
    """Output parameters of one task, and metadata and URIs of its output artifacts, by name."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    uris: Mapping[str, str] = field(default_factory=dict)


def collect_results(tasks: Iterable[TaskOutputs]) -> dict[str, Any]:
    """Returns the fields of a `RunRecord` that follow from the outputs of tasks, such as its verdict."""
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
