"""Strategy: the tf.distribute strategy of a run, created before any other op, and the machine's devices."""

from __future__ import annotations

import faulthandler
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping

import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError, SettingsError
from shardline.trainer.base.plugins import installed_version
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster import ACCELERATORS_VARIABLE, ClusterConfig, without_proxy
from shardline.trainer.keras_compat import tensorflow_internals
from shardline.trainer.keras_compat.replicas import patch_keras_methods

# CUDA library that only the gpu variant of the image has.
_CUDA = "nvidia-cudnn-cu12"
_DRIVER = "/usr/local/nvidia/lib64"


def choose_strategy(settings: TrainSettings, cluster: ClusterConfig) -> str:
    """Returns the name of the strategy, with "auto" resolved.

    Parameter servers mean parameter_server, several training processes multi_worker_mirrored, several local
    devices mirrored, all else one_device. The evaluator always uses one device. Raises SettingsError when
    strategy, devices, cluster and other settings exclude each other.
    """
    name = settings.strategy
    if cluster.ps_hosts and name not in ("auto", "parameter_server"):
        raise SettingsError(
            f"strategy {name!r} uses no parameter servers, but TF_CONFIG is {cluster}; "
            "use parameter_server or auto"
        )
    if len(cluster.hosts) > 1 and name in ("one_device", "mirrored"):
        raise SettingsError(
            f"strategy {name!r} trains in one process, but {cluster.origin} has {len(cluster.hosts)}; "
            "use multi_worker_mirrored or auto"
        )
    if cluster.role == "evaluator":
        return "one_device"
    if name == "parameter_server" and not cluster.ps_hosts:
        raise SettingsError(
            "strategy parameter_server needs parameter servers, but TF_CONFIG has none: add a pool of them "
            "or use multi_worker_mirrored"
        )
    if name == "auto":
        several = settings.cpu_devices > 1 or len(tf.config.list_physical_devices("GPU")) > 1
        name = "mirrored" if several else "one_device"
        if cluster.num_workers > 1:
            name = "multi_worker_mirrored"
        if cluster.ps_hosts:
            name = "parameter_server"
    if settings.cpu_devices > 1 and name != "mirrored":
        raise SettingsError(
            f"cpu_devices {settings.cpu_devices} divides the CPU for mirrored; strategy {name} uses one CPU "
            "device a process"
        )
    _check_communication(settings.communication, name, cluster)
    check_strategy_settings(settings, name)
    return name


def check_strategy_settings(settings: TrainSettings, name: str) -> None:
    """Raises SettingsError for settings that the strategy does not support."""
    if settings.jit_compile == "on" and name != "one_device":
        raise SettingsError(
            f"jit_compile needs strategy one_device: XLA cannot compile the exchange of {name}"
        )


def _check_communication(communication: str, name: str, cluster: ClusterConfig) -> None:
    """Raises SettingsError for a transport of gradients that this run cannot use."""
    if communication == "auto" or name == "one_device":
        return
    gpus = len(tf.config.list_physical_devices("GPU"))
    if name != "multi_worker_mirrored":
        reason = f"is between workers, but strategy {name} has its own exchange"
    elif communication == "nccl" and not gpus:
        reason = f"is between GPUs, but {cluster.name} has none"
    elif communication == "tcp" and gpus > 1:
        reason = f"is between processes of one device each, but {cluster.name} has {gpus} GPUs"
    else:
        return
    raise SettingsError(f"communication {communication} {reason}; use auto")


def create_strategy(settings: TrainSettings, cluster: ClusterConfig) -> tf.distribute.Strategy:
    """Creates the strategy; a multi-worker one connects to its peers, so `Peers.handshake` comes first."""
    name = choose_strategy(settings, cluster)
    gpus = len(tf.config.list_physical_devices("GPU"))
    resolver = None  # of one process, which trains locally
    if cluster.tasks:
        os.environ |= without_proxy(os.environ, cluster.addresses.values())
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster.tasks),
            task_type=cluster.task_type,
            task_id=cluster.task_index,
            num_accelerators={"GPU": gpus},
            rpc_layer="grpc",
        )
    tensorflow_internals.patch_variable_conversion()
    if name == "multi_worker_mirrored":
        patch_keras_methods()
        tensorflow_internals.patch_initial_values()
        # TensorFlow uses NCCL only on request; the ring of sockets (tcp) carries gradients only.
        kinds = tf.distribute.experimental.CommunicationImplementation
        kind = kinds.NCCL if gpus and settings.communication != "ring" else kinds.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=kind)
        if cluster.tasks:
            tensorflow_internals.set_heartbeat_timeout(cluster.tasks, settings.peer_timeout)
        if settings.startup_timeout:  # TensorFlow waits without end for a lost peer
            faulthandler.dump_traceback_later(settings.startup_timeout, exit=True, file=2)
        try:
            return tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
        finally:
            faulthandler.cancel_dump_traceback_later()
    if name == "parameter_server":
        return tf.distribute.ParameterServerStrategy(resolver)
    if settings.cpu_devices > 1:
        divided = [tf.config.LogicalDeviceConfiguration()] * settings.cpu_devices
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], divided)
    kind = "GPU" if settings.cpu_devices < 2 and gpus else "CPU"
    devices = [device.name for device in tf.config.list_logical_devices(kind)]
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    return tf.distribute.OneDeviceStrategy(devices[0])


