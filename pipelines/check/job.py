"""A custom job as the Vertex AI API would receive it: the launcher's payload after its transformation.

The launcher's payload as it is compiled: JSON with placeholders that the platform fills in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardline.pipelines.check.ir import (
    PARAMETER,
    UNKNOWN,
    UNKNOWN_TEXT,
    as_text,
    at,
    known_text,
    list_at,
    whole,
    without_unknown,
)
from shardline.pipelines.check.pipeline import Pipeline, Task

_LAUNCHERS = "google_cloud_pipeline_components.container."
_TYPES = ("CustomJob", "HyperparameterTuningJob")


def fill(template: str, task: Task) -> str:
    """Returns a text with what is known of the task's parameters, as the platform fills it in.

    A text goes into the template as it is, whatever characters it has; everything else goes in as JSON.
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
    if isinstance(value, str):
        return value
    return json.dumps(UNKNOWN_TEXT if value is UNKNOWN else without_unknown(value))


def payload_of(container: Mapping[str, Any]) -> str:
    """Returns the --payload of a container that launches a custom job; "" for any other container."""
    args = list_at(container, "args")
    launches = any(_LAUNCHERS in part for part in [*list_at(container, "command"), *args])
    if not launches or "--payload" not in args[:-1] or not set(_TYPES) & set(args):
        return ""
    return str(args[args.index("--payload") + 1])


def flatten(argument: str, task: Task) -> str:
    """Returns an argument with KFP's Concat and IfPresent, which are JSON in a text, written out."""
    if not argument.startswith(('{"Concat"', '{"IfPresent"')):
        return argument
    try:
        return _written_out(json.loads(argument), task)
    except ValueError:
        return argument


def _written_out(node: Any, task: Task) -> str:
    if isinstance(node, list):
        return "".join(_written_out(item, task) for item in node)
    if isinstance(node, dict) and "Concat" in node:
        return _written_out(node["Concat"], task)
    if isinstance(node, dict) and "IfPresent" in node:
        condition = at(node, "IfPresent")
        present = task.value(str(condition.get("InputName"))) is not None
        return _written_out(condition.get("Then" if present else "Else", ""), task)
    return str(node)


@dataclass(frozen=True, eq=False)
class Job:
    """A custom job (or the trial of a hyperparameter tuning job) that a task launches.

    Attributes:
        task: The task.
        template: The launcher's --payload with its placeholders.
    """

    task: Task
    template: str

    @property
    def where(self) -> str:
        """What the job is called in a finding."""
        return self.task.where

    @cached_property
    def payload(self) -> str:
        """The payload with every value that is known before the run."""
        return fill(self.template, self.task)

    @cached_property
    def _parsed(self) -> tuple[dict[str, Any], str]:
        try:
            content = json.loads(self.payload, strict=False)
        except ValueError as error:
            return {}, str(error)
        return (content, "") if isinstance(content, dict) else ({}, "it is no JSON object")

    @property
    def fault(self) -> str:
        """Why the payload cannot be read; "" when it can."""
        return self._parsed[1]

    @cached_property
    def content(self) -> dict[str, Any]:
        """The payload as the API receives it: the launcher drops what is empty, zero counts included."""
        return at(_without_empty(self._parsed[0]))

    @property
    def spec(self) -> dict[str, Any]:
        """The CustomJobSpec."""
        return _spec(self.content)

    @property
    def scheduling(self) -> dict[str, Any]:
        """Strategy, timeout and restarts."""
        return at(self.spec, "scheduling")

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """The worker pools that reach the API, without slots that are left empty on purpose."""
        pools = list_at(self.spec, "worker_pool_specs")
        return tuple(Pool(self, index, pool) for index, pool in enumerate(pools) if not _is_empty_slot(pool))

    @property
    def written_pools(self) -> list[Any]:
        """The worker pools as they were written; None for those that the launcher drops."""
        written = list_at(_spec(self._parsed[0]), "worker_pool_specs")
        return [pool if _without_empty([pool]) else None for pool in written]

    @property
    def has_parameter_servers(self) -> bool:
        """Whether worker pool 2 holds parameter servers, and not a Reduction Server."""
        third = self.pool(2)
        return third is not None and not third.is_reduction_server

    @property
    def strategy(self) -> str:
        """The scheduling strategy; "" when it is unknown or not set."""
        return known_text(self.scheduling.get("strategy"))

    @property
    def training_replicas(self) -> int | None:
        """Replicas that train, in pools 0 and 1; None when it is unknown."""
        counts = [pool.replica_count for pool in self.pools if pool.index < 2]
        return sum(count or 0 for count in counts) if counts and None not in counts else None

    def pool(self, index: int) -> Pool | None:
        """Returns the worker pool in a slot, None where there is none."""
        return next((pool for pool in self.pools if pool.index == index), None)

    def text(self, name: str) -> str:
        """Returns a text of the spec, placeholders included; "" when it is not set."""
        value = self.spec.get(name)
        return value if isinstance(value, str) else ""


