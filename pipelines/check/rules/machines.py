"""Rules about machine types, accelerators and disks, and the tables of what Vertex AI training offers."""

from __future__ import annotations

import datetime
import re

from shardline.components.vertex.payload import is_surely_missing, literal_string, mapping_at, whole_number
from shardline.components.vertex.pools import BOOT_DISK_TYPES, TPU_FAMILIES
from shardline.pipelines.check.job import Pool
from shardline.pipelines.check.pipeline import Aim, Executor
from shardline.pipelines.check.registry import Found, rules
from shardline.trainer.base.deserialize import did_you_mean

#: Source of the tables, with the date on which it was read.
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
#: Machine types with built-in accelerators: type and number.
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
_SMALL_GPUS = ("NVIDIA_TESLA_P4", "NVIDIA_TESLA_P100", "NVIDIA_TESLA_T4")
_SMALL: dict[str, tuple[int, ...]] = dict.fromkeys(_SMALL_GPUS, (1, 2, 4))
_LARGE: dict[str, tuple[int, ...]] = dict.fromkeys(_SMALL_GPUS, (2, 4))
#: Accelerators that an N1 machine takes, by its vCPUs: type and numbers.
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
MACHINE_TYPES = {*_PLAIN, *BUILT_IN, *_N1}
ACCELERATORS = {
    *_SMALL,
    "NVIDIA_TESLA_V100",
    *(name for name, _ in BUILT_IN.values()),
    # Further values of google.cloud.aiplatform_v1.types.AcceleratorType.
    "NVIDIA_TESLA_K80",
    "TPU_V2",
    "TPU_V3",
    "TPU_V4_POD",
    "TPU_V5_LITEPOD",
}

#: End of support of accelerators; according to the API's reference, the K80's has passed.
END_OF_SUPPORT = {
    "NVIDIA_TESLA_K80": datetime.date.min,
    "NVIDIA_TESLA_P100": datetime.date(2026, 9, 15),
}


def allowed(machine: str) -> dict[str, tuple[int, ...]]:
    """Returns the accelerators that a machine type takes, with the allowed numbers of each."""
    if machine in BUILT_IN:
        kind, count = BUILT_IN[machine]
        return {kind: (count,)}
    return dict(_N1.get(machine, {}))


@rules(Pool)
def machines(pool: Pool) -> Found:
    """Machine types and boot disks.

    SL111 error: A worker pool has a machine type.
        Fix: set machine_spec.machine_type, for example n1-standard-8
        Source: MachineSpec.
    SL112 error: Vertex AI training offers the machine type.
        Fix: use a machine type that Vertex AI training offers
        Source: training/configure-compute.
    SL121 error: A boot disk is pd-ssd, pd-standard or hyperdisk-balanced.
        Fix: use pd-ssd, pd-standard or hyperdisk-balanced
        Source: training/configure-compute.
    SL122 error: A boot disk has 100 to 64,000 GB.
        Fix: set boot_disk_size_gb to a number from 100 to 64000
        Source: training/configure-compute.
    """
    if is_surely_missing(pool.spec, "machine_spec", "machine_type"):
        yield "SL111", "the pool has no machine_type"
    machine = pool.machine_type
    if machine and machine not in MACHINE_TYPES and not machine.startswith(TPU_FAMILIES):
        hint = did_you_mean(machine, MACHINE_TYPES, after="; ")
        yield "SL112", f"machine_type {machine} is not in the list ({TABLE}){hint}"
    disk = mapping_at(pool.spec, "disk_spec")
    kind, size = literal_string(disk.get("boot_disk_type")), whole_number(disk.get("boot_disk_size_gb"))
    if kind and kind not in BOOT_DISK_TYPES:
        yield "SL121", f"boot_disk_type {kind!r} does not exist"
    if size is not None and not 100 <= size <= 64_000:
        yield "SL122", f"boot_disk_size_gb is {size}"


