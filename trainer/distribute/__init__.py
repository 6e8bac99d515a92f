"""Distribution: the tf.distribute strategy, the peers, and the exchange of gradients between them.

It may import `keras_compat`, `cluster` and `base`.
"""

from shardline.trainer.distribute.collectives import Collectives as Collectives
from shardline.trainer.distribute.collectives import GradientExchange as GradientExchange
from shardline.trainer.distribute.collectives import Summation as Summation
from shardline.trainer.distribute.collectives import make_summation as make_summation
from shardline.trainer.distribute.collectives import replica_merger as replica_merger
from shardline.trainer.distribute.peers import Peers as Peers
from shardline.trainer.distribute.peers import abort_when_peer_ends as abort_when_peer_ends
from shardline.trainer.distribute.peers import accepts_connections as accepts_connections
from shardline.trainer.distribute.peers import describe_difference as describe_difference
from shardline.trainer.distribute.peers import peer_config as peer_config
from shardline.trainer.distribute.strategy import announce_devices as announce_devices
from shardline.trainer.distribute.strategy import check_strategy_settings as check_strategy_settings
from shardline.trainer.distribute.strategy import choose_strategy as choose_strategy
from shardline.trainer.distribute.strategy import create_strategy as create_strategy
from shardline.trainer.distribute.strategy import distribute_dataset as distribute_dataset
