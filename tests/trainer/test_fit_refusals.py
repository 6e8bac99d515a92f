"""Refusals of `shardline.fit`: one line that says what to do."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import shardline
from shardline.trainer.base import progress
from shardline.trainer.base.errors import DivergedError, ModelError, SettingsError
from shardline.trainer.loop import build
from tests.helpers import programs
from tests.helpers.fitting import (
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


class Loader:
    """As PyTorch's: length and items, and no array."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter([numbers()] * 3)


class Frame:
    """As pandas': made an array of by itself."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self._array, dtype)


class Sequence(keras.utils.PyDataset):
    """Batches by their number."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        x, y = numbers()
        return x[index * 16 : index * 16 + 16], y[index * 16 : index * 16 + 16]


class Reshuffled(Sequence):
    def on_epoch_end(self) -> None:
        pass


def uncompiled() -> keras.Model:
    return keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])


def needing(width: int) -> keras.Model:
    raise AssertionError(width)


def failing() -> keras.Model:
    raise KeyError("token")


def lists() -> Any:
    x, y = numbers()
    return x.tolist(), y.tolist()


def broken() -> tf.data.Dataset:
    def examples() -> Any:
        yield numbers()
        raise ValueError("no such row")

    spec = (tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None, 1]))
    return tf.data.Dataset.from_generator(examples, output_signature=spec)


def uneven() -> tf.data.Dataset:
    """Batches of which the second, which no model is built on, has too few labels."""

    def examples() -> Any:
        x, y = numbers()
        yield from ((x[:16], y[:count]) for count in (16, 8))

    spec = (tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None, 1]))
    return tf.data.Dataset.from_generator(examples, output_signature=spec)


