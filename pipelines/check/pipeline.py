"""View of a compiled pipeline: its tasks, the values known before it runs, its custom jobs, its schedule."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from shardline.components.code import read_packed
from shardline.components.custom_job import (
    ANY,
    JobSpec,
    PoolSpec,
    launcher_type,
    list_at,
    literal_string,
    mapping_at,
    without_empty,
)
from shardline.pipelines.parameters import fold_options
from shardline.pipelines.spec import parse_pipeline
from shardline.trainer.base import code
from shardline.trainer.base.deserialize import Count, restore_integers
from shardline.trainer.base.errors import PipelineError, SettingsError

#: A value that is known at run time only: another task's output, a loop's item, a required parameter.
UNKNOWN: Final = object()

#: Replacement for such a value inside a text; like the platform's own placeholders, it begins with "{{$".
UNKNOWN_TEXT = "{{$.unknown}}"

#: Any placeholder.
PLACEHOLDER = re.compile(r"\{\{\$(.*?)\}\}")

#: Placeholder of an input parameter; the level says how often its value is escaped as a JSON string.
PARAMETER = re.compile(r"\{\{\$\.inputs\.parameters\['([^']+)'\](?:\.json_escape\[(\d)\])?\}\}")

#: Keys of a task whose input `itemInput` gets a loop's item.
_ITERATORS = ("parameterIterator", "artifactIterator")

#: Limit for DAGs that are used many times inside DAGs that are used many times.
_MOST_TASKS = 20_000


class Target(enum.Enum):
    """Target of a pipeline that is checked: where it runs next."""

    #: It runs on this machine, or is only compiled: paths on the platform are not checked.
    LOCAL = "local"
    #: `shardline check` reads it.
    UNKNOWN = "unknown"
    #: It is sent to the platform.
    PLATFORM = "platform"


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A compiled pipeline (IR 2.x), the parameters of its run, and where it runs next.

    Attributes:
        spec: The pipeline's spec, as `parse_pipeline` reads it: its structure is checked there.
        given: Parameters by name; None when they are not known.
        location: Region of the run; "" when it is not known.
        environment: The table [vertex] of its settings, where they are checked.
    """

    spec: Mapping[str, Any]
    given: Mapping[str, Any] | None = None
    target: Target = Target.UNKNOWN
    location: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)

    where = "pipeline"  # its name in a finding

    @classmethod
    def parse(cls, content: bytes | str, path: Path, given: Mapping[str, Any] | None = None) -> Pipeline:
        """Parses the content of the pipeline file `path`; raises PipelineError when it is not a pipeline."""
        spec = parse_pipeline(content, path)
        return cls(spec, None if given is None else fold_options(spec, given))

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return str(mapping_at(self.spec, "pipelineInfo").get("name") or "")

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The pipeline's own parameters."""
        declared = mapping_at(self.spec, "root", "inputDefinitions", "parameters")
        return tuple(Parameter(self, name, declared[name] or {}) for name in declared)

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks: those of a DAG before those of its sub-DAGs; those of a loop once."""
        tasks: list[Task] = []
        for task in self._walk(mapping_at(self.spec, "root"), None, ()):
            tasks.append(task)
            if len(tasks) > _MOST_TASKS:
                raise PipelineError(f"the pipeline has more than {_MOST_TASKS} tasks")
        return tuple(tasks)

    @cached_property
    def executors(self) -> tuple[Executor, ...]:
        """The containers, each with the first task that runs it."""
        users: dict[str, Task] = {}
        for task in self.tasks:
            users.setdefault(str(task.component.get("executorLabel")), task)
        found = mapping_at(self.spec, "deploymentSpec", "executors")
        return tuple(
            Executor(label, mapping_at(found, label, "container"), users.get(label))
            for label in found
            if mapping_at(found, label, "container")
        )

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """The custom jobs that its tasks launch."""
        templates = ((task, payload_of(task.container)) for task in self.tasks)
        return tuple(_job(task, flatten(template, task)) for task, template in templates if template)

    @cached_property
    def code(self) -> dict[str, bytes]:
        """The files of packages of users that its tasks unpack, by name."""
        files: dict[str, bytes] = {}
        for text in dict.fromkeys(strings(self.spec)):
            files |= read_packed(text)
        return files

    @property
    def packages(self) -> list[str]:
        """The packages and modules that it holds."""
        return list(code.versions(self.code))

    def value(self, name: str) -> Any:
        """Returns the value of a parameter of the pipeline: as passed, its default, None, or UNKNOWN."""
        if self.given and name in self.given:
            return self.given[name]
        return _default(mapping_at(self.spec, "root", "inputDefinitions", "parameters", name))

    def _walk(
        self, component: Mapping[str, Any], parent: Task | None, inside: tuple[str, ...]
    ) -> Iterator[Task]:
        tasks = mapping_at(component, "dag", "tasks")
        for name in tasks:
            used = str(mapping_at(tasks, name, "componentRef").get("name") or "")
            task = Task(name, mapping_at(tasks, name), used, parent, self)
            yield task
            if used not in inside:
                yield from self._walk(task.component, task, (*inside, used))


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter of the pipeline; its declaration has the type, and the default if there is one."""

    pipeline: Pipeline
    name: str
    declaration: Mapping[str, Any]

    @property
    def where(self) -> str:
        """Name of the parameter in a finding."""
        return f"parameter {self.name}"


