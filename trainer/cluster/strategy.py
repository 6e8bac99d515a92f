"""Strategy: the tf.distribute strategy of a run, which must exist before any other TensorFlow op runs."""

from __future__ import annotations

import keras
import tensorflow as tf

from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.errors import ModelError, SettingsError
from shardline.trainer.keras_internals import all_layers
from shardline.trainer.one_process import let_keras_compute
from shardline.trainer.settings import TrainSettings
from shardline.trainer.tensorflow_internals import ended_after, read_as_numbers, wait_for_silent_peers

_ONE_PROCESS = ("one_device", "mirrored", "central_storage", "tpu")
_SEVERAL_CPUS = ("mirrored", "central_storage")


def choose(settings: TrainSettings, cluster: Cluster) -> str:
    """Returns the name of the strategy, with "auto" resolved.

    Parameter servers mean parameter_server, several training processes multi_worker_mirrored, several local
    devices mirrored, all else one_device. The evaluator works on one device, whatever the others do. A
    SettingsError says that strategy, devices, cluster and other settings exclude each other.
    """
    _check_cluster(settings.strategy, cluster)
    if cluster.role == "evaluator":
        return "one_device"
    name = _automatic(settings, cluster) if settings.strategy == "auto" else settings.strategy
    if settings.cpu_devices > 1 and name not in _SEVERAL_CPUS:
        raise SettingsError(
            f"cpu_devices {settings.cpu_devices} divides the CPU for {' and '.join(_SEVERAL_CPUS)}; "
            f"strategy {name} uses one CPU device a process"
        )
    if settings.precision == "float16" and name == "central_storage":
        raise SettingsError(
            "strategy central_storage cannot train in float16: TensorFlow keeps no loss scale on its central "
            "device; use precision bfloat16, or strategy mirrored"
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


def _automatic(settings: TrainSettings, cluster: Cluster) -> str:
    if cluster.ps_hosts:
        return "parameter_server"
    if cluster.num_workers > 1:
        return "multi_worker_mirrored"
    several = settings.cpu_devices > 1 or len(tf.config.list_physical_devices("GPU")) > 1
    return "mirrored" if several else "one_device"


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
    if name == "central_storage":
        return tf.distribute.experimental.CentralStorageStrategy(devices, "/cpu:0")
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


def check_model(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Refuses BatchNormalization under central_storage: Keras 3 keeps its statistics for each replica."""
    central = isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
    for layer in all_layers(model) if central else ():
        if isinstance(layer, keras.layers.BatchNormalization):
            raise ModelError(
                f"strategy central_storage cannot train BatchNormalization, but the model has layer "
                f"{layer.name!r}; use strategy mirrored, or a model without it"
            )


def has_one_cpu(strategy: tf.distribute.Strategy) -> bool:
    """Whether each process of a synchronous strategy trains on one device, its CPU."""
    if not isinstance(strategy, tf.distribute.OneDeviceStrategy | tf.distribute.MultiWorkerMirroredStrategy):
        return False
    return ["CPU" in device.upper() for device in strategy.extended.worker_devices] == [True]
