"""Callbacks that a user brings: `pkg.module:make`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import keras

from shardline.trainer import plugins
from shardline.trainer.errors import SettingsError


def load_callbacks(reference: str, directory: Path) -> list[keras.callbacks.Callback]:
    """Makes the callbacks that an import string names.

    Args:
        reference: `pkg.module:make`; `make()` or `make(directory)` returns a callback or a list of them.
        directory: Given to `make` where it has a parameter of that name.

    Raises:
        SettingsError: When there is no such function, or it fails, or returns something else.
    """
    make = plugins.load(reference, "callback", SettingsError)
    arguments = _arguments(reference, make, directory)
    try:
        made = make(**arguments)
    except Exception as error:
        raise SettingsError(f"callback {reference!r} failed: {plugins.describe(error)}") from error
    callbacks = list(made) if isinstance(made, (list, tuple)) else [made]
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise SettingsError(
                f"callback {reference!r} has to return a keras.callbacks.Callback or a list of them, "
                f"it returned {type(callback).__name__}"
            )
    return callbacks


def _arguments(reference: str, make: Any, directory: Path) -> dict[str, Path]:
    if not callable(make):
        raise SettingsError(f"callback {reference!r} is {make!r}, not a function")
    parameters = inspect.signature(make).parameters.values()
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "directory"
    ]
    if required:
        raise SettingsError(
            f"callback {reference!r} requires {', '.join(required)}, but it is given nothing, or directory"
        )
    return {"directory": directory} if any(p.name == "directory" for p in parameters) else {}
