"""Data: batches that a model takes, of a dataset directory or of the data that a program passes.

It may import `checkpoint` and what `checkpoint` may import. `examples` and `transforms` are used as modules.
"""

from shardline.trainer.data.adapters import Batches as Batches
from shardline.trainer.data.adapters import BatchSequence as BatchSequence
from shardline.trainer.data.adapters import DataAdapter as DataAdapter
from shardline.trainer.data.adapters import check_counts as check_counts
from shardline.trainer.data.adapters import check_whole_number as check_whole_number
from shardline.trainer.data.examples import describe_dataset as describe_dataset
from shardline.trainer.data.pipeline import InputPipeline as InputPipeline
