"""What the documentation says of jobs, as the API would check it when one is created.

Sources: the comments in custom_job.proto, machine_resources.proto and pipeline_job.proto, and
https://cloud.google.com/vertex-ai/docs/training/distributed-training and .../schedule-jobs-dws.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from google.cloud.aiplatform_v1.types import Scheduling

_SEVEN_DAYS_S = 604_800
_NUMBER = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    **{"STRING": (str,), "NUMBER_INTEGER": _NUMBER, "NUMBER_DOUBLE": _NUMBER},
    **{"BOOLEAN": (bool,), "LIST": (list,), "STRUCT": (dict,)},
}


def label_faults(labels: Mapping[str, str]) -> Iterator[str]:
    for key, value in labels.items():
        if not re.fullmatch(r"[^\W\d_][\w-]{0,62}", key) or key != key.lower():
            yield f"labels: invalid key {key!r}"
        if not re.fullmatch(r"[\w-]{0,63}", value) or value != value.lower():
            yield f"labels: invalid value {value!r}"


def spec_faults(spec: Any) -> Iterator[str]:
    """Yields what is wrong with a CustomJobSpec (protobuf), each fault beginning with the field's name."""
    pools, scheduling = spec.worker_pool_specs, spec.scheduling
    if not 1 <= len(pools) <= 4:
        yield f"job_spec.worker_pool_specs: must be 1 to 4, got {len(pools)}"
    for index, pool in enumerate(pools):
        name = f"job_spec.worker_pool_specs[{index}]"
        if index and not pool.ByteSize():
            continue  # "can be skipped by providing an empty value"
        if pool.replica_count < 1 or (index == 0 and pool.replica_count != 1):
            yield f"{name}.replica_count: must be positive, and 1 for the primary replica"
        if not pool.WhichOneof("task") or not pool.machine_spec.machine_type:
            yield f"{name}: container_spec or python_package_spec, and machine_type are required"
        if bool(pool.machine_spec.accelerator_type) != (pool.machine_spec.accelerator_count > 0):
            yield f"{name}.machine_spec: accelerator_type and accelerator_count go together"
    if scheduling.strategy == Scheduling.Strategy.FLEX_START:
        if scheduling.timeout.ToTimedelta().total_seconds() > _SEVEN_DAYS_S:
            yield "job_spec.scheduling.timeout: at most 7 days with FLEX_START"
    elif scheduling.HasField("max_wait_duration"):
        yield "job_spec.scheduling.max_wait_duration: only with FLEX_START"
    if spec.tensorboard and not spec.service_account:
        yield "job_spec.tensorboard: needs service_account"


def pipeline_faults(job: dict[str, Any], job_id: str = "") -> Iterator[str]:
    """Yields what is wrong with a pipeline job (as JSON with the fields' own names) and its id."""
    if job_id and not re.fullmatch(r"[a-z][a-z0-9-]{0,126}", job_id):
        yield f"pipeline_job_id: {job_id!r} must match [a-z][a-z0-9-]{{0,126}}"
    yield from label_faults(job.get("labels", {}))
    config = job.get("runtime_config", {})
    output = config.get("gcs_output_directory", "")
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/.*)?", output):
        yield f"runtime_config.gcs_output_directory: must be gs://BUCKET/..., got {output!r}"
    spec = job.get("pipeline_spec", {})
    if not spec and not job.get("template_uri"):
        yield "pipeline_spec: is required where there is no template_uri"
    declared = spec.get("root", {}).get("inputDefinitions", {}).get("parameters", {})
    given = config.get("parameter_values", {})
    for name, value in given.items():
        if not _fits(value, declared.get(name, {}).get("parameterType", "")):
            yield f"runtime_config.parameter_values[{name!r}]: no such parameter, or not of {value!r}"
    for name, declaration in declared.items():
        if name not in given and "defaultValue" not in declaration and not declaration.get("isOptional"):
            yield f"runtime_config.parameter_values: {name!r} is required"


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "BOOLEAN":
        return isinstance(value, bool) and kind == "BOOLEAN"
    whole = kind != "NUMBER_INTEGER" or not isinstance(value, float) or value.is_integer()
    return whole and isinstance(value, _TYPES.get(kind, ()))
