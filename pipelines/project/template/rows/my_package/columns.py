"""Columns of a table as numbers that layers can take."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
from shardline import DatasetInfo
from shardline.trainer.models.mlp import make_input


def encode(dataset: DatasetInfo, skipped: Sequence[str] = (), buckets: int = 256) -> tuple[dict, list]:
    """Returns the input of each column by name, and its encoding, float32 (batch, units), but for `skipped`.

    A number is normalized; a missing one becomes the mean, with an indicator next to it. Words are hashed.
    """
    inputs = {name: make_input(name, column) for name, column in dataset.inputs.items()}
    encoded = []
    for name in (name for name in inputs if name not in skipped):
        column = inputs[name] if inputs[name].shape[1:] else keras.ops.expand_dims(inputs[name], -1)
        if column.dtype == "string":
            encoded.append(keras.layers.Hashing(buckets, output_mode="multi_hot")(column))
            continue
        values = dataset.training_examples([name])[name].astype("float64")
        known = values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)
        scale = 1 / (float(known.std()) or 1.0)
        scaled = keras.layers.Rescaling(scale, -scale * float(known.mean()))
        normal = scaled(keras.ops.cast(column, "float32"))
        missing = keras.ops.isnan(normal)
        # Ten standard deviations are as far as one value may lead.
        encoded.append(keras.ops.clip(keras.ops.where(missing, 0.0, normal), -10, 10))
        if len(known) < values.size:
            encoded.append(keras.ops.cast(missing, "float32"))
    return inputs, encoded