def has_one_cpu(strategy: tf.distribute.Strategy) -> bool:
    """Whether each process of a synchronous strategy trains on one device, its CPU."""
    if not isinstance(strategy, tf.distribute.OneDeviceStrategy | tf.distribute.MultiWorkerMirroredStrategy):
        return False
    return ["CPU" in device.upper() for device in strategy.extended.worker_devices] == [True]


def distribute_dataset(
    strategy: tf.distribute.Strategy, make: Callable[[], tf.data.Dataset]
) -> tf.data.Dataset:
    """Returns the dataset of one process, which `make` makes, as an input of its replicas."""
    if has_one_cpu(strategy):
        # Saves the copy to devices, half a millisecond a step, and seconds at the end.
        return make()
    return strategy.distribute_datasets_from_function(lambda context: make())


def announce_devices(cluster: ClusterConfig, environ: Mapping[str, str]) -> None:
    """Reports the cluster, and what this machine computes on where it is the chief's or no CPU; checks it."""
    if cluster.is_chief and cluster.hosts:
        progress.report("train", f"cluster: {cluster.origin}")
        own = environ.get("SLURM_CPUS_ON_NODE", "")
        if cluster.origin.startswith("Slurm") and own.isdecimal() and int(own) < (os.cpu_count() or 0):
            progress.report(
                "train",
                f"warning: the job has {own} of {os.cpu_count()} processors of a node, where others may run "
                "and read and write files as you by TensorFlow's servers; take it whole with --exclusive",
            )
    devices = describe_devices()
    if cluster.is_chief or not devices.startswith("CPU"):
        progress.report("train", f"device: {devices}")
    check_devices(environ)


def describe_devices() -> str:
    """Returns the devices as text: "2 GPUs, Tesla T4", or "CPU, 8 cores"."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        cores = len(os.sched_getaffinity(0))
        return f"CPU, {cores} core{'s' * (cores > 1)}"
    details = (tf.config.experimental.get_device_details(gpu) for gpu in gpus)
    models = Counter(str(detail.get("device_name", "of an unknown model")) for detail in details)
    return ", ".join(f"{_gpus(count)}, {model}" for model, count in models.items())


def check_devices(environ: Mapping[str, str]) -> None:
    """Checks that TensorFlow sees as many GPUs as the worker pool asked for.

    Raises SettingsError if the image cannot use any; RunError if some are missing, which another machine has.
    """
    asked = re.match(r"(\d+) ([A-Z]\w*)", environ.get(ACCELERATORS_VARIABLE, ""))
    if asked is None:
        return
    count, kind = asked.groups()
    seen = len(tf.config.list_physical_devices("GPU"))
    if seen >= int(count):
        return
    found = (
        f"this machine should have {count} {kind}, but TensorFlow sees {_gpus(seen) if seen else 'no GPU'}"
    )
    if not seen and installed_version(_CUDA) is None:
        raise SettingsError(f"{found}: the image has no CUDA ({_CUDA}); build and name the gpu variant")
    if not seen and _DRIVER not in (path := environ.get("LD_LIBRARY_PATH", "")).split(os.pathsep):
        raise SettingsError(
            f"{found}: LD_LIBRARY_PATH, {path!r}, must hold {_DRIVER}, the driver's libraries"
        )
    raise RunError(
        f"{found}: another machine may have them all, or a driver for this CUDA; see CUDA_VISIBLE_DEVICES, "
        "NVIDIA_VISIBLE_DEVICES and LD_LIBRARY_PATH, or ask for as many as the machine has"
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"