@dataclass(frozen=True, eq=False)
class Pool:
    """A worker pool that reaches the API.

    Attributes:
        job: The job.
        index: 0 chief, 1 workers, 2 parameter servers or Reduction Server, 3 evaluators.
        spec: The WorkerPoolSpec; a text while it is not known.
    """

    job: Job
    index: int
    spec: Any

    @property
    def where(self) -> str:
        """What the pool is called in a finding."""
        return f"{self.job.where}, worker pool {self.index}"

    @property
    def container(self) -> dict[str, Any]:
        """The container, or the Python package, that each replica runs."""
        return at(self.spec, "container_spec") or at(self.spec, "python_package_spec")

    @property
    def image(self) -> str:
        """The image; "" when it is unknown."""
        container = self.container
        return known_text(container.get("image_uri") or container.get("executor_image_uri"))

    @property
    def replica_count(self) -> int | None:
        """How many replicas; None when it is unknown or no whole number."""
        return whole(at(self.spec).get("replica_count", 1))

    @property
    def machine(self) -> dict[str, Any]:
        """The machine spec."""
        return at(self.spec, "machine_spec")

    @property
    def machine_type(self) -> str:
        """The machine type; "" when it is unknown."""
        return known_text(self.machine.get("machine_type"))

    @property
    def accelerator_type(self) -> str:
        """The accelerator type; "" for none, and when it is unknown."""
        found = known_text(self.machine.get("accelerator_type"))
        return "" if found == "ACCELERATOR_TYPE_UNSPECIFIED" else found

    @property
    def argv(self) -> list[str]:
        """Command and arguments of a replica."""
        parts = [*list_at(self.container, "command"), *list_at(self.container, "args")]
        return [part for part in parts if isinstance(part, str)]

    @property
    def env(self) -> list[dict[str, Any]]:
        """The environment variables, each with name and value."""
        return [item for item in list_at(self.container, "env") if isinstance(item, dict)]

    @property
    def is_reduction_server(self) -> bool:
        """Whether it runs the platform's Reduction Server."""
        return "training/reductionserver" in self.image


def jobs(pipeline: Pipeline) -> tuple[Job, ...]:
    """Returns the custom jobs that a pipeline's tasks launch."""
    return tuple(
        Job(task, flatten(template, task))
        for task in pipeline.tasks
        if (template := payload_of(task.container))
    )


def _without_empty(content: Any) -> Any:
    """Returns what the launcher makes of its payload, by the launcher's own function."""
    from google_cloud_pipeline_components.container.v1.gcp_launcher.utils import json_util

    return json_util.recursive_remove_empty(content)


def _is_empty_slot(pool: Any) -> bool:
    """Whether a pool is the empty message for the API: "0" as a text is not dropped by the launcher."""
    return isinstance(pool, dict) and set(pool) == {"replica_count"} and whole(pool["replica_count"]) == 0


def _spec(content: Mapping[str, Any]) -> dict[str, Any]:
    return at(content, "job_spec") or at(content, "trial_job_spec")
