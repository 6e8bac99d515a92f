"""`shardline.fit` in one process trains as `keras.Model.fit` does: histories and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import custom_train_steps
from tests.helpers.fitting import (
    BATCH,
    COUNT,
    WIDTH,
    batches,
    check_alike,
    classes,
    classifier,
    fitted,
    fitted_by_keras,
    line,
    numbers,
)
from tests.helpers.parameters import with_matrix


@dataclass(frozen=True)
class Case:
    """A model, data and arguments that both take."""

    make: Callable[[], keras.Model]
    data: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6


def check(case: Case) -> None:
    options = {"epochs": 3, **case.options}
    if isinstance(case.data(), tuple):
        options = {"batch_size": BATCH, **options}
    ours = fitted(case.make, case.data(), **options)
    check_alike(ours, fitted_by_keras(case.make, case.data(), **options), tolerance=case.tolerance)


def functional(outputs: Any, *, loss: Any = "mse", cls: type = keras.Model, **options: Any) -> keras.Model:
    """Returns a compiled model of what a function makes of the input."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((WIDTH,), name="x")
    model = cls(inputs, outputs(inputs))
    model.compile(keras.optimizers.SGD(0.05), loss, **options)
    return model


def dense(name: str | None = None, units: int = 1) -> keras.layers.Layer:
    return keras.layers.Dense(units, name=name)


def normalized() -> keras.Model:
    def outputs(x: Any) -> Any:
        x = keras.layers.BatchNormalization()(keras.layers.Dense(4)(x))
        return dense()(keras.layers.Dropout(0.3, seed=7)(x))

    return functional(outputs)


def averaged_often() -> keras.Model:
    return line(
        optimizer=keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)
    )


def mixed() -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return functional(lambda x: keras.layers.Activation("linear", dtype="float32")(dense()(x)))
    finally:
        keras.config.set_dtype_policy(before)


def two_outputs(**options: Any) -> keras.Model:
    return functional(
        lambda x: {"a": dense("a")(x), "b": dense("b")(x)},
        loss={"a": "mse", "b": "mae"},
        loss_weights={"a": 1.0, "b": 0.5},
        metrics={"a": ["mae"], "b": ["mse"]},
        **options,
    )


def two_inputs() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = {"left": keras.Input((WIDTH,), name="left"), "right": keras.Input((WIDTH,), name="right")}
    joined = keras.layers.Concatenate()([inputs["left"], inputs["right"]])
    model = keras.Model(inputs, dense()(joined))
    model.compile("sgd", "mse")
    return model


def listed_inputs() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((WIDTH,)), keras.Input((WIDTH,))]
    joined = keras.layers.Concatenate()(inputs)
    model = keras.Model(inputs, [dense("a")(joined), dense("b")(inputs[1])])
    model.compile(keras.optimizers.SGD(0.05), ["mse", "mae"])
    return model


def stateful() -> keras.Model:
    """A recurrent model of batches of one size, whose states go on from one to the next."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Reshape((WIDTH, 1)), keras.layers.LSTM(4, stateful=True), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input(batch_shape=(BATCH, WIDTH)), *layers])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def reading() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((), dtype="string")
    words = keras.layers.StringLookup(vocabulary=["a", "b c"])(inputs)
    model = keras.Model(inputs, dense()(keras.layers.Embedding(4, 3)(words)))
    model.compile("sgd", "mse")
    return model


def texts() -> tuple[Any, Any]:
    return np.array((["a", "b c", "other"] * COUNT)[:COUNT], object), numbers()[1]


class Penalized(keras.layers.Layer):
    """Adds a loss of its own."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def penalized() -> keras.Model:
    return functional(lambda x: Penalized()(keras.layers.Dense(1, kernel_regularizer="l2")(x)))


def one_hot() -> tuple[Any, Any]:
    x, y = classes()
    return x, keras.utils.to_categorical(y, 3)


