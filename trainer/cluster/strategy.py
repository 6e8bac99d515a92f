"""Strategy: the tf.distribute strategy of a run, which must exist before any other TensorFlow op runs.

With the devices of this machine: in words, and whether they are what its worker pool was given.
"""

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
from shardline.trainer.replica_losses import let_keras_compute
from shardline.trainer.settings import TrainSettings
from shardline.trainer.tensorflow_internals import ended_after, read_as_numbers, wait_for_silent_peers

_ONE_PROCESS = ("one_device", "mirrored", "tpu")


def choose(settings: TrainSettings, cluster: Cluster) -> str:
    """Returns the name of the strategy, with "auto" resolved.

    Parameter servers mean parameter_server, several training processes multi_worker_mirrored, several local
    devices mirrored, all else one_device. The evaluator works on one device, whatever the others do. A
    SettingsError says that strategy, devices, cluster and other settings exclude each other.
    """
    _check_cluster(settings.strategy, cluster)
    if cluster.role == "evaluator":
        return "one_device"
    name = settings.strategy
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
    check(settings, name)
    return name


def check(settings: TrainSettings, name: str) -> None:
    """Refuses settings that the strategy cannot follow."""
    if settings.jit_compile == "on" and name != "one_device":
        raise SettingsError(
            f"jit_compile needs strategy one_device: XLA compiles no exchange, as {name} needs it"
        )
    if settings.averaging_steps and name != "multi_worker_mirrored":
        raise SettingsError(
            "averaging_steps needs strategy multi_worker_mirrored, workers with weights of their own; "
            f"this run has {name}"
        )


def _check_communication(asked: str, name: str, cluster: Cluster) -> None:
    """Refuses a way of exchanging gradients that this run cannot take; one replica alone exchanges none."""
    if asked == "auto" or name == "one_device":
        return
    gpus = len(tf.config.list_physical_devices("GPU"))
    if name != "multi_worker_mirrored":
        reason = f"is between workers, but strategy {name} exchanges in its own way"
    elif asked == "nccl" and not gpus:
        reason = f"is between GPUs, but {cluster.name} has none"
    elif asked == "tcp" and gpus > 1:
        reason = f"is between processes of one device each, but {cluster.name} has {gpus} GPUs"
    else:
        return
    raise SettingsError(f"communication {asked} {reason}; use auto")


def implementation(communication: str) -> tf.distribute.experimental.CommunicationImplementation:
    """Returns how TensorFlow exchanges: by NCCL where there are GPUs, which it does only when told to.

    The ring of sockets (tcp) carries gradients only: all else goes TensorFlow's way. All replicas have the
    same number of GPUs.
    """
    kinds = tf.distribute.experimental.CommunicationImplementation
    gpus = tf.config.list_physical_devices("GPU")
    return kinds.NCCL if gpus and communication != "ring" else kinds.RING


def _check_cluster(name: str, cluster: Cluster) -> None:
    if name == "parameter_server" and not cluster.ps_hosts and cluster.role != "evaluator":
        raise SettingsError(
            "strategy parameter_server needs parameter servers, but TF_CONFIG has none: add a pool of them "
            "or use multi_worker_mirrored"
        )
    if cluster.ps_hosts and name not in ("auto", "parameter_server"):
        raise SettingsError(
            f"strategy {name!r} has no use for parameter servers, but TF_CONFIG is {cluster}; "
            "use parameter_server or auto"
        )
    if len(cluster.hosts) > 1 and name in _ONE_PROCESS:
        raise SettingsError(
            f"strategy {name!r} trains in one process, but TF_CONFIG has {len(cluster.hosts)}; "
            "use multi_worker_mirrored or auto"
        )


def create(settings: TrainSettings, cluster: Cluster) -> tf.distribute.Strategy:
    """Creates the strategy; a multi-worker one connects to its peers here, which must have been met."""
    name = choose(settings, cluster)
    read_as_numbers()
    if name == "multi_worker_mirrored":
        let_keras_compute()
        way = implementation(settings.communication)
        options = tf.distribute.experimental.CommunicationOptions(implementation=way)
        if cluster.tasks:
            wait_for_silent_peers(cluster.tasks, settings.peer_timeout)
        with ended_after(settings.startup_timeout):
            return tf.distribute.MultiWorkerMirroredStrategy(_resolver(cluster), options)
    if name == "parameter_server":
        return tf.distribute.ParameterServerStrategy(_resolver(cluster))
    if name == "tpu":
        return _tpu()
    devices = _devices(settings.cpu_devices)
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    return tf.distribute.OneDeviceStrategy(devices[0])


def _resolver(cluster: Cluster) -> tf.distribute.cluster_resolver.ClusterResolver | None:
    """Returns the cluster as TensorFlow reads it; None, for one process, lets it train locally."""
    if not cluster.tasks:
        return None
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.tasks),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        num_accelerators={"GPU": len(tf.config.list_physical_devices("GPU"))},
        rpc_layer="grpc",
    )


def _tpu() -> tf.distribute.Strategy:
    try:
        # "local" is the TPU of this very machine, as Vertex AI's TPU VMs have it.
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu="local")
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"strategy tpu found no TPU on this machine: {reason}") from error
    return tf.distribute.TPUStrategy(resolver)


def _devices(cpu_devices: int) -> list[str]:
    if cpu_devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        divided = [tf.config.LogicalDeviceConfiguration()] * cpu_devices
        tf.config.set_logical_device_configuration(cpu, divided)
    kind = "GPU" if cpu_devices < 2 and tf.config.list_physical_devices("GPU") else "CPU"
    return [device.name for device in tf.config.list_logical_devices(kind)]


def has_one_cpu(strategy: tf.distribute.Strategy) -> bool:
    """Whether each process of a synchronous strategy trains on one device, its CPU."""
    if not isinstance(strategy, tf.distribute.OneDeviceStrategy | tf.distribute.MultiWorkerMirroredStrategy):
        return False
    return ["CPU" in device.upper() for device in strategy.extended.worker_devices] == [True]


# The driver's library, which the platform mounts into the container, and where.
_DRIVER, _MOUNTED = "libcuda.so.1", "/usr/local/nvidia/lib64"
# A library of CUDA that comes with the image, and with the gpu variant alone.
_CUDA = "nvidia-cudnn-cu12"


def announce(cluster: Cluster, environ: Mapping[str, str]) -> None:
    """Says what this machine computes on, on the chief and wherever it is no CPU, and checks it."""
    found = described()
    if cluster.is_chief or not found.startswith("CPU"):
        progress.say("train", f"device: {found}")
    check_devices(environ)


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


def check_devices(environ: Mapping[str, str]) -> None:
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
