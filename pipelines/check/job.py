"""Custom jobs of a pipeline, as the Vertex AI API would receive them.

The compiled pipeline has the launcher's payload: JSON with placeholders. Placeholders whose values are known
before the run are filled in here; then the launcher's own transformation is applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardline.components.vertex.payload import (
    JobSpec,
    PoolSpec,
    argv,
    list_at,
    literal_string,
    mapping_at,
    without_empty,
)
from shardline.pipelines.check.pipeline import PARAMETER, Pipeline, Task, as_text, without_unknown

_LAUNCHER = "google_cloud_pipeline_components.container."
_TYPES = ("CustomJob", "HyperparameterTuningJob")


def fill(template: str, task: Task) -> str:
    """Returns a template with the known parameters of the task filled in, as the platform does it.

    A text goes into the template unescaped; any other value goes in as JSON.
    """
    filled = []
    position = 0
    quoted = False
    for match in PARAMETER.finditer(template):
        before = template[position : match.start()]
        quoted ^= before.replace("\\\\", "").replace('\\"', "").count('"') % 2 == 1
        filled += [before, _written(task.value(match[1]), int(match[2] or 0), quoted)]
        position = match.end()
    return "".join([*filled, template[position:]])


def _written(value: Any, escapes: int, quoted: bool) -> str:
    if quoted or escapes:
        text = as_text(value)
        for _ in range(escapes):
            text = json.dumps(text)[1:-1]
        return text
    return value if isinstance(value, str) else json.dumps(without_unknown(value))


def payload_of(container: Mapping[str, Any]) -> str:
    """Returns the --payload of a container that launches a custom job; "" for any other container."""
    args = list_at(container, "args")
    launches = any(part.startswith(_LAUNCHER) for part in argv(container))
    if not launches or "--payload" not in args[:-1] or not set(_TYPES) & set(args):
        return ""
    return str(args[args.index("--payload") + 1])


def flatten(argument: str, task: Task) -> str:
    """Returns an argument with KFP's Concat and IfPresent (JSON in a text) evaluated."""
    if not argument.startswith(('{"Concat"', '{"IfPresent"')):
        return argument
    try:
        return _written_out(json.loads(argument), task)
    except (ValueError, RecursionError):
        return argument


def _written_out(node: Any, task: Task) -> str:
    if isinstance(node, list):
        return "".join(_written_out(item, task) for item in node)
    if isinstance(node, dict) and "Concat" in node:
        return _written_out(node["Concat"], task)
    if isinstance(node, dict) and "IfPresent" in node:
        condition = mapping_at(node, "IfPresent")
        present = task.value(str(condition.get("InputName"))) is not None
        return _written_out(condition.get("Then" if present else "Else", ""), task)
    return str(node)


@dataclass(frozen=True, eq=False)
class Job(JobSpec):
    """A custom job, or the trial of a hyperparameter tuning job, that a task launches.

    Attributes:
        template: The launcher's --payload with its placeholders.
        payload: The payload with every value that is known before the run.
        written: The payload as JSON, before the launcher drops empty fields; empty when it is not JSON.
        fault: Why the payload is not JSON; "" when it is.
    """

    task: Task
    template: str
    payload: str
    written: Mapping[str, Any]
    fault: str

    @property
    def where(self) -> str:
        """Name of the job in a finding."""
        return self.task.where

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """The worker pools that reach the API, without slots that are empty on purpose."""
        specs = enumerate(list_at(self.spec, "worker_pool_specs"))
        return tuple(pool for index, spec in specs if not (pool := Pool(spec, index, self)).is_empty_slot)

    @property
    def written_pools(self) -> list[Any]:
        """The worker pools before the launcher drops any; None for those that it drops."""
        written = list_at(JobSpec(self.written).spec, "worker_pool_specs")
        return [pool if without_empty([pool]) else None for pool in written]

    @property
    def has_parameter_servers(self) -> bool:
        """Whether worker pool 2 holds parameter servers, and not a Reduction Server."""
        third = self.pool(2)
        return third is not None and not third.is_reduction_server

    @property
    def strategy(self) -> str:
        """The scheduling strategy; "" when it is not known or not set."""
        return literal_string(self.scheduling.get("strategy"))

    def pool(self, index: int) -> Pool | None:
        """Returns the worker pool in a slot; None for an empty slot."""
        return next((pool for pool in self.pools if pool.index == index), None)


@dataclass(frozen=True, eq=False)
class Pool(PoolSpec):
    """A worker pool that reaches the API: 0 chief, 1 workers, 2 servers of either kind, 3 evaluators."""

    index: int
    job: Job

    @property
    def where(self) -> str:
        """Name of the pool in a finding."""
        return f"{self.job.where}, worker pool {self.index}"


def jobs(pipeline: Pipeline) -> tuple[Job, ...]:
    """Returns the custom jobs that a pipeline's tasks launch."""
    templates = ((task, payload_of(task.container)) for task in pipeline.tasks)
    return tuple(_job(task, flatten(template, task)) for task, template in templates if template)


def _job(task: Task, template: str) -> Job:
    payload, fault = fill(template, task), ""
    try:
        written = json.loads(payload, strict=False)
    except (ValueError, RecursionError) as error:
        written, fault = {}, str(error)
    if not isinstance(written, dict):
        written, fault = {}, "it is not a JSON object"
    return Job(mapping_at(without_empty(written)), task, template, payload, written, fault)