def weighted() -> tuple[Any, ...]:
    return (*numbers(), np.linspace(0.0, 2.0, COUNT, dtype="float32"))


def targets() -> tuple[Any, Any]:
    x, y = numbers()
    return x, {"a": y, "b": -y}


def in_lists() -> tuple[Any, Any]:
    x, targets_ = whole_batches()
    return [x, -x], [targets_["a"], targets_["b"]]


class Listed(keras.utils.PyDataset):
    """Batches whose inputs, and targets, are lists."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        rows = slice(16 * index, 16 * index + 16)
        inputs, targets_ = in_lists()
        return [one[rows] for one in inputs], [one[rows] for one in targets_]


def without_rest() -> tuple[Any, Any]:
    x, y = numbers()
    return x[:48], y[:48]


def pairs() -> tuple[Any, Any]:
    x, y = numbers()
    return {"left": x, "right": -x}, y


def whole_batches() -> tuple[Any, Any]:
    x, targets_ = targets()
    return x[:48], {name: each[:48] for name, each in targets_.items()}


def weighted_by_name() -> tuple[Any, ...]:
    weights = np.linspace(0.0, 2.0, 48, dtype="float32")
    return (*whole_batches(), {"a": weights, "b": weights[::-1]})


def hinged() -> keras.Model:
    return functional(lambda x: dense()(x), loss="hinge")


def signs() -> tuple[Any, Any]:
    x, y = numbers()
    return x, np.where(y > 0, 1, -1).astype("float32")


def as_dataset(data: Callable[[], Any]) -> Callable[[], tf.data.Dataset]:
    return lambda: batches(data())


def repeated() -> tf.data.Dataset:
    return batches(numbers()).repeat()


VALIDATION = numbers(21, seed=1)
CLASS_WEIGHT = {0: 0.5, 2: 3.0}

CASES = {
    "dataset": Case(line, as_dataset(numbers)),
    "batch_size_default": Case(line, numbers, {"batch_size": None}),
    "validation_split_weights": Case(line, weighted, {"validation_split": 0.25}),
    "validation_freq": Case(
        line, numbers, {"validation_data": VALIDATION, "validation_freq": 2, "epochs": 4}
    ),
    "validation_steps": Case(
        line, numbers, {"validation_data": VALIDATION, "validation_batch_size": 5, "validation_steps": 2}
    ),
    "validation_steps_repeated": Case(
        line, numbers, {"validation_data": batches(VALIDATION, 5).repeat(), "validation_steps": 3}
    ),
    "class_weight_dataset": Case(classifier, as_dataset(classes), {"class_weight": CLASS_WEIGHT}),
    "class_weight_one_hot": Case(
        lambda: classifier(loss="categorical_crossentropy"), one_hot, {"class_weight": CLASS_WEIGHT}
    ),
    "class_weight_signs": Case(hinged, signs, {"class_weight": {0: 0.25, 1: 4.0}}),
    "sample_weight": Case(lambda: line(weighted_metrics=["mse"]), weighted),
    "sample_weight_by_name": Case(two_outputs, weighted_by_name),
    "steps_per_epoch_repeated": Case(line, repeated, {"steps_per_epoch": 3}),
    "initial_epoch": Case(line, numbers, {"initial_epoch": 2, "epochs": 4, "validation_data": VALIDATION}),
    "steps_per_execution": Case(
        lambda: line(steps_per_execution=3), numbers, {"validation_data": VALIDATION}
    ),
    "lists_of_inputs_and_outputs": Case(listed_inputs, in_lists, {"validation_split": 1 / 3}),
    "stateful": Case(stateful, without_rest),
    "no_epochs": Case(line, numbers, {"epochs": 0, "validation_data": VALIDATION}),
    "texts": Case(reading, texts),
    "several_inputs_dataset": Case(two_inputs, as_dataset(pairs)),
    "normalization_and_dropout": Case(normalized, numbers, {"validation_data": VALIDATION}),
    "moving_average_written": Case(averaged_often, numbers, {"validation_data": VALIDATION}),
    "mixed_precision": Case(mixed, numbers, {"validation_data": VALIDATION}, tolerance=1e-4),
    "added_loss": Case(penalized, numbers, {"validation_data": VALIDATION}),
    "run_eagerly": Case(lambda: line(run_eagerly=True), numbers, {"validation_data": VALIDATION}),
}


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_fit_is_that_of_keras(case):
    check(case)


@pytest.mark.parametrize(
    "name",
    with_matrix(
        {name: name for name in custom_train_steps.PROGRAMS},
        custom_train_steps.PROGRAMS.keys() - {"diffusion", "distillation"},
    ),
)
def test_a_model_is_built_by_its_own_step_as_keras_does(name):
    program = custom_train_steps.PROGRAMS[name]
    options = {"epochs": 2, "validation_data": program.data()} if program.validated else {"epochs": 2}
    ours = fitted(program.make, program.data(), **options)
    check_alike(ours, fitted_by_keras(program.make, program.data(), **options), tolerance=1e-5)


def test_a_model_is_built_by_its_own_step_where_that_runs_eagerly():
    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = custom_train_steps.Autoencoder(steady=False)
        model.compile(keras.optimizers.Adam(0.01), run_eagerly=True)
        return model

    check_alike(
        fitted(make, custom_train_steps.examples()), fitted_by_keras(make, custom_train_steps.examples())
    )


def test_lists_of_a_sequence_are_several_inputs_too():
    """Keras ends in an error of tf.data."""
    theirs = fitted_by_keras(listed_inputs, in_lists(), batch_size=16)
    check_alike(fitted(listed_inputs, Listed()), theirs)


def test_an_epoch_of_some_steps_continues_in_the_next():
    """Keras cuts the epoch short where the data ends, with a warning, and begins with a new pass."""
    ours = fitted(line, as_dataset(numbers)(), steps_per_epoch=3, epochs=4)
    check_alike(ours, fitted_by_keras(line, repeated(), steps_per_epoch=3, epochs=4))


def test_losses_of_several_outputs_are_means_over_the_examples():
    """Keras averages them over batches, of any size of the last (keras-team/keras#19363)."""
    history = fitted(two_outputs, targets(), batch_size=BATCH, epochs=1).history
    theirs = fitted_by_keras(two_outputs, targets(), batch_size=BATCH, epochs=1).history
    total = history["a_loss"][0] + 0.5 * history["b_loss"][0]
    assert total == pytest.approx(history["loss"][0], rel=1e-5)
    assert theirs["a_loss"][0] + 0.5 * theirs["b_loss"][0] != pytest.approx(theirs["loss"][0], rel=1e-3)
    assert history["a_mae"] == pytest.approx(theirs["a_mae"])


def again(model: keras.Model) -> keras.Model:
    """Compiles a model anew with fewer weights to train."""
    model.layers[0].trainable = False
    model.compile("adam", "mse", metrics=["mae"])
    return model


def test_a_model_is_trained_further_by_either():
    ours, theirs = normalized(), normalized()
    fitted(ours, numbers(), epochs=2)
    theirs.fit(*numbers(), epochs=2, verbose=0, shuffle=False)
    for train in (fitted, fitted_by_keras):
        found, expected = train(again(ours), numbers()), fitted_by_keras(lambda: again(theirs), numbers())
        check_alike(found, expected)


def test_options_of_the_optimizer_are_those_of_keras():
    def accumulating() -> keras.Model:
        return line(optimizer=keras.optimizers.SGD(0.05, gradient_accumulation_steps=2))

    model = line()
    for _ in range(2):
        ours = fitted(model, numbers(), batch_size=10, gradient_accumulation_steps=2)
    theirs = accumulating()
    for _ in range(2):
        expected = fitted_by_keras(lambda: theirs, numbers(), batch_size=10)
    check_alike(ours, expected)
