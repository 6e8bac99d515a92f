"""The machine types of Vertex AI training, and the accelerators that each of them takes."""

from __future__ import annotations

import datetime

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
