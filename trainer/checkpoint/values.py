"""Values of callbacks as JSON and arrays, as they stand in a checkpoint, and back."""

from __future__ import annotations

import builtins
import hashlib
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
# Types with a form in JSON: the type, to JSON, and from it.
_SIMPLE: Mapping[str, tuple[type, Any, Any]] = {
    "bytes": (bytes, lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1")),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "timedelta": (
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*parts),
    ),
    "path": (type(Path()), str, Path),
}
_VARIABLES = (keras.Variable, tf.Variable)
# Of the standard library and of installed packages, these modules hold what a program counts and collects.
_STATE_MODULES = ("array", "collections", "numpy", "pandas", "random")
# What is deeper in an object is not looked at, nor are larger arrays.
_MAX_DEPTH, _MAX_BYTES = 8, 1 << 24


class Encoder:
    """Encodes values; `arrays` takes their arrays, with names that begin with the value's `path`.

    `known` are the ids of variables that are saved with the model, and are not encoded.
    """

    def __init__(self, known: Collection[int] = ()) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self._known = known

    def encode(self, value: Any, path: str) -> Any:
        """Returns the value as JSON with arrays replaced by their names; TypeError if it cannot be kept."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, (np.ndarray, np.generic)):
            return self._encode_array(value, path)
        if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
            return {"tensor": [value.dtype.name, self.encode(value.numpy(), path)]}
        # Reading one that each replica has for itself is an exchange.
        is_own = isinstance(value, _VARIABLES) and "on_read" not in str(value.synchronization).lower()
        if is_own and id(value) not in self._known:
            is_keras = isinstance(value, keras.Variable)
            return {"variable": [is_keras, self.encode(value.numpy(), path)]}
        if kind in _SEQUENCES.values():
            # The same on every process, whatever its hash seed.
            items = sorted(value, key=repr) if kind in (set, frozenset) else value
            return {kind.__name__: [self.encode(v, f"{path}/{i:04d}") for i, v in enumerate(items)]}
        if kind in _MAPPINGS.values():
            numbered = ((f"{path}/{i:04d}", k, v) for i, (k, v) in enumerate(value.items()))
            pairs = [[self.encode(k, f"{at}/key"), self.encode(v, at)] for at, k, v in numbered]
            return {kind.__name__: pairs}
        if kind is np.random.Generator:
            state = value.bit_generator.state
            return {"generator": [state["bit_generator"], self.encode(state, path)]}
        if kind is deque:
            return {"deque": [value.maxlen, self.encode(list(value), path)]}
        if kind is defaultdict:
            return {
                "defaultdict": [
                    getattr(value.default_factory, "__name__", ""),
                    self.encode(dict(value), path),
                ]
            }
        for name, (known, to_json, _) in _SIMPLE.items():
            if kind is known:
                return {name: to_json(value)}
        return self._encode_other(value, path)

    def _encode_array(self, value: Any, path: str) -> Any:
        if value.dtype.kind == "O":
            return {"objects": [value.shape, self.encode(np.asarray(value).ravel().tolist(), path)]}
        if value.dtype.kind in "biufV" and value.dtype.names is None:
            self.arrays[path] = np.array(value)
            return {"array": path}
        # Texts, times and complex numbers, as their bytes.
        if value.dtype.kind in "USmMc":
            self.arrays[path] = np.frombuffer(value.tobytes(), np.uint8)
            return {"bytes_of": [value.dtype.str, value.shape, path]}
        return self._encode_other(value, path)

    def _encode_other(self, value: Any, path: str) -> Any:
        raise TypeError(
            f"holds a value of type {type(value).__name__}; only numbers, text, times, paths, arrays, "
            "tensors, variables, lists, tuples, sets, deques and dicts can be saved"
        )


class _Describer(Encoder):
    """Encodes what cannot be kept, too, by what a program has put into it."""

    def _encode_other(self, value: Any, path: str) -> Any:
        kind = type(value)
        if not _may_hold_state(value) or path.count("/") > _MAX_DEPTH:
            return {"is": kind.__qualname__}
        try:
            state = value.__getstate__()
        except Exception:  # the user's code runs here and may raise anything
            return {"is": kind.__qualname__}
        return {"state": [kind.__qualname__, self.encode(state, f"{path}/state")]}


def describe(value: Any, known: Collection[int]) -> str:
    """Returns a digest of a value that cannot be kept, by which a change shows; "" for what is no state."""
    describer = _Describer(known)
    try:
        content = describer.encode(value, "")
    except Exception:  # a repr or the iteration of the user's own
        return ""
    if isinstance(content, dict) and "is" in content:
        return ""
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=16)
    for array in describer.arrays.values():
        if array.nbytes <= _MAX_BYTES:
            digest.update(array.tobytes())
    return digest.hexdigest()


def _may_hold_state(value: Any) -> bool:
    """Whether an object is of the user's own class, or of one that collects values."""
    if callable(value) or isinstance(value, _VARIABLES):  # functions, classes, layers, losses, metrics
        return False
    if isinstance(value, (keras.callbacks.Callback, keras.optimizers.Optimizer)):
        return False
    name = type(value).__module__
    top, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None) or ""
    foreign = {*sys.stdlib_module_names, __name__.partition(".")[0]}
    return top in _STATE_MODULES or not (top in foreign or "site-packages" in file)


def decode(value: Any, arrays: Mapping[str, npt.NDArray[Any]], now: Any = None) -> Any:
    """Returns the value that was encoded; a variable in `now`, which it replaces, is assigned and kept."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in _SIMPLE:
        return _SIMPLE[kind][2](content)
    if kind in _SEQUENCES:
        present = list(now) if isinstance(now, (list, tuple)) else []
        present += [None] * (len(content) - len(present))
        items = (decode(item, arrays, old) for item, old in zip(content, present, strict=False))
        return _SEQUENCES[kind](items)
    if kind in _MAPPINGS:
        by_key = now if isinstance(now, Mapping) else {}
        pairs = ((decode(k, arrays), v) for k, v in content)
        return _MAPPINGS[kind]({k: decode(v, arrays, by_key.get(k)) for k, v in pairs})
    return _decode_special(kind, content, arrays, now)


def _decode_special(kind: str, content: Any, arrays: Mapping[str, npt.NDArray[Any]], now: Any) -> Any:
    if kind == "array":
        return np.array(arrays[content])[()]  # a scalar stays a scalar
    if kind == "bytes_of":
        dtype, shape, name = content
        return np.array(np.ndarray(shape, dtype, np.asarray(arrays[name]).tobytes()))[()]
    first, inner = content
    if kind == "defaultdict":
        known = getattr(builtins, first, None)
        kept = known if isinstance(known, type) else None  # a file names no function to call
        factory = now.default_factory if isinstance(now, defaultdict) else kept
        return defaultdict(factory, decode(inner, arrays, now))
    inner = decode(inner, arrays)
    if kind == "deque":
        return deque(inner, first)
    if kind == "objects":
        array = np.empty(len(inner), object)
        array[:] = inner
        return array.reshape(first)
    if kind == "generator":
        generator = np.random.Generator(getattr(np.random, first)())
        generator.bit_generator.state = inner
        return generator
    if kind == "tensor":
        return tf.constant(inner, first)
    if isinstance(now, _VARIABLES):
        now.assign(inner)
        return now
    return keras.Variable(inner, trainable=False) if first else tf.Variable(inner)
