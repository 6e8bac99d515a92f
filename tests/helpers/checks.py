"""Small pipelines to check: right as they are, and wrong in one place where a test says so."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

from shardline.pipelines.check import Finding, Pipeline, Schedule, Target, check_pipeline

CONTAINER = {"image_uri": "registry/trainer:1", "command": ["python3", "-m", "shardline.trainer.task"]}


def check_spec(
    spec: dict[str, Any],
    parameters: dict[str, Any] | None = None,
    schedule: Schedule | None = None,
    target: Target = Target.UNKNOWN,
) -> list[Finding]:
    """Returns what is wrong with a pipeline."""
    return check_pipeline(Pipeline(spec, parameters, target=target), schedule)


def codes(spec: dict[str, Any], **context: Any) -> set[str]:
    """Returns the codes of what is wrong with a pipeline."""
    return {finding.code for finding in check_spec(spec, **context)}


def task(
    name: str = "step", *, parameters: Any = None, artifacts: Any = None, **fields: Any
) -> dict[str, dict[str, Any]]:
    """Returns a task of the component `name` with constants as parameters."""
    inputs = {
        "parameters": {
            key: value if isinstance(value, dict) and "componentInputParameter" in value else constant(value)
            for key, value in (parameters or {}).items()
        },
        "artifacts": artifacts or {},
    }
    return {name: {"componentRef": {"name": f"comp-{name}"}, "inputs": inputs, **fields}}


def constant(value: Any) -> dict[str, Any]:
    return {"runtimeValue": {"constant": value}}


def component(
    name: str = "step", *, inputs: Any = None, outputs: Any = None, **container: Any
) -> dict[str, Any]:
    """Returns a component and its executor; inputs by name: a type, or a whole declaration."""
    declared = {
        key: value if isinstance(value, dict) else {"parameterType": value}
        for key, value in (inputs or {}).items()
    }
    return {
        "component": {
            f"comp-{name}": {
                "executorLabel": f"exec-{name}",
                "inputDefinitions": {"parameters": declared},
                "outputDefinitions": outputs or {},
            }
        },
        "executor": {
            f"exec-{name}": {"container": {"image": "python:3.11", "command": ["run"], **container}}
        },
    }


def pipeline(
    *parts: dict[str, Any], tasks: Any = None, parameters: Any = None, **spec: Any
) -> dict[str, Any]:
    """Returns a pipeline of components; one component and its task unless they are given."""
    parts = parts or (component(),)
    declared = {
        key: value if isinstance(value, dict) else {"parameterType": value}
        for key, value in (parameters or {}).items()
    }
    return {
        "pipelineInfo": {"name": "toy"},
        "schemaVersion": "2.1.0",
        "components": {name: value for part in parts for name, value in part["component"].items()},
        "deploymentSpec": {
            "executors": {name: value for part in parts for name, value in part["executor"].items()}
        },
        "root": {
            "inputDefinitions": {"parameters": declared},
            "dag": {"tasks": task() if tasks is None else tasks},
        },
        **spec,
    }


def pool(
    machine_type: str = "n1-standard-8", *, machine: Any = None, container: Any = None, **spec: Any
) -> Any:
    """Returns a worker pool of one replica."""
    return {
        "machine_spec": {"machine_type": machine_type, **(machine or {})},
        "container_spec": {**CONTAINER, **(container or {})},
        "replica_count": 1,
        **spec,
    }


def gpu_pool(machine_type: str, accelerator_type: str, count: int, **spec: Any) -> Any:
    """Returns a worker pool whose machines have accelerators."""
    machine = {"accelerator_type": accelerator_type, "accelerator_count": count}
    return pool(machine_type, machine=machine, **spec)


def job(*pools: Any, extra_inputs: Any = None, **fields: Any) -> dict[str, Any]:
    """Returns a pipeline of one CustomTrainingJobOp, as google_cloud_pipeline_components compiles it.

    Args:
        *pools: Worker pools; one of one replica unless given.
        extra_inputs: Values of further parameters of the component.
        **fields: Parameters of CustomTrainingJobOp.
    """
    spec = copy.deepcopy(_custom_training_job())
    only = spec["root"]["dag"]["tasks"]["custom-training-job"]
    values = {
        "display_name": "train",
        "worker_pool_specs": list(pools) or [pool()],
        "restart_job_on_worker_restart": True,
        **fields,
        **(extra_inputs or {}),
    }
    only["inputs"] = {"parameters": {name: constant(value) for name, value in values.items()}}
    declared = spec["components"]["comp-custom-training-job"]["inputDefinitions"]["parameters"]
    declared.update({name: {"parameterType": "STRING"} for name in extra_inputs or {}})
    return spec


def raw_job(**payload: Any) -> dict[str, Any]:
    """Returns a pipeline of one custom job with this payload, which has no placeholders."""
    spec = job()
    args = spec["deploymentSpec"]["executors"]["exec-custom-training-job"]["container"]["args"]
    args[args.index("--payload") + 1] = json.dumps({"display_name": "train", **payload})
    return spec


@functools.cache
def _custom_training_job() -> dict[str, Any]:
    from google.protobuf import json_format
    from google_cloud_pipeline_components.v1.custom_job import CustomTrainingJobOp

    spec: dict[str, Any] = json_format.MessageToDict(CustomTrainingJobOp.pipeline_spec)
    spec["root"].pop("inputDefinitions")
    spec["root"].pop("outputDefinitions", None)
    spec["root"]["dag"].pop("outputs", None)
    return spec
