"""Data: batches that a model takes, of a dataset directory or of the data that a program passes.

It may import `checkpoint` and what `checkpoint` may import. `examples` and `transforms` are used as modules.
"""

from shardline.trainer.data.adapters import (
    Batches,
    BatchSequence,
    DataAdapter,
    check_counts,
    check_whole_number,
)
from shardline.trainer.data.examples import describe_dataset
from shardline.trainer.data.pipeline import InputPipeline

__all__ = [
    "BatchSequence",
    "Batches",
    "DataAdapter",
    "InputPipeline",
    "check_counts",
    "check_whole_number",
    "describe_dataset",
]
