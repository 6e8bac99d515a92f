"""Export check: before training, refuse a model that could not be saved, loaded or served after it."""

from __future__ import annotations

import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.base.errors import ModelError
from shardline.trainer.data.decode import Prepare
from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.keras_compat.keras_compilation import refuse_lambda, saveable, short_message
from shardline.trainer.keras_compat.operations import check_operations
from shardline.trainer.models.head import TRAIN_WITHOUT_EXPORT, probe_inputs

# Layers of Keras that hold code, or need something outside the file.
_LAMBDA = "__lambda__"  # left out by Keras if the lambda is an activation
_FOREIGN = ("Lambda", "TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper")

_SAVEABLE = (
    "give each class of its own a get_config() that returns the arguments of its constructor, as numbers, "
    "text or objects of Keras"
)
_LOADABLE = (
    "classes and functions of its own need @keras.saving.register_keras_serializable(), and a get_config() "
    "that returns the arguments of their constructor"
)
_TRACEABLE = "its call() has to consist of operations of Keras or TensorFlow, for any number of examples"

# Largest rounding difference between a batch of two and a larger one.
_TOLERANCE = 1e-3


def check_export(
    model: keras.Model, dataset: DatasetInfo, *, prepare: Prepare | None = None, exported: bool = True
) -> None:
    """Saves a model, loads it in safe mode, and traces it, if it has code that is not Keras' own.

    Collective: every replica must call it at the same point, outside the strategy's scope. A model of Keras'
    own layers alone is skipped, as this takes seconds for a large model. One that is not to be exported is
    only saved. Raises ModelError if one of these fails, or the loaded model has other outputs than the model.
    """
    with warnings.catch_warnings(), saveable(model):
        warnings.simplefilter("ignore")  # anything serious is refused
        with _raising_model_error("cannot be saved", _SAVEABLE):
            config = keras.saving.serialize_keras_object(model)
            json.dumps(config)
        own = {name: value for name, value in config.items() if name != "compile_config"}
        if not model.built or not any(_is_foreign(part) for part in _parts(own)):
            return
        with tempfile.TemporaryDirectory(prefix="shardline-check-") as directory:
            path = Path(directory) / "model.keras"
            with _raising_model_error("cannot be saved", _SAVEABLE):
                model.save(path)
            if not exported:
                return
            with _raising_model_error(
                "cannot be loaded once it is saved", f"{_LOADABLE}; {TRAIN_WITHOUT_EXPORT}"
            ):
                loaded = keras.models.load_model(path, safe_mode=True, compile=False)
    inputs = probe_inputs(dataset, prepare)
    specs = tf.nest.map_structure(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), inputs)
    predict = tf.function(lambda inputs: loaded(inputs, training=False), autograph=False)
    with _raising_model_error("cannot be traced for an export", f"{_TRACEABLE}; {TRAIN_WITHOUT_EXPORT}"):
        concrete = predict.get_concrete_function(specs)
    check_operations(concrete)
    _compare(model, loaded, inputs)


@contextlib.contextmanager
def _raising_model_error(problem: str, advice: str) -> Iterator[None]:
    """Converts any exception of the user's code, or of Keras, in the context to a ModelError."""
    try:
        yield
    except Exception as error:
        if "loaded" in problem:
            refuse_lambda(error, "the model", TRAIN_WITHOUT_EXPORT)
        raise ModelError(f"the model {problem}: {short_message(error)}; {advice}") from error


def _parts(config: Any) -> Iterator[dict[str, Any]]:
    """Yields every object in a configuration."""
    nested = (
        config.values() if isinstance(config, dict) else config if isinstance(config, list | tuple) else ()
    )
    if isinstance(config, dict) and ("class_name" in config or config.keys() == {"value"}):
        yield config
    for value in nested:
        yield from _parts(value)


def _is_foreign(part: dict[str, Any]) -> bool:
    module, name = str(part.get("module") or "keras"), str(part.get("class_name", _LAMBDA))
    own = name in (*_FOREIGN, "function", _LAMBDA)
    return own or module.partition(".")[0] not in ("keras", "builtins")


def _compare(model: keras.Model, loaded: keras.Model, inputs: Any) -> None:
    """Refuses a model that loses weights when it is saved, unless its own outputs differ between calls."""

    def predict(model: keras.Model) -> list[Any]:
        return [np.asarray(part, np.float64) for part in tf.nest.flatten(model(inputs, training=False))]

    def agree(ours: list[Any], theirs: list[Any]) -> bool:
        pairs = zip(ours, theirs, strict=True)
        return all(np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True) for a, b in pairs)

    first = predict(model)
    if agree(first, predict(model)) and not agree(first, predict(loaded)):
        raise ModelError(
            "the model has other outputs after it is saved and loaded: some of its weights are not saved; "
            "make them attributes of layers, created in __init__ or build() from the arguments in "
            f"get_config(); {TRAIN_WITHOUT_EXPORT}"
        )
