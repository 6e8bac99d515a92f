"""Training loop: model building, steps on all replicas, evaluation, and Keras' callbacks.

It may import every package of the trainer, but not the programs at the top that start it. `build`,
`callbacks` and `evaluator` are used as modules.
"""

from shardline.trainer.loop.loop import Training as Training
from shardline.trainer.loop.parameter_server import run_server as run_server
from shardline.trainer.loop.process import STRATEGY_SETTINGS as STRATEGY_SETTINGS
from shardline.trainer.loop.process import Process as Process
from shardline.trainer.loop.process import TrainingRun as TrainingRun
from shardline.trainer.loop.process import Watchdog as Watchdog
from shardline.trainer.loop.process import check_options as check_options
from shardline.trainer.loop.process import join_cluster as join_cluster
from shardline.trainer.loop.process import strategy as strategy
from shardline.trainer.loop.process import this_process as this_process
from shardline.trainer.loop.step import EvaluationLoop as EvaluationLoop
from shardline.trainer.loop.step import Logs as Logs
