"""Localization of a compiled pipeline: a pure rewrite of the IR into one that stock kfp.local can run.

`check_runnable` refuses a pipeline that needs something that is not on this machine.

docs/local-runs.md lists the changes. In addition, an optional parameter without a default gets the default
null, without which kfp.local fails; conditions on named outputs are rewritten for kfp.local
(`kfp_internals`); and a task that takes an output is made to depend on the task with that output, since
kfp.local does not infer it.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from shardline.components.custom_job import launcher_type, list_at, mapping_at
from shardline.pipelines.check import Pipeline
from shardline.pipelines.local import launcher_stubs, process
from shardline.pipelines.local.job import EXECUTOR_INPUT_MARKER, LOCAL_PROJECT
from shardline.pipelines.local.kfp_internals import (
    EXECUTOR,
    MARKER,
    adapt_condition,
    split_installation,
)
from shardline.pipelines.spec import all_tasks
from shardline.trainer.base.errors import PipelineError

_STUB_COMMAND = ("python3", "-u", "-m", launcher_stubs.__name__)

#: Modules that tasks forked from the server import, and a pattern for those that components' sources name.
_PRELOADED = ("shardline.trainer.train", "kfp.dsl.executor", "shardline.pipelines.local.job.supervisor")
_IMPORTED = re.compile(r"from (shardline\.components\.(?:rehearse|train|validate)[.\w]*) import")

_LOCAL_VALUES = {
    "json_escape[1]": EXECUTOR_INPUT_MARKER,
    "pipeline_google_cloud_project_id": LOCAL_PROJECT,
    "pipeline_google_cloud_location": "local",
    "pipeline_service_account": "",
    "pipeline_network": "",
    "pipeline_encryption_key_name": "",
    "pipeline_persistent_resource_id": "",
    "pipeline_job_resource_name": f"projects/{LOCAL_PROJECT}/locations/local/pipelineJobs/local",
}
_TIMES = (
    "pipeline_job_create_time_utc",
    "pipeline_job_schedule_time_utc",
    "pipeline_job_schedule_time_utc_placeholder",
)
_EPOCH = "1970-01-01T00:00:00Z"
_RESOLVED_BY_KFP = re.compile(
    r"inputs\.(?!.*json_escape)|outputs\.|outputMetadataUri$|pipeline_root$|workspace_path$"
    r"|pipeline_(job|task)_(name|uuid)$"
)
_PLACEHOLDER = re.compile(r"\{\{\$\.(.*?)\}\}")

#: Keys of the IR below which the backend resolves every string.
_VALUE_KEYS = frozenset({"defaultValue", "runtimeValue", "executors"})


def localize(
    spec: dict[str, Any], *, created: str = _EPOCH, job_options: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns a pipeline that kfp.local can run on this machine.

    Args:
        spec: The compiled pipeline (IR), which is not changed.
        created: Time at which the run was created and scheduled (RFC 3339, UTC).
        job_options: Options of the stubs, --network and --inject.

    Raises:
        PipelineError: When a placeholder has no meaning on this machine, or a name cannot be a file name.
    """
    _check_names(spec)
    local: dict[str, Any] = localize_value(spec, created=created, is_value=False)
    for executor in local["deploymentSpec"]["executors"].values():
        container = mapping_at(executor, "container")
        if not container:
            continue
        command = list_at(container, "command")
        if name := stub_name(container):
            command = [*_STUB_COMMAND, name, MARKER, *job_options, "--executor_input", "{{$}}"]
        elif any(EXECUTOR in part for part in [*command, *list_at(container, "args")]):
            command = split_installation(command)[1]
        else:
            command = [*_STUB_COMMAND, "Container", MARKER, "{{$}}", *command]
        container["command"] = command
    _adapt_tasks(local, spec)
    for component in (local["root"], *local["components"].values()):
        if "dag" in component:
            for declaration in mapping_at(component, "inputDefinitions", "parameters").values():
                if declaration.get("isOptional"):
                    declaration.setdefault("defaultValue", None)  # which no task receives
    return local


def preloaded_modules(local: Mapping[str, Any]) -> list[str]:
    """Returns what the fork server of a localized pipeline imports; nothing where it can fork no task."""
    executors = local["deploymentSpec"]["executors"].values()
    if not any(process.forkable_program(list_at(one, "container", "command")) for one in executors):
        return []
    return [*_PRELOADED, *sorted({*_IMPORTED.findall(json.dumps(local))})]


def stub_name(container: Mapping[str, Any]) -> str:
    """Returns the name of the stub for the launcher that a container runs; "" for none."""
    return name if (name := launcher_type(container)) in launcher_stubs.STUBS else ""


