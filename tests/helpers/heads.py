"""Heads of models: what the output for the only label of a dataset is."""

from __future__ import annotations

import keras

from shardline.trainer.manifest import DatasetInfo
from shardline.trainer.models import read_heads
from shardline.trainer.models.interface import Head


def read_head(model: keras.Model, dataset: DatasetInfo) -> Head:
    """Returns what the output of a model is; raises ModelError as `read_heads` does."""
    return read_heads(model, dataset)[dataset.label.name]