@dataclass(frozen=True, eq=False)
class Task:
    """A task at one position in the graph.

    It runs a component. Its parent is the task whose DAG contains it; None in the DAG of the pipeline.
    """

    name: str
    spec: Mapping[str, Any]
    component_name: str
    parent: Task | None
    pipeline: Pipeline

    @property
    def path(self) -> str:
        """The names from the pipeline's DAG down to the task."""
        return f"{self.parent.path}/{self.name}" if self.parent else self.name

    @property
    def where(self) -> str:
        """Name of the task in a finding."""
        return f"task {self.path}"

    @property
    def component(self) -> dict[str, Any]:
        """The component that it runs."""
        return mapping_at(self.pipeline.spec, "components", self.component_name)

    @property
    def container(self) -> dict[str, Any]:
        """The container that it runs; empty for a DAG or an importer."""
        label = str(self.component.get("executorLabel") or "")
        return mapping_at(self.pipeline.spec, "deploymentSpec", "executors", label, "container")

    def declared(self, kind: str) -> dict[str, Any]:
        """Returns the component's input "parameters" or "artifacts" by name."""
        return mapping_at(self.component, "inputDefinitions", kind)

    def inputs(self, kind: str) -> dict[str, Any]:
        """Returns the origins of the input "parameters" or "artifacts" by name."""
        return mapping_at(self.spec, "inputs", kind)

    def value(self, name: str) -> Any:
        """Returns the value of an input before the run; None without one, UNKNOWN if it comes later."""
        if name not in self.inputs("parameters"):
            if any(mapping_at(self.spec, key).get("itemInput") == name for key in _ITERATORS):
                return UNKNOWN
            return _default(mapping_at(self.declared("parameters"), name))
        item = mapping_at(self.inputs("parameters"), name)
        if "runtimeValue" in item:
            return self._fill(mapping_at(item, "runtimeValue").get("constant", UNKNOWN))
        outer = item.get("componentInputParameter")
        if not isinstance(outer, str) or "parameterExpressionSelector" in item:
            return UNKNOWN
        return self.parent.value(outer) if self.parent else self.pipeline.value(outer)

    def kind(self, name: str) -> str:
        """Returns the type of the parameter or task output that an input gets; "" for any other."""
        item = mapping_at(self.inputs("parameters"), name)
        outer = self.parent.component if self.parent else mapping_at(self.pipeline.spec, "root")
        key, declared = (
            item.get("componentInputParameter"),
            mapping_at(outer, "inputDefinitions", "parameters"),
        )
        if output := mapping_at(item, "taskOutputParameter"):
            used = mapping_at(outer, "dag", "tasks", str(output.get("producerTask")), "componentRef")
            made = mapping_at(self.pipeline.spec, "components", str(used.get("name")), "outputDefinitions")
            key, declared = output.get("outputParameterKey"), mapping_at(made, "parameters")
        return str(mapping_at(declared, str(key)).get("parameterType") or "")

    def values(self) -> dict[str, Any]:
        """Returns the values of all input parameters by name, as `value` does."""
        names = {**self.declared("parameters"), **self.inputs("parameters")}
        return {name: self.value(name) for name in names}

    def _fill(self, value: Any, inside: bool = False) -> Any:
        if isinstance(value, str):
            alone = None if inside else PARAMETER.fullmatch(value)  # inside lists and objects it becomes text
            if alone and alone[1] in self.inputs("parameters"):
                return self.value(alone[1])
            return PARAMETER.sub(lambda match: as_text(self.value(match[1])), value)
        if isinstance(value, list):
            return [self._fill(item, True) for item in value]
        if isinstance(value, dict):
            return {key: self._fill(item, True) for key, item in value.items()}
        return value