class Failing(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        return {"loss": data.nothing}


def failing_step() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    model = Failing(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    return model


def with_y(y: Any) -> Any:
    return numbers()[0], y


VALIDATED = {"validation_data": numbers()}

ARGUMENTS = [
    ({"epochs": -2}, "epochs must be a whole number of at least 0, not -2"),
    ({"epochs": True}, "epochs must be a whole number of at least 0, not True"),
    ({"epochs": 3, "initial_epoch": 3}, "initial_epoch must be 0..2, below epochs 3, not 3: epochs is the"),
    ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
    ({"steps_per_epoch": COUNT / 16}, "steps_per_epoch must be a whole number of at least 1, not 3.125"),
    ({"validation_steps": 0, **VALIDATED}, "validation_steps must be a whole number of at least 1, not 0"),
    ({"validation_batch_size": -1, **VALIDATED}, "validation_batch_size must be a whole number of at least"),
    ({"validation_freq": [0, 2], **VALIDATED}, "validation_freq must be a whole number of at least 1, not 0"),
    ({"validation_split": 1.5}, "validation_split must be a number between 0 and 1, not 1.5"),
    ({"validation_split": 0.999}, "train_data has arrays of 0 and 0 examples"),
    ({"verbose": "much"}, "verbose must be \"auto\", 0, 1 or 2, not 'much'"),
    ({"shuffle": "batch"}, "shuffle must be true or false, not 'batch'"),
    ({"learning_rate": 1}, "fit has no argument 'learning_rate'; options are checkpoint_minutes, .*strategy"),
    ({"sample_weight": [1]}, r"no argument 'sample_weight'; give train_data=\(x, y\) or \(x, y, sample_wei"),
    ({"checkpoint_steps": "5"}, "checkpoint_steps must be a whole number, got '5'"),
    ({"strategy": "two_device"}, "strategy must be 'auto', 'one_device'"),
    ({"callbacks": [print]}, "callbacks has to be a list of keras.callbacks.Callback, it holds a builtin_fu"),
    ({"class_weight": {"cat": 1.0}}, "class_weight must be a dict of weights by class index, .* 'cat': 1.0"),
    ({"class_weight": {0: "much"}}, "class_weight must be a dict .* has 0: 'much'"),
    ({"class_weight": [1.0, 2.0]}, r"class_weight must be a dict of weights by class, not \[1.0, 2.0\]"),
    ({"validation_data": 3}, "validation_data is a int, which is no array; pass arrays"),
]


@pytest.mark.parametrize(("options", "message"), ARGUMENTS, ids=[words[:40] for _, words in ARGUMENTS])
def test_an_argument_that_is_none_is_refused(options, message):
    refused(SettingsError, message, line, numbers(), **options)


def refused(error: type[Exception], message: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(error, match=message) as refusal:
        shardline.fit(*arguments, **{"verbose": 0, **options})
    assert "\n" not in str(refusal.value)


DATA = {
    "none": (None, {}, "train_data is a NoneType, which is no array; pass arrays"),
    "loader": (Loader(), {}, "train_data is a Loader, which is no array; .*Dataset.from_generator"),
    "lists": (lists(), {}, "train_data holds a float, which is no array; pass arrays .*np.asarray"),
    "lengths": (with_y(np.zeros(3)), {}, "train_data has arrays of 50 and 3 examples; pass as many in each"),
    "empty": ((np.zeros((0, 3)), np.zeros(0)), {}, "train_data has arrays of 0 and 0 examples; .* at least"),
    "objects": (
        with_y(np.array([{}] * COUNT)),
        {},
        "train_data has an array of Python objects that are not all text; pass numbers",
    ),
    "batch_size": (
        batches(numbers()),
        {"batch_size": 8},
        "batch_size is for arrays, and train_data is a dat",
    ),
    "split": (batches(numbers()), {"validation_split": 0.1}, "validation_split is for arrays; give validat"),
    "function": (lambda: batches(numbers()), {}, r"train_data\(context\), a function of an input context, f"),
    "function_of_arrays": (lambda context: numbers(), {}, r"train_data\(context\) returned tuple, not a tf"),
    "hook": (Reshuffled(), {}, "train_data has on_epoch_end, which a resumed run cannot call as before"),
    "weights": ((*classes(), np.ones(COUNT)), {"class_weight": {0: 2}}, "class_weight needs data of pairs"),
    "broken": (broken(), {"steps_per_epoch": 3}, "the data cannot be read: ValueError: no such row"),
}


@pytest.mark.parametrize(("data", "options", "message"), DATA.values(), ids=DATA)
def test_data_that_cannot_be_trained_on_is_refused(data, options, message):
    refused(SettingsError, message, line, data, **options)


def by_xla() -> keras.Model:
    return line(jit_compile=True)


MODELS = {
    "uncompiled": (uncompiled, numbers(), "returns a model that is not compiled; call model.compile"),
    "no_function": (3, numbers(), "build_model is int, not a function or a keras.Model"),
    "nothing": (lambda: None, numbers(), "build_model returns NoneType, not a keras.Model"),
    "Keras 2": (
        type("Sequential", (), {"__module__": "tf_keras.src.engine"}),
        numbers(),
        "tf.keras is Keras 2",
    ),
    "needing": (needing, numbers(), "build_model failed: TypeError: needing.. missing 1 required positional"),
    "failing": (failing, numbers(), r"build_model failed: KeyError: 'token' \(test_fit_refusals.py, line"),
    "inputs": (line, (np.zeros((COUNT, 4)), numbers()[1]), "cannot be built on batches .* value 3, but rec"),
    "outputs": (line, with_y(np.zeros((COUNT, 2, 2))), r"cannot be built on batches .*\[32,2,2\], \[32,1\]"),
    "lengths": (line, uneven(), r"Incompatible shapes: \[8,1\] vs. \[16,1\]; compare what the model returns"),
    "lengths_by_xla": (by_xla, uneven(), "failed in .*/mse/sub: Incompatible shapes"),
    "labels": (classifier, with_y(np.full(COUNT, 7)), "label value of 7 which is outside the valid range"),
    "step": (failing_step, numbers(), r"train_step .*no attribute 'nothing' \(test_fit_refusals.py, line"),
}


@pytest.mark.parametrize(("build_model", "data", "message"), MODELS.values(), ids=MODELS)
def test_a_model_that_cannot_be_trained_is_refused(build_model, data, message):
    refused(ModelError, message, build_model, data)


def test_a_checkpoint_directory_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    refused(SettingsError, f"{path}", line, numbers(), checkpoint_dir=path)


def test_a_loss_that_is_not_finite_ends_the_training():
    x, y = numbers()
    y[20] = np.nan
    with pytest.raises(DivergedError, match=r"since step 2 \(epoch 1\), whose examples are in batch 2 of"):
        fitted(line, (x, y), batch_size=16)


def test_a_model_of_another_strategy_is_refused():
    program = (
        "import shardline\n"
        "from tests.helpers.fitting import *\n"
        "shardline.strategy(cpu_devices=2)\n"
        "shardline.fit(line(), numbers())\n"
    )
    done = programs.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "ModelError: the model was built outside the strategy of this process; build" in done.stderr
    assert done.returncode == 1


def test_a_model_that_several_processes_would_refuse_is_reported_once():
    build._report_ready_model.cache_clear()
    lines = []
    with progress.sink(lambda event: lines.append(event.text)):
        with shardline.strategy().scope():
            inside = line()
        fitted(inside, numbers())
        fitted(line, numbers())
        assert not lines
        fitted(line(), numbers())
        fitted(line(), numbers())

    assert [text.partition(";")[0] for text in lines] == ["this model trains in one process only"]


def test_only_the_time_to_start_may_differ_once_all_have_started():
    strategy = shardline.strategy()

    assert shardline.strategy(startup_timeout=5.0) is strategy
    with pytest.raises(SettingsError, match="peer_timeout is 7"):
        shardline.strategy(peer_timeout=7.0)


def test_what_makes_arrays_is_taken_as_arrays():
    x, y = numbers()
    ours = fitted(line, (Frame(x), tf.constant(y)), batch_size=16)
    check_alike(ours, fitted_by_keras(line, (x, y), batch_size=16))


def test_arrays_of_double_precision_are_trained_on_as_keras_does():
    data = tuple(array.astype("float64") for array in numbers())
    seen = []

    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            seen.extend(part.dtype for part in data)
            return super().train_step(data)

    def make() -> keras.Model:
        model = Own()
        model.dense = keras.layers.Dense(1)
        model.compile("sgd", "mse")
        return model

    fitted(make, data)
    assert set(seen) == {tf.float32}


def test_a_sequence_of_batches_is_taken_as_keras_takes_it():
    ours = fitted(line, Sequence(), epochs=2, validation_data=Sequence())
    check_alike(ours, fitted_by_keras(line, Sequence(), epochs=2, validation_data=Sequence()))


def test_a_sequence_of_batches_is_shuffled():
    ours = fitted(line, Sequence(), shuffle=True)
    in_order = fitted(line, Sequence())
    assert np.any(ours.model.get_weights()[0] != in_order.model.get_weights()[0])
