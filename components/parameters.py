"""Parameters of a run as three objects: data, training and gate.

The first task of a pipeline (`shardline.components.configure`) makes them of the pipeline's own parameters
and puts each out as a STRUCT for the later tasks. A dict that a task puts out keeps its numbers and quotes.
One that the pipeline builds of its parameters does not: KFP pastes the numbers as text, and a quote breaks
the JSON. `data` is `shardline.components.preprocess.settings.PreprocessSettings`; the other two are here.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from shardline.trainer.errors import SettingsError
from shardline.trainer.settings import TrainSettings

if TYPE_CHECKING:
    from shardline.components.validate.gate import Gate

_T = TypeVar("_T")

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Mapping[str, Any]: "a JSON object",
    Mapping[str, str]: "a JSON object of texts",
    Mapping[str, float]: "a JSON object of numbers",
    tuple[str, ...]: "a JSON array of texts",
}


def field_types(kind: type[Any]) -> dict[str, Any]:
    """Returns the types of a dataclass's fields by name."""
    return typing.get_type_hints(kind)


def check_keys(found: Iterable[str], known: Collection[str], prefix: str = "") -> None:
    """Refuses a key that is not known, with the nearest one; raises SettingsError."""
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(known)}"
            raise SettingsError(f"unknown key {prefix}{key}; {hint}")


def read(kind: type[_T], values: Mapping[str, Any], name: str) -> _T:
    """Returns a dataclass from JSON, with the integers that a STRUCT has made floats.

    `name` is the object's in messages, as in "data"; "" for none. Raises SettingsError when a key is unknown
    or missing, or a value is of the wrong type or out of range.
    """
    types, prefix = field_types(kind), f"{name}." if name else ""
    if not isinstance(values, Mapping):
        raise SettingsError(f"{name} must be a JSON object with {', '.join(types)}, got {values!r}")
    check_keys(values, types, prefix)
    for item in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if item.name not in values and item.default is item.default_factory is MISSING:
            raise SettingsError(f"{prefix}{item.name} is missing")
    return kind(**{key: _restore(value, types[key]) for key, value in values.items()})


