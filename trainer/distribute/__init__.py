"""Distribution: the tf.distribute strategy, the peers, and the exchange of gradients between them.

It may import `keras_compat`, `cluster` and `base`.
"""

from shardline.trainer.distribute.collectives import (
    Collectives,
    GradientExchange,
    Summation,
    make_summation,
    replica_merger,
)
from shardline.trainer.distribute.peers import (
    Peers,
    abort_when_peer_ends,
    accepts_connections,
    describe_difference,
    peer_config,
)
from shardline.trainer.distribute.strategy import (
    announce_devices,
    check_strategy_settings,
    choose_strategy,
    create_strategy,
    distribute_dataset,
)

__all__ = [
    "Collectives",
    "GradientExchange",
    "Peers",
    "Summation",
    "abort_when_peer_ends",
    "accepts_connections",
    "announce_devices",
    "check_strategy_settings",
    "choose_strategy",
    "create_strategy",
    "describe_difference",
    "distribute_dataset",
    "make_summation",
    "peer_config",
    "replica_merger",
]
