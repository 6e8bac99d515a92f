"""From the name of a model function to a compiled model that fits the dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras

from trainer import plugins
from trainer.data.manifest import DatasetInfo
from trainer.errors import ModelError
from trainer.models import BUILT_IN, import_string
from trainer.models.head import read_head

ModelFunction = Callable[..., keras.Model]


def model_function(model: str) -> ModelFunction:
    """Finds a model function.

    Args:
        model: A built-in name, or `pkg.module:function`.

    Raises:
        ModelError: When there is none; the message says what there is.
    """
    function = plugins.load(import_string(model), "model", ModelError, known=tuple(BUILT_IN))
    if not callable(function):
        raise ModelError(f"model {model!r} is not a function but {type(function).__name__}")
    checked: ModelFunction = function
    return checked


def build(model: str, dataset: DatasetInfo, arguments: Mapping[str, Any]) -> keras.Model:
    """Calls the model function and checks what it returns.

    Args:
        model: A built-in name, or `pkg.module:function`.
        dataset: What the function is told about the data.
        arguments: Its keyword arguments.

    Raises:
        ModelError: When the function does not take these arguments, or returns something else than a
            compiled model that fits the dataset.
    """
    function = model_function(model)
    _check_arguments(model, function, dataset, arguments)
    built = function(dataset, **arguments)
    if not isinstance(built, keras.Model):
        raise ModelError(f"model {model!r} returned {type(built).__name__}, not a keras.Model")
    if not built.compiled:
        raise ModelError(f"model {model!r} returned a model that is not compiled; call model.compile(...)")
    if len(getattr(built, "inputs", None) or [0]) == 1 and len(getattr(built, "outputs", None) or [0]) == 1:
        # What could not be exported is refused before it is trained.
        read_head(built, dataset)
    return built


def _check_arguments(
    model: str, function: ModelFunction, dataset: DatasetInfo, arguments: Mapping[str, Any]
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(dataset, **arguments)
    except TypeError as error:
        raise ModelError(
            f"model {model!r} cannot be called with {sorted(arguments)}: {error}; it takes {signature}"
        ) from None
