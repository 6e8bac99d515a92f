"""Changes that a local run makes to a pipeline: what there are, and what of a given one is changed where.

`python -m shardline.pipelines.local.changes` prints the table of docs/local-runs.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardline.components.vertex.payload import at, list_at
from shardline.pipelines.check.job import jobs
from shardline.pipelines.check.pipeline import PLACEHOLDER, Executor, Pipeline, Task
from shardline.pipelines.local import start
from shardline.pipelines.local.kfp_internals import split_installation
from shardline.pipelines.local.localize import localize, localize_value, stand_in
from shardline.pipelines.spec import PipelineFile


class Change(NamedTuple):
    """One kind of change: what is concerned, what it is on the platform, and what here."""

    what: str
    there: str
    here: str


#: All of them. What is not here is the same in both places.
CHANGES = (
    Change(
        "launcher",
        "Google's launcher asks the platform for a custom job, a tuning job, an upload, a deployment, a "
        "batch prediction or an e-mail",
        "a custom job is a process for each replica, with the same TF_CONFIG, CLUSTER_SPEC and AIP_*; "
        "a tuning job is a search with Optuna; all else is noted and not sent",
    ),
    Change(
        "container",
        "its command runs in its image",
        "its command is a process of yours",
    ),
    Change(
        "image", "every task and replica runs in one", "means nothing: all run in this Python environment"
    ),
    Change(
        "packages",
        "a component installs its packages when it starts",
        "they must be here, nothing is installed",
    ),
    Change(
        "machine",
        "tasks and replicas have the CPUs, memory, disks and accelerators that they ask for",
        "means nothing: all share this machine, and replicas are not told of accelerators",
    ),
    Change(
        "retries",
        "a task is tried again as often as it says, after a pause",
        "a custom job is, at once; a task of Shardline's components is not",
    ),
    Change("cache", "a task with the same inputs may be taken from an earlier run", "every task runs"),
    Change(
        "start",
        "each task is a process of its own",
        "one that loads TensorFlow may be forked from one that has",
    ),
    Change("placeholder", "the project, region, accounts and times of the run", "local values"),
    Change("condition", "names a task's output", "names it so that kfp.local finds it"),
    Change(
        "unset", "an optional parameter without a value is passed on as such", "it is left out of the tasks"
    ),
    Change(
        "platform",
        "a second YAML document, as kfp-kubernetes writes it, is refused",
        "its settings of tasks (secrets, volumes, pod metadata) are left out, with a line; a workspace is a "
        "directory of the run",
    ),
)


_ORDER = [change.what for change in CHANGES]


def table() -> str:
    """Returns all changes as a table in Markdown."""
    rows = [("", "on the platform", "here"), ("---",) * 3, *CHANGES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def listed(spec: dict[str, Any], given: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the changes of a pipeline: the name of each, as in `CHANGES`, what becomes of it, and where.

    Raises PipelineError as `localize` does.
    """
    pipeline, local = Pipeline(spec, given), Pipeline(localize(spec, given))
    rows = [
        row
        for old, new in zip(pipeline.executors, local.executors, strict=True)
        for row in _of_executor(old, new)
    ]
    for job in jobs(pipeline):
        for pool in job.pools:
            machine = ", ".join(f"{name} {value}" for name, value in pool.machine.items()) or "machine"
            rows.append(
                (
                    "machine",
                    f"{job.task.name} (pool {pool.index})",
                    f"{pool.replica_count} x {machine}: as many processes",
                )
            )
    for old, new in zip(pipeline.tasks, local.tasks, strict=True):
        rows += _of_task(old, new)
    rows += [("placeholder", "everywhere", words) for words in _placeholders(spec)]
    found: dict[tuple[str, str], list[str]] = {}
    for what, where, here in sorted(rows, key=lambda row: _ORDER.index(row[0])):
        found.setdefault((what, here), []).append(where)
    return [(what, here, ", ".join(dict.fromkeys(where))) for (what, here), where in found.items()]


def not_kept(file: PipelineFile) -> list[str]:
    """Returns what a task may miss in a run here: accelerators, and what it has on Kubernetes alone."""
    asking = [
        item for item in Pipeline(file.spec).executors if at(item.container, "resources", "accelerator")
    ]
    return [f"the accelerator of {item.where}" for item in asking] + [
        f"{kind} (of Kubernetes)" for kind in file.of_other_platforms
    ]


def _of_executor(old: Executor, new: Executor) -> Iterator[tuple[str, str, str]]:
    where = old.task.name if old.task else old.label
    command = list_at(old.container, "command")
    packages, _ = split_installation(command)
    if name := stand_in(old.container):
        yield "launcher", where, f"the stand-in {name} for {command[-1]}"
    elif "shardline.pipelines.local.container" in list_at(new.container, "command"):
        yield "container", where, f"{' '.join(command[:2])} ... runs as a process"
    if packages:
        yield "packages", where, f"not installed: {', '.join(packages)}"
    if start.__name__ in list_at(new.container, "command"):
        yield "start", where, "loads TensorFlow: may be forked from a process that has"
    yield "image", where, f"not {old.container.get('image', '')} but this environment"
    limits = at(old.container, "resources")
    asked = {name: limits[name] for name in sorted(limits) if name.endswith("Limit") and name[0] != "r"}
    if accelerator := at(limits, "accelerator"):
        asked["accelerator"] = " ".join(str(value) for value in accelerator.values())
    if asked:
        yield (
            "machine",
            where,
            "not asked for: " + ", ".join(f"{name} {value}" for name, value in asked.items()),
        )


def _of_task(old: Task, new: Task) -> Iterator[tuple[str, str, str]]:
    where = old.name
    policy, retries = at(new.spec, "retryPolicy"), at(old.spec, "retryPolicy").get("maxRetryCount")
    if retries and policy != at(old.spec, "retryPolicy"):
        yield "retries", where, f"up to {retries} times there, here {'at once' if policy else 'not at all'}"
    if at(old.spec, "cachingOptions").get("enableCache"):
        yield "cache", where, "runs every time"
    condition = at(new.spec, "triggerPolicy").get("condition")
    if condition != at(old.spec, "triggerPolicy").get("condition"):
        yield "condition", where, str(condition)
    for name in old.inputs("parameters").keys() - new.inputs("parameters").keys():
        yield "unset", where, name


def _placeholders(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yields the placeholders that get a local value, with the value."""
    for found in PLACEHOLDER.finditer(json.dumps(spec)):
        text = found[0].replace('\\"', '"')
        if (
            not text.startswith("{{$.")
            or (value := localize_value(text, created="the time of this run")) == text
        ):
            continue
        yield f"{text} -> {value or 'nothing'}"


if __name__ == "__main__":
    print(table())
