"""Values of callbacks as JSON and arrays, as they stand in a checkpoint, and back."""

from __future__ import annotations

import builtins
import hashlib
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf


def _in_order(values: Collection[Any]) -> list[Any]:
    return sorted(values, key=repr)  # the same on every process, whatever its hash seed


def _generator(state: Mapping[str, Any]) -> np.random.Generator:
    generator = np.random.Generator(getattr(np.random, state["bit_generator"])())
    generator.bit_generator.state = state
    return generator


def _factory_name(value: defaultdict[Any, Any]) -> str:
    return getattr(value.default_factory, "__name__", "")


def _default_dict(factory: str, items: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    known = getattr(builtins, factory, None)
    return defaultdict(known if isinstance(known, type) else None, items)  # a file names no function to call


# Kinds of values by name: the type, its parts, which are encoded in turn, and the value of a list of parts.
_KINDS: Mapping[str, tuple[type, Any, Any]] = {
    "list": (list, list, list),
    "tuple": (tuple, list, tuple),
    "set": (set, _in_order, set),
    "frozenset": (frozenset, _in_order, frozenset),
    "deque": (deque, lambda v: [v.maxlen, *v], lambda p: deque(p[1:], p[0])),
    "defaultdict": (defaultdict, lambda v: [_factory_name(v), dict(v)], lambda p: _default_dict(*p)),
    "bytes": (bytes, lambda v: [v.decode("latin-1")], lambda p: p[0].encode("latin-1")),
    "complex": (complex, lambda v: [v.real, v.imag], lambda p: complex(*p)),
    "datetime": (datetime, lambda v: [v.isoformat()], lambda p: datetime.fromisoformat(*p)),
    "timedelta": (timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda p: timedelta(*p)),
    "path": (type(Path()), lambda v: [str(v)], lambda p: Path(*p)),
    "generator": (np.random.Generator, lambda v: [v.bit_generator.state], lambda p: _generator(*p)),
}
_NAMES = {kind: name for name, (kind, _, _) in _KINDS.items()}
_MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_VARIABLES = (keras.Variable, tf.Variable)
# Of the standard library and of installed packages, these modules hold what a program counts and collects.
_STATE_MODULES = (
    "array",
    "builtins",
    "collections",
    "datetime",
    "decimal",
    "numpy",
    "pandas",
    "random",
    "types",
)
# What is deeper in an object is not looked at, nor are larger arrays.
_MAX_DEPTH, _MAX_BYTES = 8, 1 << 24


class Encoder:
    """Encodes values; `arrays` takes their arrays, with names that begin with the value's `path`.

    The arrays are not copied. `known` are the ids of variables that are saved with the model, and are not
    encoded.
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
        if kind in _NAMES:
            parts = _KINDS[_NAMES[kind]][1](value)
            return {_NAMES[kind]: [self.encode(part, f"{path}/{i:04d}") for i, part in enumerate(parts)]}
        if kind in _MAPPINGS.values():
            numbered = ((f"{path}/{i:04d}", k, v) for i, (k, v) in enumerate(value.items()))
            pairs = [[self.encode(k, f"{at}/key"), self.encode(v, at)] for at, k, v in numbered]
            return {kind.__name__: pairs}
        return self._encode_other(value, path)

    def _encode_array(self, value: Any, path: str) -> Any:
        if value.dtype.kind == "O":
            return {"objects": [value.shape, self.encode(np.asarray(value).ravel().tolist(), path)]}
        if value.dtype.kind in "biufV" and value.dtype.names is None:
            self.arrays[path] = np.asarray(value)
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
        name = type(value).__qualname__
        if not _may_hold_state(value) or path.count("/") > _MAX_DEPTH:
            return {"is": name}
        try:
            parts = value.__reduce_ex__(4)[1:]  # what a copy of it is made of
            state = [list(part) if isinstance(part, Iterator) else part for part in parts]
        except Exception:  # the user's code runs here and may raise anything
            return {"is": name}
        return {"state": [name, self.encode(state, f"{path}/state")]}


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
    if kind in _KINDS:
        type_, parts_of, value_of = _KINDS[kind]
        present = chain(parts_of(now) if type(now) is type_ else (), repeat(None))
        result = value_of([decode(part, arrays, old) for part, old in zip(content, present, strict=False)])
        if isinstance(now, defaultdict) and isinstance(result, defaultdict):
            result.default_factory = now.default_factory
        return result
    if kind in _MAPPINGS:
        by_key = now if isinstance(now, Mapping) else {}
        pairs = ((decode(k, arrays), v) for k, v in content)
        return _MAPPINGS[kind]({k: decode(v, arrays, by_key.get(k)) for k, v in pairs})
    return _decode_special(kind, content, arrays, now)


def _decode_special(kind: str, content: Any, arrays: Mapping[str, npt.NDArray[Any]], now: Any) -> Any:
    if kind == "array":
        return np.asarray(arrays[content])[()]  # a scalar stays a scalar
    if kind == "bytes_of":
        dtype, shape, name = content
        return np.array(np.ndarray(shape, dtype, np.asarray(arrays[name]).tobytes()))[()]
    first, inner = content
    inner = decode(inner, arrays)
    if kind == "objects":
        array = np.empty(len(inner), object)
        array[:] = inner
        return array.reshape(first)
    if kind == "tensor":
        return tf.constant(inner, first)
    if isinstance(now, _VARIABLES):
        now.assign(inner)
        return now
    return keras.Variable(inner, trainable=False) if first else tf.Variable(inner)
