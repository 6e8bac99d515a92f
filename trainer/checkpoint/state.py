"""Training state: variables, callbacks and position of a run, captured on the host and restored."""

from __future__ import annotations

import builtins
import hashlib
import json
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer.base.errors import DivergedError, ModelError, SettingsError
from shardline.trainer.distribute import Collectives
from shardline.trainer.keras_compat import keras_internals
from shardline.trainer.keras_compat.tensorflow_internals import share_memory

Arrays = Mapping[str, tf.Tensor | npt.NDArray[Any]]

# Set by Keras, not by training. Keras negates `min_delta` according to the metric's direction, also in a
# resumed run (keras/src/callbacks/monitor_callback.py, `_set_monitor_op`).
_NOT_STATE = ("_model", "params", "min_delta")
# Numbers of a part of a variable.
_PART = 1 << 16


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


class _Encoder:
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


class _Describer(_Encoder):
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


def _describe(value: Any, known: Collection[int]) -> str:
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


def _decode(value: Any, arrays: Mapping[str, npt.NDArray[Any]], now: Any = None) -> Any:
    """Returns the value that was encoded; a variable in `now`, which it replaces, is assigned and kept."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in _KINDS:
        type_, parts_of, value_of = _KINDS[kind]
        present = chain(parts_of(now) if type(now) is type_ else (), repeat(None))
        result = value_of([_decode(part, arrays, old) for part, old in zip(content, present, strict=False)])
        if isinstance(now, defaultdict) and isinstance(result, defaultdict):
            result.default_factory = now.default_factory
        return result
    if kind in _MAPPINGS:
        by_key = now if isinstance(now, Mapping) else {}
        pairs = ((_decode(k, arrays), v) for k, v in content)
        return _MAPPINGS[kind]({k: _decode(v, arrays, by_key.get(k)) for k, v in pairs})
    return _decode_special(kind, content, arrays, now)


def _decode_special(kind: str, content: Any, arrays: Mapping[str, npt.NDArray[Any]], now: Any) -> Any:
    if kind == "array":
        return np.asarray(arrays[content])[()]  # a scalar stays a scalar
    if kind == "bytes_of":
        dtype, shape, name = content
        return np.array(np.ndarray(shape, dtype, np.asarray(arrays[name]).tobytes()))[()]
    first, inner = content
    inner = _decode(inner, arrays)
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


class CallbackStates:
    """State of callbacks: a callback's own `get_state()`, else the attributes that training changes.

    An attribute is saved when it can be and has changed since training began; so a resumed run
    may pass a callback other options (more patience).
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        chief_callbacks: Sequence[keras.callbacks.Callback] = (),
        variables: Iterable[keras.Variable] = (),
    ):
        """Takes callbacks of every replica, and of the chief; their states are named by class and number.

        `variables` are saved with the model, and not again where an attribute is one of them.
        """
        self._known = {id(variable) for variable in variables}
        # Digests of the attributes that cannot be kept, and those that training has been found to change.
        self._digests: dict[str, str] = {}
        #: Attributes, CLASS.NAME, that training has changed and that no checkpoint can keep.
        self.lost: set[str] = set()
        self._callbacks: dict[str, keras.callbacks.Callback] = {}
        count: Counter[str] = Counter()
        for callback in (*callbacks, *chief_callbacks):
            if not isinstance(callback, keras.callbacks.TensorBoard):  # it holds files and a profiler
                kind = f"{'chief/' if callback in chief_callbacks else ''}{type(callback).__name__}"
                self._callbacks[f"{kind}/{count[kind]}"] = callback
                count[kind] += 1
        self._initial = {
            name: {key: value.copied() for key, value in self._state(name, callback).items()}
            for name, callback in self._callbacks.items()
        }
        self.lost.clear()

    def capture(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Returns the callbacks' state: JSON by callback, and the arrays it refers to."""
        host: dict[str, Any] = {}
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, callback in self._callbacks.items():
            initial = {} if _has_state_methods(callback) else self._initial[name]
            state = {key: v for key, v in self._state(name, callback).items() if v != initial.get(key)}
            host[name] = {key: value.json for key, value in state.items()}
            for key, value in state.items():
                # As large as the model, and Keras replaces them; other arrays may change during the writing.
                best = key == "best_weights" and isinstance(callback, keras.callbacks.EarlyStopping)
                arrays.update(value.arrays if best else value.copied().arrays)
        return host, arrays

    def restore(self, host: Mapping[str, Any], arrays: Arrays) -> None:
        """Restores the callbacks' state; callbacks without a saved one are unchanged."""
        for name, callback in self._callbacks.items():
            if name in host:
                own, now = _has_state_methods(callback), vars(callback)
                saved = {key: value for key, value in host[name].items() if key not in _NOT_STATE}
                state = {
                    key: _decode(value, arrays, None if own else now.get(key)) for key, value in saved.items()
                }
                (callback.set_state if own else now.update)(state)

    def _state(self, name: str, callback: keras.callbacks.Callback) -> dict[str, _Encoded]:
        own = _has_state_methods(callback)
        values = callback.get_state() if own else vars(callback)
        encoded = {}
        for key, value in values.items():
            encoder = _Encoder(self._known)
            try:
                content = encoder.encode(value, f"callback/{name}/{key}")
                encoded[key] = _Encoded(content, encoder.arrays)
            except (TypeError, RecursionError) as error:
                kind = type(callback).__name__
                if own:
                    raise SettingsError(f"get_state() of {kind}: {key!r} {error}") from None
                digest = "" if f"{kind}.{key}" in self.lost else _describe(value, self._known)
                if digest and self._digests.get(f"{name}.{key}") != digest:
                    self._digests[f"{name}.{key}"] = digest
                    self.lost.add(f"{kind}.{key}")
        return {key: value for key, value in encoded.items() if key not in _NOT_STATE}


@dataclass(frozen=True, eq=False)
class _Encoded:
    """A value as JSON with arrays replaced by their names, and the arrays by name."""

    json: Any
    arrays: Arrays

    def copied(self) -> _Encoded:
        return _Encoded(self.json, {name: np.array(value) for name, value in self.arrays.items()})

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Encoded)
            and self.json == other.json
            and all(np.array_equal(value, other.arrays[name]) for name, value in self.arrays.items())
        )


