"""A worker or a parameter server of an asynchronous run: a process that only serves the chief."""

from __future__ import annotations

import time
from collections.abc import Callable

import tensorflow as tf

from shardline.trainer import progress
from shardline.trainer.distribute import peers
from shardline.trainer.distribute.cluster import Cluster
from shardline.trainer.errors import RunError

# Seconds between two looks at the chief, and those after which a chief that does not answer has ended.
_PROBE_S = 1.0
_GONE_S = 10.0
_CONNECT_S = 5.0


def run_server(cluster: Cluster, startup_timeout: float = 600.0) -> None:
    """Serves until the chief has ended, well or badly.

    TensorFlow's server would never end, and outlive its job. The chief listens on its port for as long as
    it trains, which is how its end is noticed wherever it runs.

    Args:
        cluster: This process's place in the cluster: a worker or a parameter server.
        startup_timeout: Seconds within which the chief has to come up.

    Raises:
        RunError: When this process cannot listen on its port, or the chief did not come up.
    """
    chief, name = cluster.hosts[0], cluster.name
    if cluster.role == "ps":
        # Weights are served from memory; TensorFlow would take all of the GPU's that a worker may need.
        tf.config.set_visible_devices([], "GPU")
    server = _start(cluster)
    if not _within(startup_timeout, lambda: answers(chief)):
        raise RunError(
            f"{name} has waited {startup_timeout:g} s for the chief at {chief}, which does not answer; look "
            "at the chief's own log, and whether the network lets its port through"
        )
    progress.say("train", f"{name} serves the chief at {chief}")
    while _within(_GONE_S, lambda: answers(chief)):
        time.sleep(_PROBE_S)
    progress.say("train", f"{name} ends, as the chief has")
    del server


def answers(host: str) -> bool:
    """Whether somebody accepts connections at host:port."""
    return peers.answers(host, _CONNECT_S)


def _start(cluster: Cluster) -> tf.distribute.Server:
    try:
        return tf.distribute.Server(
            tf.train.ClusterSpec(cluster.tasks),
            job_name=cluster.task_type,
            task_index=cluster.task_index,
            protocol="grpc",
        )
    except tf.errors.OpError as error:
        raise RunError(
            f"{cluster.name} cannot listen on {cluster.addresses[cluster.name]}: "
            f"{str(error).splitlines()[0]}; is another process using the port?"
        ) from error


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Waits until the condition holds; returns whether it did in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PROBE_S)
    return True
