"""Warm start: a new run begins with the weights of a trained model."""

from __future__ import annotations

from itertools import zip_longest

import keras

from trainer import files
from trainer.errors import ModelError
from trainer.saving import MODEL_FILE, load_model


def warm_start(model: keras.Model, path: str) -> None:
    """Gives a model the weights of a saved one; its optimizer starts anew.

    Args:
        model: Built; under a strategy in its cross-replica context.
        path: A .keras file, or a directory that holds model.keras; a path or gs://.

    Raises:
        ModelError: When there is no such file, it cannot be loaded, or its weights are not those of the
            model in number, name and shape; the message names the first that differs.
    """
    file = files.local_path(path)
    if file.is_dir():
        file = file / MODEL_FILE
    source = load_model(file)
    pairs = list(zip_longest(source.weights, model.weights))
    for number, (theirs, ours) in enumerate(pairs, start=1):
        if _describe(theirs) != _describe(ours):
            raise ModelError(
                f"{file} is of another architecture: weight {number} is {_describe(theirs)} there and "
                f"{_describe(ours)} in the model; start from a model of the same function and "
                "the same number of classes"
            )
    for theirs, ours in pairs:
        ours.assign(keras.ops.convert_to_numpy(theirs))


def _describe(weight: keras.Variable | None) -> str:
    # Its path begins with names that Keras numbers as they come, dense_3, so the last part has to do.
    return "missing" if weight is None else f"{weight.name} {tuple(weight.shape)}"
