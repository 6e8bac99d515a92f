"""Rules about machine types, accelerators and disks."""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Iterator

from shardline.pipelines.check.ir import at, known_text, lacks, whole
from shardline.pipelines.check.job import Job, Pool
from shardline.pipelines.check.machine_types import (
    ACCELERATORS,
    BUILT_IN,
    END_OF_SUPPORT,
    MACHINE_TYPES,
    TABLE,
    TPU_FAMILIES,
    TPU_TOPOLOGIES,
    allowed,
)
from shardline.pipelines.check.pipeline import Executor
from shardline.pipelines.check.registry import error, warning


def is_tpu(pool: Pool) -> bool:
    """Whether the replicas of a pool are TPU VMs."""
    return pool.accelerator_type.startswith("TPU_") or pool.machine_type.startswith(TPU_FAMILIES)


@error("SL111", Pool, fix="give the pool a machine_type, for example n1-standard-8")
def pool_has_machine(pool: Pool) -> Iterator[str]:
    """Every worker pool names its machine type.

    Source: google.cloud.aiplatform_v1.types.MachineSpec: machine_type is required in a WorkerPoolSpec.
    """
    if lacks(pool.spec, "machine_spec", "machine_type"):
        yield "the pool has no machine_type"


@error("SL112", Pool, fix="take a machine type that Vertex AI training has")
def machine_is_known(pool: Pool) -> Iterator[str]:
    """A machine type is one that Vertex AI training has.

    Source: docs.cloud.google.com, training/configure-compute, "Machine types".
    """
    found = pool.machine_type
    if found and found not in MACHINE_TYPES and not found.startswith(TPU_FAMILIES):
        near = difflib.get_close_matches(found, sorted(MACHINE_TYPES), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield f"machine_type {found} is not in the list ({TABLE}){hint}"


@error("SL113", Pool, fix="take one of the API's accelerator types: NVIDIA_TESLA_T4, NVIDIA_L4, ...")
def accelerator_is_known(pool: Pool) -> Iterator[str]:
    """An accelerator type is one that the API has.

    Source: google.cloud.aiplatform_v1.types.AcceleratorType.
    """
    found = pool.accelerator_type
    if found and found not in ACCELERATORS:
        near = difflib.get_close_matches(found.upper(), sorted(ACCELERATORS), n=1)
        yield f"accelerator_type {found} does not exist{f'; did you mean {near[0]}?' if near else ''}"


@error("SL114", Pool, fix="give accelerator_type and accelerator_count both, or neither")
def accelerator_is_complete(pool: Pool) -> Iterator[str]:
    """Accelerator type and count go together.

    Source: google.cloud.aiplatform_v1.types.MachineSpec; the launcher drops a count of zero.
    """
    count = pool.machine.get("accelerator_count")
    kind = pool.machine.get("accelerator_type")
    if count and not kind:
        yield f"accelerator_count is {count} and there is no accelerator_type"
    elif pool.accelerator_type and not count:
        yield f"accelerator_type is {kind} and there is no accelerator_count"


@error("SL115", Pool, fix="take a machine type of the accelerator's own family, or N1 with a T4, P4 or V100")
def accelerator_fits_machine(pool: Pool) -> Iterator[str]:
    """An accelerator can be attached to the machine type.

    Source: docs.cloud.google.com, training/configure-compute, "Valid numbers of GPUs for each machine type".
    """
    machine, kind = pool.machine_type, pool.accelerator_type
    if machine not in MACHINE_TYPES or kind not in ACCELERATORS:
        return
    fitting = sorted(allowed(machine))
    if kind not in fitting:
        yield (
            f"{kind} cannot be attached to {machine}, which takes {', '.join(fitting) or 'no accelerators'} "
            f"({TABLE})"
        )


@error("SL116", Pool, fix="take a number of accelerators that the machine type allows")
def accelerator_count_fits_machine(pool: Pool) -> Iterator[str]:
    """A machine type has that many accelerators.

    Source: docs.cloud.google.com, training/configure-compute, "Valid numbers of GPUs for each machine type".
    """
    numbers = allowed(pool.machine_type).get(pool.accelerator_type)
    count = whole(pool.machine.get("accelerator_count"))
    if numbers and count and count not in numbers:
        listing = " or ".join(map(str, numbers))
        yield f"{pool.machine_type} takes {listing} {pool.accelerator_type}, not {count} ({TABLE})"


@error("SL117", Pool, fix="add the accelerator_type and accelerator_count that belong to the machine type")
def built_in_accelerator_is_named(pool: Pool) -> Iterator[str]:
    """A machine type with built-in accelerators is given with them.

    Source: docs.cloud.google.com, training/configure-compute: types with an asterisk "must be used with
    certain GPUs or TPUs".
    """
    built_in = BUILT_IN.get(pool.machine_type)
    if built_in and lacks(pool.machine, "accelerator_type"):
        yield f"{pool.machine_type} is given without its {built_in[1]} {built_in[0]}"


@warning("SL118", Pool, fix="move to an accelerator that is supported: NVIDIA_TESLA_T4, NVIDIA_L4, ...")
def accelerator_is_supported(pool: Pool) -> Iterator[str]:
    """An accelerator has not reached the end of its support.

    Source: google.cloud.aiplatform_v1.types.AcceleratorType (K80); docs.cloud.google.com,
    training/configure-compute: "P100 GPUs reach end of support on September 15, 2026".
    """
    end = END_OF_SUPPORT.get(pool.accelerator_type)
    if end and datetime.date.today() >= end:
        yield f"{pool.accelerator_type} has reached the end of its support"


@error("SL119", Job, fix="use one worker pool with one replica, and choose the slice by its topology")
def tpu_is_one_replica(job: Job) -> Iterator[str]:
    """TPUs have one worker pool with one replica.

    Source: docs.cloud.google.com, training/configure-compute, "TPUs".
    """
    replicas = sum(pool.replica_count or 1 for pool in job.pools)
    if replicas > 1 and any(is_tpu(pool) for pool in job.pools):
        yield f"a TPU job has {replicas} replicas in {len(job.pools)} worker pools"


@error("SL120", Pool, fix="set machine_spec.tpu_topology to a topology of the machine type")
def tpu_topology_fits_machine(pool: Pool) -> Iterator[str]:
    """A TPU machine type is given with one of its topologies.

    Source: docs.cloud.google.com, training/configure-compute, "TPU v5e" and "TPU v6e".
    """
    topologies = TPU_TOPOLOGIES.get(pool.machine_type)
    found = pool.machine.get("tpu_topology")
    if topologies and found not in topologies and "{{$" not in str(found):
        yield f"{pool.machine_type} has the topologies {', '.join(topologies)}, not {found!r}"


@error("SL121", Pool, fix="take pd-ssd, pd-standard or hyperdisk-balanced")
def disk_type_is_known(pool: Pool) -> Iterator[str]:
    """A boot disk's type is one that the API has.

    Source: docs.cloud.google.com, training/configure-compute, "Boot disk options".
    """
    found = known_text(at(pool.spec, "disk_spec").get("boot_disk_type"))
    if found and found not in ("pd-ssd", "pd-standard", "hyperdisk-balanced"):
        yield f"boot_disk_type {found!r} does not exist"


@error("SL122", Pool, fix="give boot_disk_size_gb from 100 to 64000")
def disk_size_is_possible(pool: Pool) -> Iterator[str]:
    """A boot disk has 100 to 64,000 GB.

    Source: docs.cloud.google.com, training/configure-compute, "Boot disk options".
    """
    size = whole(at(pool.spec, "disk_spec").get("boot_disk_size_gb"))
    if size is not None and not 100 <= size <= 64_000:
        yield f"boot_disk_size_gb is {size}"


@error(
    "SL123", Executor, fix="take one of the API's accelerator types, NVIDIA_TESLA_T4 for example, and count"
)
def task_accelerator_is_known(executor: Executor) -> Iterator[str]:
    """A task's own accelerator is one that the API has.

    Source: docs.cloud.google.com, pipelines/machine-types: set_accelerator_type takes the API's names.
    """
    found = at(executor.container, "resources", "accelerator")
    kind = str(found.get("resourceType") or found.get("type") or "")
    if kind and kind not in ACCELERATORS and "{{$" not in kind:
        yield f"accelerator type {kind} does not exist on Vertex AI"
