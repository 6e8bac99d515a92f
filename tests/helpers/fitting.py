"""Fitting: small models and data, trained by Keras and by Shardline side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import shardline

COUNT, WIDTH, BATCH = 50, 3, 16


def numbers(count: int = COUNT, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples of a regression with a rest in the last batch."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, WIDTH)).astype("float32")
    return x, (x.sum(axis=1, keepdims=True) + 0.1 * draw.normal(size=(count, 1))).astype("float32")


def classes(count: int = COUNT, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples of three classes, as whole numbers."""
    x, y = numbers(count, seed)
    return x, np.digitize(y[:, 0], [-1.0, 1.0])


def line(**options: Any) -> keras.Model:
    """Returns a compiled linear model of `numbers`, with the same weights each time."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
    model.compile(**{"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", "metrics": ["mae"], **options})
    return model


def classifier(**options: Any) -> keras.Model:
    """Returns a compiled model of `classes`."""
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(4, activation="relu")
    model = keras.Sequential([keras.Input((WIDTH,)), hidden, keras.layers.Dense(3, activation="softmax")])
    loss = "sparse_categorical_crossentropy"
    model.compile(**{"optimizer": "sgd", "loss": loss, "metrics": ["accuracy"], **options})
    return model


def batches(data: Any, size: int = BATCH) -> tf.data.Dataset:
    """Returns arrays as an unshuffled dataset of batches."""
    return tf.data.Dataset.from_tensor_slices(data).batch(size)


def fitted_by_keras(
    make: keras.Model | Callable[[], keras.Model], data: Any, **options: Any
) -> keras.callbacks.History:
    """Returns the history of `keras.Model.fit`, with arrays in their order."""
    x, y, weight = (*data, None, None)[:3] if isinstance(data, tuple) else (data, None, None)
    given = {"verbose": 0, "shuffle": False, **options}
    model = make if isinstance(make, keras.Model) else make()
    return model.fit(x, y, sample_weight=weight, **given)


def fitted(
    make: keras.Model | Callable[[], keras.Model], data: Any, **options: Any
) -> keras.callbacks.History:
    """Returns the history of `shardline.fit`, with arrays in their order."""
    return shardline.fit(make, data, **{"verbose": 0, "shuffle": False, **options})


def check_alike(
    ours: keras.callbacks.History, theirs: keras.callbacks.History, *, tolerance: float = 1e-6
) -> None:
    """Compares two histories with their models' weights."""
    assert sorted(ours.history) == sorted(theirs.history)
    assert ours.epoch == theirs.epoch
    for name, values in theirs.history.items():
        np.testing.assert_allclose(ours.history[name], values, rtol=tolerance, atol=tolerance, err_msg=name)
    for own, other in zip(ours.model.get_weights(), theirs.model.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=tolerance, atol=tolerance)
