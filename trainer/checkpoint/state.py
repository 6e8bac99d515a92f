"""Training state: variables, callbacks and position of a run, captured on the host and restored."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shardline.trainer.base.errors import DivergedError, ModelError, SettingsError
from shardline.trainer.checkpoint.values import Encoder, decode, describe
from shardline.trainer.cluster.collectives import Collectives
from shardline.trainer.keras_compat.keras_internals import (
    accumulators,
    moving_averages,
    optimizers,
    random_state,
    updating_optimizers,
)
from shardline.trainer.keras_compat.tensorflow_internals import share_memory

Arrays = Mapping[str, tf.Tensor | npt.NDArray[Any]]

# Set by Keras, not by training. Keras negates `min_delta` according to the metric's direction, also in a
# resumed run (keras/src/callbacks/monitor_callback.py, `_set_monitor_op`).
_NOT_STATE = ("_model", "params", "min_delta")
# Numbers of a part of a variable.
_PART = 1 << 16


class CallbackStates:
    """State of callbacks: a callback's own `get_state()`, else the attributes that training changes.

    An attribute is saved when it can be (`values`) and has changed since training began; so a resumed run
    may pass a callback other options (more patience).
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        prefix: str = "",
        variables: Iterable[keras.Variable] = (),
    ):
        """Takes callbacks; their states are named by prefix, class and number.

        `variables` are saved with the model, and not again where an attribute is one of them.
        """
        self._known = {id(variable) for variable in variables}
        # Digests of the attributes that cannot be kept, and those that training has been found to change.
        self._digests: dict[str, str] = {}
        self.lost: set[str] = set()
        self._callbacks: dict[str, keras.callbacks.Callback] = {}
        count: Counter[str] = Counter()
        for callback in callbacks:
            if not isinstance(callback, keras.callbacks.TensorBoard):  # it holds files and a profiler
                kind = type(callback).__name__
                self._callbacks[f"{prefix}{kind}/{count[kind]}"] = callback
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
                    key: decode(value, arrays, None if own else now.get(key)) for key, value in saved.items()
                }
                (callback.set_state if own else now.update)(state)

    def _state(self, name: str, callback: keras.callbacks.Callback) -> dict[str, _Encoded]:
        own = _has_state_methods(callback)
        values = callback.get_state() if own else vars(callback)
        encoded = {}
        for key, value in values.items():
            encoder = Encoder(self._known)
            try:
                content = encoder.encode(value, f"callback/{name}/{key}")
                encoded[key] = _Encoded(content, encoder.arrays)
            except (TypeError, RecursionError) as error:
                kind = type(callback).__name__
                if own:
                    raise SettingsError(f"get_state() of {kind}: {key!r} {error}") from None
                digest = "" if f"{kind}.{key}" in self.lost else describe(value, self._known)
                if digest and self._digests.get(f"{name}.{key}") != digest:
                    self._digests[f"{name}.{key}"] = digest
                    self.lost.add(f"{kind}.{key}")
        return {key: value for key, value in encoded.items() if key not in _NOT_STATE}

    def digests(self, snapshot: Snapshot) -> dict[str, str]:
        """Returns digests of the parts of these callbacks' state in a snapshot: the JSON, and each array."""
        host = json.dumps(self._host(snapshot)).encode()
        parts = {"": host} | {name: _bytes(value) for name, value in self._arrays(snapshot).items()}
        return {name: hashlib.blake2b(part, digest_size=16).hexdigest() for name, part in parts.items()}

    def pack(self, snapshot: Snapshot, names: Collection[str]) -> bytes:
        """Returns the JSON of these callbacks and the arrays of these names as bytes."""
        arrays = [(name, value) for name, value in self._arrays(snapshot).items() if name in names]
        described = [[name, value.dtype.name, value.shape] for name, value in arrays]
        header = json.dumps([self._host(snapshot), described]).encode()
        return b"".join([header, b"\0", *(_bytes(value) for _, value in arrays)])

    def _host(self, snapshot: Snapshot) -> dict[str, Any]:
        return {name: snapshot.host["callbacks"][name] for name in self._callbacks}

    def _arrays(self, snapshot: Snapshot) -> dict[str, npt.NDArray[Any]]:
        prefixes = tuple(f"callback/{name}/" for name in self._callbacks)
        return {
            name: np.asarray(value) for name, value in snapshot.arrays.items() if name.startswith(prefixes)
        }


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.asarray(array, order="C").reshape(-1).view(np.uint8).data