@dataclass(frozen=True, eq=False)
class Executor:
    """A container that tasks run: image, command, args, env, resources; `task` is the first that runs it."""

    label: str
    container: Mapping[str, Any]
    task: Task | None

    @property
    def where(self) -> str:
        """Name of the container in a finding."""
        return self.task.where if self.task else f"executor {self.label}"


def strings(value: Any) -> Iterator[str]:
    """Yields the texts in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def _default(declaration: Mapping[str, Any]) -> Any:
    if declaration.get("defaultValue") is not None:
        return declaration["defaultValue"]
    return None if declaration.get("isOptional") else UNKNOWN


def as_text(value: Any) -> str:
    """Returns a value as the platform writes it into a text."""
    if value is UNKNOWN:
        return UNKNOWN_TEXT
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(restore_integers(value))


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
    known = ANY if value is UNKNOWN else restore_integers(value)
    return known if isinstance(value, str) else json.dumps(known)


def payload_of(container: Mapping[str, Any]) -> str:
    """Returns the --payload of a container that launches a custom job; "" for any other container."""
    args, is_job = (
        list_at(container, "args"),
        launcher_type(container) in ("CustomJob", "HyperparameterTuningJob"),
    )
    return str(args[args.index("--payload") + 1]) if is_job and "--payload" in args[:-1] else ""


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


def _job(task: Task, template: str) -> Job:
    payload, fault = fill(template, task), ""
    try:
        written = json.loads(payload, strict=False)
    except (ValueError, RecursionError) as error:
        written, fault = {}, str(error)
    if not isinstance(written, dict):
        written, fault = {}, "it is not a JSON object"
    return Job(mapping_at(without_empty(written)), task, template, payload, written, fault)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule, [schedules.NAME]; the fields are those of the Vertex AI API.

    Its display name is NAME, by which it is found on the platform, and its cron expression begins with a time
    zone: "TZ=Europe/Vienna 0 6 * * 1". `params` is a file of parameters, which `parameters` override.
    settings/schedules.toml.example explains the fields; a count of None is no limit, and `paused` None leaves
    it as it is on the platform.
    """

    cron: str
    display_name: str
    pipeline: str
    params: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    max_concurrent_active_run_count: Count | None = 1
    max_run_count: Count | None = None
    paused: bool | None = None

    where = "schedule"  # its name in a finding

    def __post_init__(self) -> None:
        name = self.display_name
        if not name.strip() or '"' in name or not name.isprintable():
            raise SettingsError(f"display_name must be a text without quotes and line breaks, got {name!r}")
