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
    check_fit(model, built, dataset)
    return built


def check_fit(name: str, model: keras.Model, dataset: DatasetInfo) -> None:
    """Checks that a model with one input and one output takes the images and returns the classes.

    Raises:
        ModelError: When it does not.
    """
    takes = _shape(model, "input_shape")
    if takes is not None and not _fits(takes[1:], dataset.input_shape):
        raise ModelError(
            f"model {name!r} takes input of shape {takes[1:]}, the images have {dataset.input_shape}"
        )
    gives = _shape(model, "output_shape")
    binary = dataset.num_classes == 2 and gives is not None and gives[1:] == (1,)
    if gives is not None and gives[1:] != (dataset.num_classes,) and not binary:
        raise ModelError(
            f"model {name!r} returns shape {gives[1:]}, the dataset needs ({dataset.num_classes},): one "
            "value per class"
        )


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


def _shape(model: keras.Model, attribute: str) -> tuple[int | None, ...] | None:
    """Returns the shape of the model's only input or output, None where there are several or none yet."""
    try:
        shape = getattr(model, attribute)
    except (AttributeError, ValueError):
        return None
    return shape if isinstance(shape, tuple) and all(n is None or isinstance(n, int) for n in shape) else None


def _fits(takes: tuple[int | None, ...], shape: tuple[int, ...]) -> bool:
    return len(takes) == len(shape) and all(n in (None, m) for n, m in zip(takes, shape, strict=True))