def _has_state_methods(callback: keras.callbacks.Callback) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


@dataclass(frozen=True)
class Position:
    """Progress of a run.

    Attributes:
        epoch: Epochs trained.
        examples: Examples trained of the next epoch, over all replicas.
        steps: Steps in total.
        closed: False when an epoch has ended, perhaps at a limit, but has not been validated yet, nor have
            callbacks seen its end.
    """

    epoch: int = 0
    examples: int = 0
    steps: int = 0
    closed: bool = True

    @property
    def last_epoch(self) -> int:
        """Number, from 0, of the epoch of the last step."""
        return self.epoch if self.examples else self.epoch - 1


#: Position of a run that has trained nothing.
BEGINNING = Position()


@dataclass(frozen=True, eq=False)
class Snapshot:
    """State of a run at one position.

    Attributes:
        position: The position.
        arrays: Variables by name ("model/0003/conv2d/kernel"), as tensors, and arrays of callbacks.
        host: JSON: the run's record, its replicas, the callbacks' state, whether one has stopped the
            training, the current epoch's metrics (`logs`), and the seconds trained.
    """

    position: Position
    arrays: Mapping[str, tf.Tensor | npt.NDArray[Any]] = field(repr=False)
    host: Mapping[str, Any] = field(default_factory=dict)


