"""The gate: the evaluation of the champion on the same examples, and the verdict on a model by its rules.

It may import `rules`, `evaluate`, `export` and `metrics`; it loads TensorFlow, and `rules` does not.
"""

from shardline.components.validate.gate.champion import TrainingKeys, evaluate_champion
from shardline.components.validate.gate.judged import POWER, PairedTest, TrainingRecord, read_training
from shardline.components.validate.gate.verdict import Blessing, judge

__all__ = [
    "POWER",
    "Blessing",
    "PairedTest",
    "TrainingKeys",
    "TrainingRecord",
    "evaluate_champion",
    "judge",
    "read_training",
]
