"""What the documentation says of a CustomJob, as the API would check it when a job is created.

Sources: the comments in google/cloud/aiplatform/v1/custom_job.proto and machine_resources.proto, and
https://cloud.google.com/vertex-ai/docs/training/distributed-training, .../schedule-jobs-dws,
.../tensorboard-training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from google.cloud.aiplatform_v1.types import AcceleratorType, Scheduling

_SEVEN_DAYS_S = 604_800
_NAMES = {
    "network": r"projects/\d+/global/networks/[^/]+",
    "tensorboard": r"projects/[^/]+/locations/[^/]+/tensorboards/\d+",
}
_KEY = r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+"


def faults(job: Any) -> Iterator[str]:
    """Yields what is wrong with a CustomJob (protobuf), each fault beginning with the field's name."""
    if not 1 <= len(job.display_name) <= 128:
        yield "display_name: must have 1 to 128 characters"
    for key, value in job.labels.items():
        if not re.fullmatch(r"[^\W\d_][\w-]{0,62}", key) or key != key.lower():
            yield f"labels: invalid key {key!r}"
        if not re.fullmatch(r"[\w-]{0,63}", value) or value != value.lower():
            yield f"labels: invalid value {value!r}"
    key = job.encryption_spec.kms_key_name
    if key and not re.fullmatch(_KEY, key):
        yield "encryption_spec.kms_key_name: no such form of name"
    yield from spec_faults(job.job_spec)


def spec_faults(spec: Any) -> Iterator[str]:
    """Yields what is wrong with a CustomJobSpec (protobuf)."""
    yield from _of_pools(spec)
    yield from _of_scheduling(spec)
    yield from _of_connections(spec)


def _of_pools(spec: Any) -> Iterator[str]:
    pools = spec.worker_pool_specs
    if not 1 <= len(pools) <= 4:
        yield f"job_spec.worker_pool_specs: must be 1 to 4, got {len(pools)}"
    for index, pool in enumerate(pools):
        name = f"job_spec.worker_pool_specs[{index}]"
        if index and not pool.ByteSize():
            continue  # "can be skipped by providing an empty value"
        if index == 0 and pool.replica_count != 1:
            yield f"{name}.replica_count: must be 1 for the primary replica, got {pool.replica_count}"
        elif pool.replica_count < 1:
            yield f"{name}.replica_count: must be positive"
        if not pool.WhichOneof("task"):
            yield f"{name}: container_spec or python_package_spec is required"
        yield from _of_machine(name, pool.machine_spec)
        if pool.HasField("disk_spec") and not 100 <= pool.disk_spec.boot_disk_size_gb <= 64_000:
            yield f"{name}.disk_spec.boot_disk_size_gb: must be 100 to 64000"
        env = [item.name for item in (*pool.container_spec.env, *pool.python_package_spec.env)]
        if len(env) > 100 or len(set(env)) < len(env):
            yield f"{name}.container_spec.env: at most 100 variables, each once"


def _of_machine(name: str, machine: Any) -> Iterator[str]:
    if not machine.machine_type:
        yield f"{name}.machine_spec.machine_type: is required"
    if bool(machine.accelerator_type) != (machine.accelerator_count > 0):
        kind = AcceleratorType(machine.accelerator_type).name
        yield f"{name}.machine_spec: {kind} does not go with {machine.accelerator_count} accelerators"


def _of_scheduling(spec: Any) -> Iterator[str]:
    scheduling = spec.scheduling
    timeout = scheduling.timeout.ToTimedelta().total_seconds()
    if scheduling.HasField("timeout") and timeout <= 0:
        yield "job_spec.scheduling.timeout: must be positive"
    if scheduling.strategy == Scheduling.Strategy.FLEX_START:
        if timeout > _SEVEN_DAYS_S:
            yield "job_spec.scheduling.timeout: at most 7 days with FLEX_START"
        machines = {
            pool.machine_spec.SerializeToString() for pool in spec.worker_pool_specs if pool.ByteSize()
        }
        if len(machines) > 1:
            yield "job_spec.worker_pool_specs: all machines are the same with FLEX_START"
    elif scheduling.HasField("max_wait_duration"):
        yield "job_spec.scheduling.max_wait_duration: only with FLEX_START"


def _of_connections(spec: Any) -> Iterator[str]:
    for field, form in _NAMES.items():
        value = getattr(spec, field)
        if value and not re.fullmatch(form, value):
            yield f"job_spec.{field}: {value!r} does not have the form {form}"
    if spec.network and spec.HasField("psc_interface_config"):
        yield "job_spec.network: excludes psc_interface_config"
    if spec.tensorboard and not spec.service_account:
        yield "job_spec.tensorboard: needs service_account"
    base = spec.base_output_directory.output_uri_prefix
    if base and not base.startswith("gs://"):
        yield "job_spec.base_output_directory.output_uri_prefix: must be gs://"