class TrainingState:
    """Captures and restores the state of a model and its callbacks.

    The state has the variables of model, optimizers and metrics, random generators, and callbacks. Create it
    from a built model, after `on_train_begin`, which resets callbacks.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        chief_callbacks: Sequence[keras.callbacks.Callback] = (),
    ):
        """Takes the callbacks that run on every replica, and those that run on the chief only."""
        #: The run's IdentityRecord as JSON, saved with its state.
        self.record: Mapping[str, Any] = {}
        self._model = model
        self._variables = _named_variables(model)
        # Variables that each replica has for itself: read in one function, since each read is an exchange.
        self._own = [name for name, each in self._variables.items() if each.synchronization == "on_read"]
        self._read_own = tf.function(
            lambda: [self._variables[name].value for name in self._own], autograph=False
        )
        self._assign_own = tf.function(self._assign, autograph=False)
        started = [each for each in self._variables.values() if each.synchronization != "on_read"]
        # What is not finite at the start, a constant -inf, may stay so, and so may its moving average.
        self._exempt = {id(each) for each in started} - {id(each) for each in finite_variables(started)}
        updating = keras_internals.updating_optimizers(model)
        averages = [pair for each in updating for pair in keras_internals.moving_averages(each)]
        self._exempt |= {id(average) for variable, average in averages if id(variable) in self._exempt}
        sums = {id(variable) for variable in keras_internals.accumulators(model)}
        self._sums = {name for name, variable in self._variables.items() if id(variable) in sums}
        saved = self._variables.values()
        self.callbacks = CallbackStates(callbacks, chief_callbacks, saved)

    @property
    def variables(self) -> dict[str, str]:
        """Type and shape of each variable by name: "float32 3x3x64"."""
        return {
            name: f"{variable.dtype} {'x'.join(map(str, variable.shape)) or 'scalar'}"
            for name, variable in self._variables.items()
        }

    def capture(
        self,
        position: Position,
        logs: Mapping[str, Any] | None = None,
        seconds: float = 0.0,
        *,
        whole: bool = True,
    ) -> Snapshot:
        """Captures the state on the host, variables of each replica merged. A collective.

        In memory of the host a variable is not copied: TensorFlow does that before it is next updated, while
        its tensor is in use. A snapshot that is not `whole` lacks the variables that all replicas share.
        """
        callbacks, callback_arrays = self.callbacks.capture()
        own = dict(zip(self._own, self._read_own(), strict=True))
        arrays = {
            name: own[name] if name in own else _on_host(variable)
            for name, variable in self._variables.items()
            if whole or name in own
        }
        # Divides the sums among the replicas as `restore` does, so that a run that continues from here rounds
        # like one that is restored from here.
        self._assign_own(own)
        host = {
            "run": self.record,
            "replicas": self._model.distribute_strategy.num_replicas_in_sync,
            "callbacks": callbacks,
            "stop_training": bool(self._model.stop_training),
            "logs": {name: np.asarray(value).tolist() for name, value in (logs or {}).items()},
            "seconds": seconds,
        }
        return Snapshot(position, {**callback_arrays, **arrays}, host)

    def first_not_finite(self, snapshot: Snapshot) -> str:
        """Returns the first trainable weight or optimizer's variable that is no longer finite, or ""."""
        trained = set(self._trained_names())
        for name, variable in self._variables.items():
            judged = name in trained or name.startswith("optimizer/")
            if judged and id(variable) not in self._exempt and not _is_finite(self._array(name, snapshot)):
                return name
        return ""

    def _array(self, name: str, snapshot: Snapshot) -> npt.NDArray[Any]:
        value = snapshot.arrays.get(name)
        return np.asarray(_on_host(self._variables[name]) if value is None else value)

    def _trained_names(self) -> list[str]:
        trained = {id(variable) for variable in self._model.trainable_variables}
        return [name for name, variable in self._variables.items() if id(variable) in trained]

    def check_replicas(self, snapshot: Snapshot, collectives: Collectives) -> None:
        """Raises DivergedError when weights or learning rates of the replicas differ. A collective."""
        if collectives.processes == 1:
            return
        updating = keras_internals.updating_optimizers(self._model)
        rates = sum(float(keras.ops.convert_to_numpy(each.learning_rate)) for each in updating)
        names = [name for name in self._trained_names() if id(self._variables[name]) not in self._exempt]
        squares = sum(_sum_of_squares(self._array(name, snapshot)) for name in names)
        weights, of_all = zip(*collectives.gather_values([squares, rates]), strict=True)
        if len(set(of_all)) > 1:
            raise DivergedError(
                f"the replicas' learning rates are not the same after step {snapshot.position.steps:,}: "
                f"{', '.join(f'{each:.7g}' for each in of_all)}; a callback that sets one must run on all"
            )
        if max(weights) - min(weights) > 1e-4 * max(weights):  # machines of different types round apart
            raise DivergedError(
                f"the replicas' weights are not the same after step {snapshot.position.steps:,}: the sum of "
                f"their squares is {', '.join(f'{each:.7g}' for each in weights)}; look for a callback that "
                "changes weights, learning rate or what is trained on one replica only"
            )

    def restore(self, snapshot: Snapshot) -> None:
        """Restores a state with the same variables, on every replica and outside `strategy.run`.

        Takes over the snapshot's arrays, which training then changes. Callbacks get the state of the chief's.
        """
        now = self._model.distribute_strategy.num_replicas_in_sync
        before = snapshot.host["replicas"]
        values = {name: share_memory(snapshot.arrays[name], aligned=True) for name in self._variables}
        if before != now:  # M replicas take N/M each of the gradient sums of N
            sums = {name: np.asarray(values[name]) for name in self._sums}
            values |= {name: (sum_ * (before / now)).astype(sum_.dtype) for name, sum_ in sums.items()}
        self._assign(values)
        self.callbacks.restore(snapshot.host["callbacks"], snapshot.arrays)
        self._model.stop_training = snapshot.host["stop_training"]

    def _assign(self, values: Mapping[str, tf.Tensor]) -> None:
        """Assigns the values; TensorFlow divides sums over the replicas (metrics) among them."""
        for name, value in values.items():
            self._variables[name].assign(value)