def _adapt_tasks(local: dict[str, Any], spec: dict[str, Any]) -> None:
    """Adds dependencies on tasks whose outputs a task takes, as compilers do not; retries do not wait."""
    executors = spec["deploymentSpec"]["executors"]
    for _, task in all_tasks(local):
        producers = set(re.findall(r'"producerTask": "([^"]+)"', json.dumps(task.get("inputs", {}))))
        if not producers <= {*list_at(task, "dependentTasks")}:
            task["dependentTasks"] = sorted(producers.union(list_at(task, "dependentTasks")))
        used = local["components"].get(task["componentRef"]["name"], {})
        executor = executors.get(used.get("executorLabel"), {})
        if _is_custom_job(executor) and "retryPolicy" in task:
            task["retryPolicy"]["backoffDuration"] = "0s"
        elif any("shardline.components" in part for part in list_at(executor, "container", "command")):
            task.pop("retryPolicy", None)
        adapt_condition(task)


def _check_names(spec: dict[str, Any]) -> None:
    """Refuses names of tasks and outputs that cannot be parts of paths in the run directory."""
    named = [("task", name) for name, _ in all_tasks(spec)]
    for component in (spec["root"], *spec["components"].values()):
        outputs = component.get("outputDefinitions", {})
        named += [("output", name) for kind in ("artifacts", "parameters") for name in outputs.get(kind, {})]
    for what, name in named:
        if not re.fullmatch(r"\w[\w .-]{0,127}", name):
            raise PipelineError(
                f"the name of the {what} {name!r} cannot be a file name on this machine; use letters, "
                "digits, '_' and '-', as the compiler does"
            )


def has_custom_jobs(spec: dict[str, Any]) -> bool:
    """Whether a compiled pipeline has a task that is a custom job."""
    return any(_is_custom_job(executor) for executor in spec["deploymentSpec"]["executors"].values())


def _is_custom_job(executor: Any) -> bool:
    return stub_name(mapping_at(executor, "container")) == "CustomJob"


def localize_value(value: Any, *, created: str = _EPOCH, is_value: bool = True) -> Any:
    """Returns a copy of a parameter's value with the platform's placeholders replaced by local values.

    `is_value` is False for a part of the IR, in which only what is below _VALUE_KEYS are values. Raises
    PipelineError when a placeholder has no meaning on this machine.
    """
    if isinstance(value, list):
        return [localize_value(item, created=created, is_value=is_value) for item in value]
    if isinstance(value, dict):
        return {
            key: localize_value(item, created=created, is_value=is_value or key in _VALUE_KEYS)
            for key, item in value.items()
        }
    if not isinstance(value, str) or not is_value:
        return value
    local = _LOCAL_VALUES | dict.fromkeys(_TIMES, created)
    for match in _PLACEHOLDER.finditer(value):
        if match[1] not in local and not _RESOLVED_BY_KFP.match(match[1]):
            raise PipelineError(f"the placeholder {match[0]} cannot be resolved on this machine")
    return _PLACEHOLDER.sub(lambda match: local.get(match[1], match[0]), value)


def check_runnable(spec: Mapping[str, Any]) -> None:
    """Refuses a pipeline (IR) with tasks that cannot run here; PipelineError names each of them, and why."""
    missing = [
        f"{item.where} {why}"
        for item in Pipeline(spec).executors
        if (why := _why_not_runnable(item.container))
    ]
    if missing:
        raise PipelineError(f"the pipeline cannot run here: {'; '.join(missing)}")


def _why_not_runnable(container: Mapping[str, Any]) -> str:
    """Returns why a container's command cannot run here; "" where it can."""
    image = container.get("image", "")
    if stub_name(container):
        return ""
    packages, command = split_installation(list_at(container, "command"))
    argv = [*command, *list_at(container, "args")]
    if any(part.startswith("google_cloud_pipeline_components.container") for part in argv):
        return "calls the platform through a launcher of Google's that has no stub here"
    if command[:3] == ["python3", "-m", EXECUTOR]:
        return f"has its code in the image {image} only"
    if any(EXECUTOR in part for part in argv):
        missing = [text for text in packages if not _is_installed(text)]
        return f"needs {', '.join(missing)}: pip install it first" if missing else ""
    if not command:
        return f"runs the entry point of the image {image}, which is not known here"
    is_installed = shutil.which(command[0])
    return "" if is_installed else f"runs {command[0]} of the image {image}, which is not on this machine"


def _is_installed(requirement: str) -> bool:
    """Whether a requirement is met; KFP counts as installed, in the release that runs the pipeline."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        parsed = Requirement(requirement)
        if parsed.name == "kfp" or (parsed.marker and not parsed.marker.evaluate()):
            return True
        return parsed.specifier.contains(importlib.metadata.version(parsed.name), prereleases=True)
    except (InvalidRequirement, importlib.metadata.PackageNotFoundError):
        return False
