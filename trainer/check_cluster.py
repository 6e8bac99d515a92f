"""Check of a cluster: `python -m shardline.trainer.check_cluster`, an all-reduce over all replicas.

It shows that TensorFlow loads, that the replicas reach each other, and that a collective works.
"""

from __future__ import annotations

import os

from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError


def main() -> None:
    """Sums the number 1 over the replicas of the cluster."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from shardline.trainer.base.settings import TrainSettings
    from shardline.trainer.cluster.cluster import read_cluster
    from shardline.trainer.cluster.collectives import Collectives
    from shardline.trainer.cluster.strategy import create

    cluster = read_cluster(os.environ)
    strategy = create(TrainSettings(dataset="", model="check", strategy="multi_worker_mirrored"), cluster)
    replicas = cluster.num_workers
    (total,) = Collectives(strategy).total([1])
    if total != replicas:
        raise RunError(f"{replicas} replicas added up to {total}")


if __name__ == "__main__":
    with progress.exit_on_error("handshake"):
        main()