def unpack(data: bytearray) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Returns the content of `CallbackStates.pack`: JSON by callback, and arrays."""
    start = data.index(b"\0")
    host, described = json.loads(data[:start])
    arrays, start = {}, start + 1
    for name, dtype, shape in described:
        arrays[name] = np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape)
        start += arrays[name].nbytes
    return host, arrays


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
        averages = [pair for each in updating_optimizers(model) for pair in moving_averages(each)]
        self._exempt |= {id(average) for variable, average in averages if id(variable) in self._exempt}
        sums = {id(variable) for variable in accumulators(model)}
        self._sums = {name for name, variable in self._variables.items() if id(variable) in sums}
        saved = self._variables.values()
        self._callbacks = CallbackStates(callbacks, variables=saved)
        self._chief_callbacks = CallbackStates(chief_callbacks, "chief/", saved)

    @property
    def lost(self) -> set[str]:
        """Attributes of callbacks, CLASS.NAME, that training has changed and that no checkpoint can keep."""
        return self._callbacks.lost | self._chief_callbacks.lost

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
        callbacks, callback_arrays = self._callbacks.capture()
        chief_callbacks, chief_arrays = self._chief_callbacks.capture()
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
            "callbacks": callbacks | chief_callbacks,
            "stop_training": bool(self._model.stop_training),
            "logs": {name: np.asarray(value).tolist() for name, value in (logs or {}).items()},
            "seconds": seconds,
        }
        return Snapshot(position, {**callback_arrays, **chief_arrays, **arrays}, host)

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

    def gather_callbacks(self, snapshot: Snapshot, collectives: Collectives) -> Snapshot:
        """Returns the snapshot with the callback states of other replicas where they differ. A collective.

        Raises DivergedError when weights or learning rates of the replicas differ.
        """
        if collectives.processes == 1:
            return snapshot
        digests = self._callbacks.digests(snapshot)
        described = json.dumps(digests).encode()
        digest = int.from_bytes(hashlib.blake2b(described, digest_size=6).digest())
        updating = updating_optimizers(self._model)
        rates = sum(float(keras.ops.convert_to_numpy(each.learning_rate)) for each in updating)
        names = [name for name in self._trained_names() if id(self._variables[name]) not in self._exempt]
        squares = sum(_sum_of_squares(self._array(name, snapshot)) for name in names)
        table = collectives.gather_values([digest, squares, rates])
        if len({row[2] for row in table}) > 1:
            raise DivergedError(
                f"the replicas' learning rates are not the same after step {snapshot.position.steps:,}: "
                f"{', '.join(f'{row[2]:.7g}' for row in table)}; a callback that sets one must run on all"
            )
        weights = [row[1] for row in table]
        if max(weights) - min(weights) > 1e-4 * max(weights):  # machines of different types round apart
            raise DivergedError(
                f"the replicas' weights are not the same after step {snapshot.position.steps:,}: the sum of "
                f"their squares is {', '.join(f'{each:.7g}' for each in weights)}; look for a callback that "
                "changes weights, learning rate or what is trained on one replica only"
            )
        if len({row[0] for row in table}) == 1:
            return snapshot
        # What is as on the chief, such as the best weights, is not sent.
        first = json.loads(collectives.gather_bytes(described)[0])
        differs = {name for name, digest in digests.items() if digest != first.get(name)}
        packed = self._callbacks.pack(snapshot, differs) if differs else b""
        arrays, others = dict(snapshot.arrays), {}
        for process, data in enumerate(collectives.gather_bytes(packed, take=collectives.process == 0)):
            if data:
                others[str(process)], values = unpack(data)
                arrays |= {f"process-{process}/{name}": value for name, value in values.items()}
        return replace(snapshot, arrays=arrays, host={**snapshot.host, "others": others})

    def restore(self, snapshot: Snapshot, process: int = 0) -> None:
        """Restores a state with the same variables, on every replica and outside `strategy.run`.

        Takes over the snapshot's arrays, which training then changes.
        Callbacks get the state of those in the process of this number, else of the chief's.
        """
        now = self._model.distribute_strategy.num_replicas_in_sync
        before = snapshot.host["replicas"]
        values = {name: share_memory(snapshot.arrays[name], aligned=True) for name in self._variables}
        if before != now:  # M replicas take N/M each of the gradient sums of N
            sums = {name: np.asarray(values[name]) for name in self._sums}
            values |= {name: (sum_ * (before / now)).astype(sum_.dtype) for name, sum_ in sums.items()}
        self._assign(values)
        host, arrays = snapshot.host["callbacks"], snapshot.arrays
        if own := snapshot.host.get("others", {}).get(str(process)):
            prefix = f"process-{process}/"
            host = own
            arrays = {
                **arrays,
                **{n.removeprefix(prefix): v for n, v in arrays.items() if n.startswith(prefix)},
            }
        self._callbacks.restore(host, arrays)
        self._chief_callbacks.restore(host, arrays)
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
    built = [optimizer for optimizer in optimizers(model) if optimizer.built]
    with model.distribute_strategy.scope():
        random = random_state()
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
