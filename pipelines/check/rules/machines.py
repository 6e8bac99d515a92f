"""Rules about machine types, accelerators and disks.

The machine types of Vertex AI training, and the accelerators that each of them takes.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Iterator

from shardline.components.vertex.payload import at, known_text, lacks, whole
from shardline.pipelines.check.job import Job, Pool
from shardline.pipelines.check.pipeline import Executor
from shardline.pipelines.check.registry import error, warning

#: Where the tables are from, and when they were read.
TABLE = "docs.cloud.google.com, training/configure-compute, read on 2026-11-20"


def _types(family: str, sizes: str) -> list[str]:
    return [f"{family}-{size}" for size in sizes.split()]


#: Machine types that take no accelerators.
_PLAIN = {
    *_types("e2-standard", "4 8 16 32"),
    *_types("e2-highmem", "2 4 8 16"),
    *_types("e2-highcpu", "16 32"),
    *_types("n4-standard", "2 4 8 16 32 48 64 80"),
    *_types("n4-highmem", "2 4 8 16 32 48 64 80"),
    *_types("n4-highcpu", "2 4 8 16 32 48 64 80"),
    *_types("n2-standard", "4 8 16 32 48 64 80"),
    *_types("n2-highmem", "2 4 8 16 32 48 64 80"),
    *_types("n2-highcpu", "16 32 48 64 80"),
    *_types("c2-standard", "4 8 16 30 60"),
    *_types("m1", "ultramem-40 ultramem-80 ultramem-160 megamem-96"),
}
#: Machine types that have their accelerators built in: which, and how many.
BUILT_IN = {
    "a4x-highgpu-4g": ("NVIDIA_GB200", 4),
    "a4-highgpu-8g": ("NVIDIA_B200", 8),
    "a3-ultragpu-8g": ("NVIDIA_H200_141GB", 8),
    "a3-megagpu-8g": ("NVIDIA_H100_MEGA_80GB", 8),
    **{f"a3-highgpu-{n}g": ("NVIDIA_H100_80GB", n) for n in (1, 2, 4, 8)},
    **{f"a2-ultragpu-{n}g": ("NVIDIA_A100_80GB", n) for n in (1, 2, 4, 8)},
    **{f"a2-highgpu-{n}g": ("NVIDIA_TESLA_A100", n) for n in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("NVIDIA_TESLA_A100", 16),
    **{f"g2-standard-{size}": ("NVIDIA_L4", 1) for size in (4, 8, 12, 16, 32)},
    "g2-standard-24": ("NVIDIA_L4", 2),
    "g2-standard-48": ("NVIDIA_L4", 4),
    "g2-standard-96": ("NVIDIA_L4", 8),
    **{f"g4-standard-{48 * n}": ("NVIDIA_RTX_PRO_6000", n) for n in (1, 2, 4, 8)},
}
_SMALL: dict[str, tuple[int, ...]] = {
    "NVIDIA_TESLA_P4": (1, 2, 4),
    "NVIDIA_TESLA_P100": (1, 2, 4),
    "NVIDIA_TESLA_T4": (1, 2, 4),
}
_LARGE: dict[str, tuple[int, ...]] = {name: (2, 4) for name in _SMALL}  # noqa: C420  # its type is another
#: What can be attached to an N1 machine, by its vCPUs: type and numbers.
_ATTACHED: dict[int, dict[str, tuple[int, ...]]] = {
    **{cpus: _SMALL | {"NVIDIA_TESLA_V100": (1, 2, 4, 8)} for cpus in (2, 4, 8)},
    16: _SMALL | {"NVIDIA_TESLA_V100": (2, 4, 8)},
    32: _LARGE | {"NVIDIA_TESLA_V100": (4, 8)},
    **{
        cpus: {"NVIDIA_TESLA_P4": (4,), "NVIDIA_TESLA_T4": (4,), "NVIDIA_TESLA_V100": (8,)}
        for cpus in (64, 96)
    },
}
_N1 = {
    **{f"n1-standard-{cpus}": _ATTACHED[cpus] for cpus in (4, 8, 16, 32, 64, 96)},
    **{f"n1-highmem-{cpus}": _ATTACHED[cpus] for cpus in (2, 4, 8, 16, 32, 64, 96)},
    **{f"n1-highcpu-{cpus}": _ATTACHED[cpus] for cpus in (16, 32, 64, 96)},
    # The one N1 machine of 64 vCPUs that 4 P100 have enough memory for.
    "n1-highcpu-64": _ATTACHED[64] | {"NVIDIA_TESLA_P100": (4,)},
}
_TPU_SLICES = ("2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
#: TPU machine types and their topologies.
TPU_TOPOLOGIES = {
    f"{family}-{size}t": topologies
    for family in ("ct5lp-hightpu", "ct6e-standard")
    for size, topologies in ((1, ("1x1",)), (4, ("2x2", *_TPU_SLICES)), (8, ("2x4",)))
}
#: TPU7x has machine types of its own, which the tables do not list.
TPU_FAMILIES = ("cloud-tpu", "ct5lp-", "ct6e-", "tpu7x-")

MACHINE_TYPES = {*_PLAIN, *BUILT_IN, *_N1, *TPU_TOPOLOGIES, "cloud-tpu"}
ACCELERATORS = {
    *_SMALL,
    "NVIDIA_TESLA_V100",
    *(name for name, _ in BUILT_IN.values()),
    # google.cloud.aiplatform_v1.types.AcceleratorType has these besides.
    "NVIDIA_TESLA_K80",
    "TPU_V2",
    "TPU_V3",
    "TPU_V4_POD",
    "TPU_V5_LITEPOD",
}
#: When an accelerator's support ends; that of the K80 has ended, says the API's own reference.
END_OF_SUPPORT = {
    "NVIDIA_TESLA_K80": datetime.date.min,
    "NVIDIA_TESLA_P100": datetime.date(2026, 9, 15),
}


def allowed(machine: str) -> dict[str, tuple[int, ...]]:
    """Returns the accelerators that a machine type takes, and the numbers of each."""
    if machine in BUILT_IN:
        kind, count = BUILT_IN[machine]
        return {kind: (count,)}
    if machine.startswith("ct5lp-"):
        return {"TPU_V5_LITEPOD": ()}
    if machine == "cloud-tpu":
        # 8 for one TPU, a multiple of 32 for a pod.
        return {name: (8, *range(32, 4097, 32)) for name in ("TPU_V2", "TPU_V3")}
    return dict(_N1.get(machine, {}))


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
