"""Devices: what this machine computes on, in words, and whether it is what its worker pool was given."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections import Counter
from collections.abc import Mapping

import tensorflow as tf

from shardline.trainer import progress
from shardline.trainer.cluster.cluster import ACCELERATORS_VARIABLE, Cluster
from shardline.trainer.errors import RunError, SettingsError, ShardlineError

# The driver's library, which the platform mounts into the container, and where.
_DRIVER, _MOUNTED = "libcuda.so.1", "/usr/local/nvidia/lib64"
# A library of CUDA that comes with the image, and with the gpu variant alone.
_CUDA = "nvidia-cudnn-cu12"


def announce(cluster: Cluster, environ: Mapping[str, str]) -> None:
    """Says what this machine computes on, on the chief and wherever it is no CPU, and checks it."""
    found = described()
    if cluster.is_chief or not found.startswith("CPU"):
        progress.say("train", f"device: {found}")
    check(environ)


def described() -> str:
    """Returns the devices in words: "2 GPUs, Tesla T4", or "CPU, 8 cores"."""
    gpus = tf.config.list_physical_devices("GPU")
    if tpus := tf.config.list_physical_devices("TPU"):
        return f"{len(tpus)} TPU device{'s' * (len(tpus) > 1)}"
    if not gpus:
        cores = len(os.sched_getaffinity(0))
        return f"CPU, {cores} core{'s' * (cores > 1)}"
    details = (tf.config.experimental.get_device_details(gpu) for gpu in gpus)
    models = Counter(str(found.get("device_name", "of an unknown model")) for found in details)
    if len(models) == 1:
        return f"{_gpus(len(gpus))}, {next(iter(models))}"
    return f"{_gpus(len(gpus))}: {', '.join(f'{count} {model}' for model, count in models.items())}"


def check(environ: Mapping[str, str]) -> None:
    """Refuses a machine on which TensorFlow sees fewer GPUs than the worker pool was given.

    A TPU is looked for by its strategy.

    Raises:
        SettingsError: When the image cannot use any GPU.
        RunError: When it can: another machine may have what this one lacks.
    """
    count, _, kind = environ.get(ACCELERATORS_VARIABLE, "").partition(" ")
    if not count.isdecimal() or kind.startswith("TPU"):
        return
    seen = len(tf.config.list_physical_devices("GPU"))
    if seen < int(count):
        found = _gpus(seen) if seen else "no GPU"
        error, reason = _reason(seen)
        raise error(f"this machine was to have {count} {kind}, and TensorFlow sees {found}: {reason}")


def asks_for_tpu(environ: Mapping[str, str]) -> bool:
    """Whether the worker pool was given TPUs."""
    return environ.get(ACCELERATORS_VARIABLE, "").partition(" ")[2].startswith("TPU")


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


def _reason(seen: int) -> tuple[type[ShardlineError], str]:
    """Says whose fault it is that there are no more, why that may be, and what to do."""
    if seen:
        return RunError, (
            "another machine may have them all; see CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES, or take "
            "the machine's own number of them"
        )
    try:
        importlib.metadata.version(_CUDA)
    except importlib.metadata.PackageNotFoundError:
        return SettingsError, (
            f"the image has no CUDA ({_CUDA}): it is the cpu variant; build and name the gpu variant"
        )
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        path = os.environ.get("LD_LIBRARY_PATH", "")
        if _MOUNTED in path.split(os.pathsep):
            return RunError, f"the driver's {_DRIVER} is not in {_MOUNTED}: another machine may have one"
        return SettingsError, (
            f"the driver's {_DRIVER} is not found; LD_LIBRARY_PATH is {path!r} and must hold its directory, "
            f"{_MOUNTED} on the platform"
        )
    return RunError, (
        "the driver is there, and another machine may have what it drives; it may be too old for this CUDA, "
        "or CUDA_VISIBLE_DEVICES hides the GPUs"
    )
