"""What the launcher's client refuses of a payload: a mapping becomes a message, field by field."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardline.components.vertex.payload import PLACEHOLDER
from shardline.trainer.base.deserialize import restore_integers

_PACKAGES = ("google.cloud.aiplatform_v1", "google.cloud.aiplatform_v1.types")
#: What the client's errors mean, which name no field.
_REASONS = {
    "bad argument type": "must be a text, in quotes",
    "as an integer": "must be a number, true or false, without quotes",
    "is not iterable": "must be a list",
    "must be dict": "must be an object",
}


@functools.cache
def _message(kind: str) -> Callable[[Any], Any]:
    """Returns the class of a message without importing the clients of all services, which takes a second."""
    module = "hyperparameter_tuning_job" if kind == "HyperparameterTuningJob" else "custom_job"
    missing = [name for name in _PACKAGES if name not in sys.modules]
    for name in missing:
        if spec := importlib.util.find_spec(name):
            sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        return getattr(importlib.import_module(f"{_PACKAGES[1]}.{module}"), kind)  # type: ignore[no-any-return]
    finally:
        for name in missing:
            del sys.modules[name]


def _error(kind: str, content: Any) -> str:
    try:
        _message(kind)(content)
    except Exception as error:  # the client raises any
        return str(error).rpartition("Underlying error: ")[2] or type(error).__name__
    return ""


def refusals(content: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the launcher's client refuses of a payload; a text with a placeholder may become anything.

    A text in the place of a list is refused, too: the client makes a list of its letters.
    """
    kind = "HyperparameterTuningJob" if "trial_job_spec" in content else "CustomJob"
    yield from _refusals(kind, restore_integers(dict(content)), "", lambda value: value)


def _refusals(kind: str, value: Any, path: str, wrap: Callable[[Any], Any]) -> Iterator[str]:
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = [
            (item, f"{path}.{key}".lstrip("."), lambda part, key=key: wrap({key: part}))
            for key, item in value.items()
        ]
    elif isinstance(value, list):
        parts = [(item, f"{path}[{index}]", lambda part: wrap([part])) for index, item in enumerate(value)]
    error = _error(kind, wrap(value))
    name = path.rpartition(".")[2]
    if error.startswith("Unknown field for ") and error.endswith(f": {name}"):
        yield f"{path}: {error[18:].partition(':')[0]} has no such field"
        return
    is_object = isinstance(value, dict) and error.endswith(f".{name} is not iterable")
    found = [] if is_object else [why for part in parts for why in _refusals(kind, *part)]
    yield from found
    if found or (PLACEHOLDER in str(value) and not is_object):
        return
    if error:
        reason = next((text for word, text in _REASONS.items() if word in error), f"is refused ({error})")
        yield f"{path} {reason}, got {value!r}"
    elif isinstance(value, str) and not path.endswith("]") and not _error(kind, wrap([value])):
        yield f"{path} must be a list, got {value!r}"
