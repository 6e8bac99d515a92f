"""The plan: one pass over the source, and the split, shard and image location of every example.

It may import `sources`, `schema`, `images` and `tfrecord`.
"""

from shardline.components.preprocess.plan.image_locations import NO_LOCATION, ImageReader
from shardline.components.preprocess.plan.plan import (
    Plan,
    PlannedShard,
    Survey,
    assign_shards,
    load_part,
    shard_name,
)
from shardline.components.preprocess.plan.records import are_rows_alike
from shardline.components.preprocess.plan.survey import Rejected, check_labels, survey_batches, survey_source

__all__ = [
    "NO_LOCATION", "ImageReader", "Plan", "PlannedShard", "Rejected", "Survey", "are_rows_alike",
    "assign_shards", "check_labels", "load_part", "shard_name", "survey_batches", "survey_source",
]  # fmt: skip
