"""Check of a cluster: `python -m shardline.trainer.check_cluster`, an all-reduce over all replicas.

It shows that TensorFlow loads, that the replicas reach each other, and that a collective works.
"""

from __future__ import annotations

import json
import os

from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError


def main() -> None:
    """Sums the number 1 over the replicas of the cluster in TF_CONFIG."""
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
