"""The tf.distribute strategy of a run. It must exist before any other TensorFlow op runs."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from trainer.distribute.cluster import Cluster
from trainer.errors import SettingsError


def choose(name: str, cluster: Cluster) -> str:
    """Resolves "auto": a cluster trains on all workers, several accelerators mirrored, else one device.

    Raises:
        SettingsError: When the strategy and the cluster exclude each other.
    """
    if name == "auto":
        if cluster.num_workers > 1:
            return "multi_worker_mirrored"
        return "mirrored" if len(tf.config.list_physical_devices("GPU")) > 1 else "one_device"
    if cluster.num_workers > 1 and name != "multi_worker_mirrored":
        raise SettingsError(
            f"strategy {name!r} trains in one process, but TF_CONFIG has {cluster.num_workers}; "
            "use multi_worker_mirrored or auto"
        )
    return name


def create(name: str, cluster: Cluster) -> tf.distribute.Strategy:
    """Creates the strategy; a multi-worker one connects to its peers here.

    Args:
        name: A strategy's name, or "auto".
        cluster: This process's cluster.
    """
    name = choose(name, cluster)
    if name == "multi_worker_mirrored":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(_devices())
    return tf.distribute.OneDeviceStrategy(_devices()[0])


def _devices() -> list[str]:
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return [device.name for device in tf.config.list_logical_devices(kind)]


def replica_merger(strategy: tf.distribute.Strategy, model: keras.Model) -> Callable[[], None]:
    """Returns a function that makes the replicas agree on the float weights that each keeps for itself.

    Keras 3 updates BatchNormalization's moving statistics on every replica alone and would save those of
    the first; the function replaces them by their mean over all replicas. It is a collective: every
    replica must call it at the same point.

    Args:
        strategy: The strategy of the run.
        model: The model; only its non-trainable weights are touched.
    """
    floats = [v for v in model.non_trainable_weights if keras.backend.is_float_dtype(v.dtype)]
    if strategy.num_replicas_in_sync == 1 or not floats:
        return lambda: None

    def merge() -> None:
        context = tf.distribute.get_replica_context()
        # identity: a variable's own read has no device in a graph, and the exchange asks for one.
        values = [tf.identity(tf.convert_to_tensor(variable)) for variable in floats]
        means = context.all_reduce(tf.distribute.ReduceOp.MEAN, values)
        for variable, mean in zip(floats, means, strict=True):
            variable.assign(mean)

    merge_all: Callable[[], None] = tf.function(lambda: strategy.run(merge))
    return merge_all


def barrier(strategy: tf.distribute.Strategy) -> None:
    """Returns on every replica only after all have come here."""

    def meet() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(1))

    tf.function(lambda: strategy.run(meet))()
