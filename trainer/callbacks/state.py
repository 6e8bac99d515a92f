"""State of callbacks: what a callback remembers of the training so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from shardline.trainer.errors import SettingsError

Arrays = Mapping[str, np.ndarray[Any, Any]]

# Set by Keras, not by the training.
_NOT_STATE = ("_model", "params")


class CallbackStates:
    """What callbacks remember: a callback's own `get_state()`, else the attributes that training changes.

    An attribute counts when it consists of numbers, text, arrays, lists, tuples and dicts, and differs from
    what it was when training began; so a resumed run may give a callback other options (more patience).
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]):
        """Notes how the callbacks begin; call it after `on_train_begin`, which resets them."""
        self._callbacks = dict(_named(callbacks))
        self._initial = {name: _state(name, callback) for name, callback in self._callbacks.items()}

    def capture(self) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Returns what the callbacks remember: JSON by name of the callback, and the arrays it refers to.

        Raises:
            SettingsError: When a `get_state()` returns what cannot be kept.
        """
        host: dict[str, Any] = {}
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for name, callback in self._callbacks.items():
            initial = {} if _keeps_its_own(callback) else self._initial[name]
            state = {key: v for key, v in _state(name, callback).items() if v != initial.get(key)}
            host[name] = {key: value.json for key, value in state.items()}
            for value in state.values():
                arrays.update(value.arrays)
        return host, arrays

    def restore(self, host: Mapping[str, Any], arrays: Arrays) -> None:
        """Gives the callbacks their memory back; those that it does not know stay as they are."""
        for name, callback in self._callbacks.items():
            if name not in host:
                continue
            state = {key: _decode(value, arrays) for key, value in host[name].items()}
            if _keeps_its_own(callback):
                callback.set_state(state)
            else:
                vars(callback).update(state)


@dataclass(frozen=True, eq=False)
class _Encoded:
    """A value as JSON, in which arrays are replaced by their names."""

    json: Any
    arrays: Arrays

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Encoded)
            and self.json == other.json
            and all(np.array_equal(value, other.arrays[name]) for name, value in self.arrays.items())
        )


def _named(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """Yields the callbacks that have a state, numbered by class: replicas differ in the others they have."""
    count: Counter[str] = Counter()
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.TensorBoard):  # its memory is of open files and a profiler
            continue
        kind = type(callback).__name__
        yield f"{kind}/{count[kind]}", callback
        count[kind] += 1


def _keeps_its_own(callback: keras.callbacks.Callback) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _state(name: str, callback: keras.callbacks.Callback) -> dict[str, _Encoded]:
    own = _keeps_its_own(callback)
    values = callback.get_state() if own else vars(callback)
    encoded = {}
    for key, value in values.items():
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        try:
            encoded[key] = _Encoded(_encode(value, f"callback/{name}/{key}", arrays), arrays)
        except TypeError as error:
            if own:
                raise SettingsError(f"get_state() of {type(callback).__name__}: {key!r} {error}") from None
    return {key: value for key, value in encoded.items() if key not in _NOT_STATE}


def _encode(value: Any, path: str, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Returns the value as JSON, and adds its arrays under names that begin with `path`.

    Raises:
        TypeError: When it contains something else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufV":
        arrays[path] = np.array(value)
        return {"array": path}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encode(v, f"{path}/{i:04d}", arrays) for i, v in enumerate(value)]}
    if type(value) is dict:
        pairs = enumerate(value.items())
        return {
            "dict": [
                [_encode(k, f"{path}/{i:04d}", {}), _encode(v, f"{path}/{i:04d}", arrays)]
                for i, (k, v) in pairs
            ]
        }
    raise TypeError(
        f"holds a value of type {type(value).__name__}; "
        "what is kept are numbers, text, arrays, lists, tuples and dicts"
    )


def _decode(value: Any, arrays: Arrays) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return np.array(arrays[content])[()]  # a scalar stays a scalar
    if kind == "dict":
        return {_decode(k, arrays): _decode(v, arrays) for k, v in content}
    items = [_decode(item, arrays) for item in content]
    return tuple(items) if kind == "tuple" else items
