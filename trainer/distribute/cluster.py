"""The cluster this process belongs to, read from TF_CONFIG."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import ClusterError

# The tasks that train, in the order in which TensorFlow numbers them.
_TRAINING_TASKS = ("chief", "worker")


@dataclass(frozen=True)
class Cluster:
    """One process's view of its cluster.

    Attributes:
        task_type: "chief" or "worker"; "chief" when there is no cluster.
        task_index: Index among the tasks of that type.
        hosts: host:port of every training task, chief first; empty when there is no cluster.
    """

    task_type: str = "chief"
    task_index: int = 0
    hosts: tuple[str, ...] = ()
    has_chief_task: bool = True

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the artifacts: the chief task, or worker 0 where there is none."""
        return self.task_index == 0 and (self.task_type == "chief" or not self.has_chief_task)

    @property
    def num_workers(self) -> int:
        """Number of processes that train together, at least 1."""
        return max(1, len(self.hosts))

    @property
    def name(self) -> str:
        """This process, as people call it: "chief-0", "worker-1"."""
        return f"{self.task_type}-{self.task_index}"

    def __str__(self) -> str:
        """Returns the cluster in words: "chief + 1 worker"."""
        followers = self.num_workers - 1
        if not followers:
            return "one process"
        first = "chief" if self.has_chief_task else "worker 0 as chief"
        return f"{first} + {followers} worker{'s' if followers > 1 else ''}"


def read_cluster(environ: Mapping[str, str]) -> Cluster:
    """Reads TF_CONFIG in both shapes (chief and workers, workers only); without it there is no cluster.

    Raises:
        ClusterError: When TF_CONFIG is malformed; the message says in what.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return Cluster()
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ClusterError(f"TF_CONFIG is not JSON ({error}): {text[:80]!r}") from None
    tasks = _tasks(config)
    hosts = tuple(host for kind in _TRAINING_TASKS for host in tasks.get(kind, ()))
    task_type, task_index = _this_task(config, tasks)
    if len(hosts) == 1:
        return Cluster()
    return Cluster(task_type, task_index, hosts, has_chief_task="chief" in tasks)


def _tasks(config: Any) -> dict[str, list[str]]:
    tasks = config.get("cluster") if isinstance(config, dict) else None
    if not isinstance(tasks, dict) or not all(isinstance(hosts, list) and hosts for hosts in tasks.values()):
        raise ClusterError(f"TF_CONFIG has no 'cluster' of task types with their hosts: {config!r}")
    unknown = sorted(set(tasks) - set(_TRAINING_TASKS))
    if unknown:
        raise ClusterError(f"TF_CONFIG has tasks {unknown}; this trainer knows {list(_TRAINING_TASKS)}")
    if len(tasks.get("chief", ())) > 1:
        raise ClusterError(f"TF_CONFIG has {len(tasks['chief'])} chiefs; a cluster has one")
    return tasks


def _this_task(config: Mapping[str, Any], tasks: Mapping[str, list[str]]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise ClusterError(f"TF_CONFIG has no 'task' with 'type' and 'index': {task!r}")
    kind = task["type"]
    try:
        index = int(task["index"])
    except (TypeError, ValueError):
        raise ClusterError(f"TF_CONFIG's task index is not a number: {task['index']!r}") from None
    if kind not in tasks or not 0 <= index < len(tasks[kind]):
        sizes = {name: len(hosts) for name, hosts in tasks.items()}
        raise ClusterError(f"TF_CONFIG's task {kind}:{index} is not in its cluster of {sizes}")
    return kind, index