def finite_variables(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns the variables that are finite now."""
    return [each for each in variables if _is_finite(np.asarray(_on_host(each)))]


def _on_host(variable: keras.Variable) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.identity(tf.convert_to_tensor(variable))


def _is_finite(value: npt.NDArray[Any]) -> bool:
    # A float64 sum of finite float32 is finite, and needs one pass over the data.
    with np.errstate(invalid="ignore"):
        floats = keras.backend.is_float_dtype(value.dtype.name)
        return not floats or bool(np.isfinite(np.sum(value, dtype=np.float64)))


def _sum_of_squares(value: npt.NDArray[Any]) -> float:
    # In parts, which fit a core's own cache: the squares of all would take twice the memory.
    flat = value.reshape(-1)
    parts = (flat[at : at + _PART].astype(np.float64) for at in range(0, flat.size, _PART))
    return float(sum(np.dot(part, part) for part in parts))


def restore_model(model: keras.Model, snapshot: Snapshot) -> None:
    """Assigns the weights of a snapshot to a model for evaluation; its optimizer may be another one."""
    for name, variable in _numbered("model", model.variables):
        value = snapshot.arrays.get(name)
        if value is None or value.shape != tuple(variable.shape):
            saved = "none" if value is None else f"one of shape {value.shape}"
            raise ModelError(
                f"the model's {name} has shape {tuple(variable.shape)}, the checkpoint has {saved}; "
                "evaluate with the model and hparams of the training"
            )
        variable.assign(share_memory(value, aligned=True))


def _named_variables(model: keras.Model) -> dict[str, keras.Variable]:
    # No step uses an optimizer that is not built by now: `compile()` without one creates a default.
    built = [optimizer for optimizer in keras_internals.optimizers(model) if optimizer.built]
    with model.distribute_strategy.scope():
        random = keras_internals.random_state()
    groups = {
        "model": model.variables,
        "optimizer": [variable for optimizer in built for variable in optimizer.variables],
        "metric": [variable for metric in model.metrics for variable in metric.variables],
        "random": [random],
    }
    first: dict[int, tuple[str, keras.Variable]] = {}
    for group, variables in groups.items():
        for name, variable in _numbered(group, variables):
            first.setdefault(id(variable), (name, variable))
    return dict(first.values())


def _numbered(group: str, variables: Sequence[keras.Variable]) -> Iterator[tuple[str, keras.Variable]]:
    for index, variable in enumerate(variables):
        # Keras appends numbers that count the layers of the process, not of the model.
        readable = re.sub(r"_\d+(?=[_/]|$)", "", variable.path)
        yield f"{group}/{index:04d}/{readable}", variable
