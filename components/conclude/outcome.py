"""How a run came out, wherever it ran, and what of it is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardline.components.conclude.explanation import explain
from shardline.components.conclude.failure import Failure
from shardline.trainer import files

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