@rules(Pool)
def accelerators(pool: Pool) -> Found:
    """Accelerators of a machine. The launcher drops a count of 0.

    SL113 error: The API knows the accelerator type.
        Fix: use a type such as NVIDIA_TESLA_T4 or NVIDIA_L4
        Source: AcceleratorType.
    SL114 error: Accelerator type and count are set together.
        Fix: set both accelerator_type and accelerator_count, or neither
        Source: MachineSpec; the launcher drops 0.
    SL115 error: The machine type takes the accelerator.
        Fix: use a machine type of the accelerator's family, or N1 with a T4, P4 or V100
        Source: training/configure-compute.
    SL116 error: The machine type takes this number of accelerators.
        Fix: use a number that the machine type takes
        Source: training/configure-compute.
    SL117 error: A machine type with built-in accelerators names them.
        Fix: set accelerator_type and accelerator_count to the built-in ones
        Source: training/configure-compute.
    SL118 warning: The accelerator is still supported.
        Fix: use a supported one, such as NVIDIA_TESLA_T4 or NVIDIA_L4
        Source: AcceleratorType; training/configure-compute.
    """
    machine, kind, count = pool.machine_type, pool.accelerator_type, pool.machine.get("accelerator_count")
    if kind and kind not in ACCELERATORS:
        hint = did_you_mean(kind.upper(), ACCELERATORS, after="; ")
        yield "SL113", f"accelerator_type {kind} does not exist{hint}"
    if count and not pool.machine.get("accelerator_type"):
        yield "SL114", f"accelerator_count is {count} and there is no accelerator_type"
    elif kind and not count:
        yield "SL114", f"accelerator_type is {kind} and there is no accelerator_count"
    fitting = allowed(machine)
    if machine in MACHINE_TYPES and kind in ACCELERATORS and kind not in fitting:
        takes = ", ".join(sorted(fitting)) or "no accelerators"
        yield "SL115", f"{kind} cannot be attached to {machine}, which takes {takes} ({TABLE})"
    numbers, number = fitting.get(kind), whole_number(count)
    if numbers and number and number not in numbers:
        yield "SL116", f"{machine} takes {' or '.join(map(str, numbers))} {kind}, not {number} ({TABLE})"
    if machine in BUILT_IN and is_surely_missing(pool.machine, "accelerator_type"):
        built_in, number = BUILT_IN[machine]
        yield "SL117", f"{machine} has {number} {built_in} built in, which the pool does not name"
    if datetime.date.today() >= END_OF_SUPPORT.get(kind, datetime.date.max):
        yield "SL118", f"{kind} has reached the end of its support"


@rules(Executor)
def resources_of_tasks(executor: Executor) -> Found:
    """Accelerators, cores and memory of a task's own container.

    SL123 error: The API knows a task's accelerator type.
        Fix: use a type such as NVIDIA_TESLA_T4, with a count
        Source: pipelines/machine-types.
    SL126 error: A task requests at most 96 cores and 624 GB.
        Fix: request at most 96 cores and 624G, or split the work over more tasks
        Source: pipelines/machine-types.
    """
    if executor.task and executor.task.pipeline.aim is Aim.HERE and executor.task.pipeline.given is not None:
        return  # a local task uses this machine
    limits = mapping_at(executor.container, "resources")
    for name, units, most, words in (
        ("resourceCpuLimit", {"": 1.0, "m": 1e-3}, 96, "cores"),
        ("resourceMemoryLimit", _GIGABYTES, 624, "of memory"),
    ):
        amount = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-zA-Z]*)", str(limits.get(name) or ""))
        if amount and float(amount[1]) * units.get(amount[2], 0) > most:
            yield "SL126", f"the task asks for {amount[0]} {words}"
    found = mapping_at(limits, "accelerator")
    kind = str(found.get("resourceType") or found.get("type") or "")
    if kind and kind not in ACCELERATORS and "{{$" not in kind:
        yield "SL123", f"accelerator type {kind} does not exist on Vertex AI"


#: Gigabytes of the units of an amount of memory, such as "32G".
_GIGABYTES = {
    **{unit: 1000.0**power / 1e9 for power, unit in enumerate(("", "K", "M", "G", "T"))},
    **{f"{unit}i": 1024.0**power / 1e9 for power, unit in enumerate("KMGT", 1)},
}