def own_fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the values that are fields of a dataclass."""
    return {name: values[name] for name in field_types(kind) if name in values}


def check_types(settings: Any) -> None:
    """Checks that each field of a dataclass holds what its type says; SettingsError when one does not."""
    for name, kind in field_types(type(settings)).items():
        value = getattr(settings, name)
        if not _fits(value, kind):
            raise SettingsError(f"{name} must be {_WORDS[kind]}, got {value!r}")


def _fits(value: Any, kind: Any) -> bool:
    inner = typing.get_args(kind)
    if not inner:
        return kind is Any or type(value) in ((int, float) if kind is float else (kind,))
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(item, inner[0]) for item in value)
    return isinstance(value, Mapping) and all(_fits(item, inner[1]) for item in value.values())


def _restore(value: Any, kind: Any = Any) -> Any:
    """Returns a JSON value as a field has it: a whole float is an integer where one is allowed."""
    if isinstance(value, float) and value.is_integer() and kind in (int, Any):
        return int(value)
    if isinstance(value, Mapping) and kind in (Mapping[str, Any], Any):
        return restore_integers(value)
    if isinstance(value, list) and kind is Any:
        return [_restore(item) for item in value]
    if isinstance(value, list) and typing.get_origin(kind) is tuple:
        return tuple(_restore(item, typing.get_args(kind)[0]) for item in value)
    return value


def restore_integers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with whole floats as integers, all the way down.

    Parameters travel as protobuf Struct, which knows no integers: 64 arrives as 64.0, and keras.layers.Dense
    refuses that. A whole number serves as well where a float is wanted.
    """
    return {name: _restore(value) for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The object `training`: what is trained, and how.

    Attributes:
        model: mnist_cnn, resnet50, keras:NAME, or pkg.module:function.
        hparams: Further keyword arguments of the model function, a JSON object.
        epochs: Passes over the training split.
        per_replica_batch_size: Examples per replica and step; 0 for 16, or what a worker has where that is
            less.
        learning_rate: Given to the model function; 0 keeps the model's own.
        seed: Seed of the weights, the shuffling and the order of the examples, from 0; not of the split.
        train_options: Any further option of the trainer by name, a JSON object:
            {"early_stopping": "val_loss", "checkpoint_steps": 500}.

    Raises:
        SettingsError: A value is of the wrong type or out of range, or the trainer has no such option.
    """

    model: str
    hparams: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 20
    per_replica_batch_size: int = 0
    learning_rate: float = 0.0
    seed: int = 0
    train_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        check_options(self.train_options)
        self.of_trainer(dataset="any")

    def of_trainer(
        self,
        *,
        dataset: str,
        model_dir: str = "",
        usual_batch_size: int = TrainSettings.per_replica_batch_size,
    ) -> TrainSettings:
        """Returns the settings of a training run; without a `model_dir` it is AIP_MODEL_DIR.

        `usual_batch_size` counts examples per replica and step, where per_replica_batch_size is 0.
        """
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.train_options.items()
        }
        return TrainSettings(
            dataset=dataset,
            model=self.model,
            model_dir=model_dir,
            hparams=self.hparams,
            epochs=self.epochs,
            per_replica_batch_size=self.per_replica_batch_size or usual_batch_size,
            learning_rate=self.learning_rate,
            seed=self.seed,
            **options,
        )

    def with_tuned(self, chosen: Mapping[str, Any]) -> TrainingSettings:
        """Returns the settings with a trial's values; one of no setting goes to the model function."""
        own = {name: value for name, value in chosen.items() if name in TUNABLE}
        others = {name: value for name, value in chosen.items() if name not in TUNABLE}
        options = {name: value for name, value in others.items() if name in TRAINER}
        hparams = {name: value for name, value in others.items() if name not in TRAINER}
        return replace(
            self,
            **own,
            hparams={**self.hparams, **hparams},
            train_options={**self.train_options, **options},
        )


#: Policies for rules about a champion that cannot be measured, and the default one.
FIRST_RUNS = ("bless", "block")
FIRST_RUN = "bless"

#: All settings of the trainer, and those that have a parameter of their own and can be tuned.
TRAINER = frozenset(item.name for item in fields(TrainSettings))
TUNABLE = frozenset({"epochs", "per_replica_batch_size", "learning_rate", "seed"})
_OPTIONS = TRAINER - {item.name for item in fields(TrainingSettings)} - {"dataset", "model_dir"}


def check_options(names: Collection[str]) -> None:
    """Checks that all are options of the trainer without a parameter of their own; else SettingsError."""
    for name in names:
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=5, cutoff=0.0)
            raise SettingsError(f"train_options has no {name!r} to set; the nearest are {', '.join(near)}")


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """The object `gate`: when a model is good enough, and where it is published then.

    Attributes:
        min_accuracy: The least test accuracy of the exported model, 0..1; 0 for none.
        rules: Rules beside the gate's own, or, with a name, in their place: ["worst_slice(accuracy) >= 0.8",
            "champion: accuracy >= champion - 0.05", "classes: off"].
        first_run: What becomes of a model where there is no champion yet, or too few test examples: bless or
            block.
        champion_uri: Where a blessed model is published; empty publishes nothing.
        formats: What the exported model is converted into, and measured as: ["onnx", "tflite", "int8"].

    Raises:
        SettingsError: A value is of the wrong type or out of range, a rule cannot be read, or one is about a
            format that is not among these.
    """

    min_accuracy: float = 0.0
    rules: tuple[str, ...] = ()
    first_run: str = FIRST_RUN
    champion_uri: str = ""
    formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        self.gate.check_formats(self.formats)

    @property
    def gate(self) -> Gate:
        """The gate with all of these rules."""
        from shardline.components.validate.gate import Gate

        return Gate(first_run=self.first_run).with_min_accuracy(self.min_accuracy).with_rules(self.rules)


def training_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object `training` of a component's inputs, where a function's name is `model_function`.

    `model` is the artifact there.
    """
    return own_fields(TrainingSettings, {**inputs, "model": inputs["model_function"]})


def gate_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object `gate` of a component's inputs."""
    return own_fields(GateSettings, inputs)
