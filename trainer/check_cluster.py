"""Check of a cluster: `python -m shardline.trainer.check_cluster`: replicas add up ones.

It shows that TensorFlow loads here, that replicas find each other, and that a collective works.
"""

from __future__ import annotations

import json
import os

from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError


def main() -> None:
    """Adds up a one of every replica, with the cluster that TF_CONFIG describes."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    replicas = sum(map(len, json.loads(os.environ["TF_CONFIG"])["cluster"].values()))
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function  # type: ignore[untyped-decorator]
    def add_up() -> tf.Tensor:
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([])))

    total = float(strategy.experimental_local_results(add_up())[0])
    if total != replicas:
        raise RunError(f"{replicas} replicas added up to {total}")


if __name__ == "__main__":
    with progress.exit_on_error("handshake"):
        main()
