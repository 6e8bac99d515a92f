"""Training loop: model building, steps on all replicas, evaluation, and Keras' callbacks.

It may import every package of the trainer, but not the programs at the top that start it. `build`,
`callbacks` and `evaluator` are used as modules.
"""

from shardline.trainer.loop.loop import Training
from shardline.trainer.loop.parameter_server import run_server
from shardline.trainer.loop.process import (
    STRATEGY_SETTINGS,
    Process,
    TrainingRun,
    Watchdog,
    check_options,
    join_cluster,
    strategy,
    this_process,
)
from shardline.trainer.loop.step import EvaluationLoop, Logs

__all__ = [
    "STRATEGY_SETTINGS",
    "EvaluationLoop",
    "Logs",
    "Process",
    "Training",
    "TrainingRun",
    "Watchdog",
    "check_options",
    "join_cluster",
    "run_server",
    "strategy",
    "this_process",
]
