"""An interrupted training by `shardline.fit`, called again, is bit for bit one that was never interrupted."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import shardline
from shardline.trainer.base.errors import RestartError, SettingsError
from shardline.trainer.keras_compat.keras_internals import optimizers
from tests.helpers import custom_train_steps
from tests.helpers.fitting import WIDTH, batches, line, numbers
from tests.helpers.parameters import with_matrix

EPOCHS, STEPS = 5, 4
VALIDATION = numbers(21, seed=1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The seed of `compiled` is also part of a dataset's, which is made before the first model."""
    keras.utils.set_random_seed(1)


def scheduled() -> keras.Model:
    schedule = keras.optimizers.schedules.CosineDecay(
        0.01, EPOCHS * STEPS, warmup_target=0.03, warmup_steps=3
    )
    return compiled(keras.optimizers.SGD(schedule, momentum=0.9))


def averaged() -> keras.Model:
    return compiled(keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8))


def compiled(optimizer: keras.Optimizer) -> keras.Model:
    """Returns a model that draws numbers and keeps moving means."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(numbers()).shuffle(50, seed=1).batch(16)


class Terminated(keras.callbacks.Callback):
    """Has the process asked to end, once, at a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == self.step:
            asked = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
            os.kill(os.getpid(), signal.SIGTERM)
            while asked is not None and not asked.requested:  # a thread says it, maybe some steps later
                os.sched_yield()


k, STOPPING = keras.callbacks, {"patience": 2, "min_delta": 1.0, "restore_best_weights": True}
RUNS: dict[str, tuple[Any, ...]] = {
    "schedule": (scheduled, lambda: [k.EarlyStopping(**STOPPING)], numbers),
    "plateau": (averaged, lambda: [k.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=1.0)], shuffled),
    "scheduler": (averaged, lambda: [k.LearningRateScheduler(lambda n, rate: rate * 0.8)], numbers),
    "none": (lambda: compiled(keras.optimizers.RMSprop()), list, lambda: batches(numbers())),
}


def train(run: str, directory: Path | None, cut: Any = (), **options: Any) -> keras.callbacks.History:
    model, callbacks, data = RUNS[run]
    if isinstance(data(), tuple):
        options["batch_size"] = 16
    arguments = {"epochs": EPOCHS, "validation_data": VALIDATION, "verbose": 0, **options}
    return shardline.fit(model, data(), callbacks=[*callbacks(), *cut], checkpoint_dir=directory, **arguments)


@pytest.fixture(scope="module")
def whole() -> Callable[[str], keras.callbacks.History]:
    """Returns what trains a run without a cut, once."""
    return functools.cache(lambda run: train(run, None))


def check(ours: keras.callbacks.History, whole: keras.callbacks.History) -> None:
    assert ours.epoch == whole.epoch
    assert ours.history == whole.history
    check_states(ours, whole)


def check_states(ours: keras.callbacks.History, whole: keras.callbacks.History) -> None:
    for own, other in zip(ours.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)
    for one, another in zip(optimizers(ours.model), optimizers(whole.model), strict=True):
        for own, other in zip(one.variables, another.variables, strict=True):
            np.testing.assert_array_equal(own.numpy(), other.numpy())


@pytest.mark.parametrize(("run", "steps"), [("schedule", 5), ("plateau", 8)])
def test_a_run_cut_by_its_number_of_steps_resumes(run, steps, whole, tmp_path):
    cut = train(run, tmp_path, max_steps=steps)
    assert int(cut.model.optimizer.iterations) == steps
    ours = train(run, tmp_path)
    assert (len(ours.epoch) < EPOCHS) == (run == "schedule")  # stopped early, in the middle of its patience
    check(ours, whole(run))


@pytest.mark.parametrize(("run", "step"), [("scheduler", 10), ("none", 1)])
def test_a_run_that_was_asked_to_stop_resumes(run, step, whole, tmp_path):
    with pytest.raises(RestartError, match=f"a checkpoint was saved at step {step}; start the same"):
        train(run, tmp_path, [Terminated(step)])
    check(train(run, tmp_path, [Terminated(0)]), whole(run))


def test_without_a_directory_what_was_done_is_lost():
    with pytest.raises(RestartError, match="nothing is saved, as there is no checkpoint_dir"):
        train("none", None, [Terminated(6)])


def test_a_run_that_is_done_is_not_trained_on(whole, tmp_path):
    train("plateau", tmp_path)
    check(train("plateau", tmp_path), whole("plateau"))


KEPT: list[Any] = []


class Builder:
    """A model function that is an object, and one that is a method."""

    def __init__(self, units: int) -> None:
        self.units = units

    def __call__(self) -> keras.Model:
        return self.build(np.ones(3))

    def build(self, bias: Any, **_: Any) -> keras.Model:
        return compiled(keras.optimizers.SGD(0.01))


@pytest.mark.parametrize(
    "make",
    [
        lambda: functools.partial(Builder(4).build, np.arange(3), kernel=keras.optimizers.Adam(0.1)),
        lambda: Builder(4),
        lambda: functools.partial(Builder(4)),
        lambda: lambda: compiled(keras.optimizers.SGD(0.01)),
    ],
)
def test_a_model_function_made_anew_is_the_same_run(make, tmp_path):
    """Its address is another one."""
    for steps in (1, 2):
        kept = make()
        history = shardline.fit(kept, numbers(), max_steps=steps, checkpoint_dir=tmp_path, verbose=0)
        assert int(history.model.optimizer.iterations) == steps
        KEPT.append(kept)  # the next is elsewhere


def test_a_model_function_with_another_argument_is_another_run(tmp_path):
    def fit(values: list[int]) -> None:
        make = functools.partial(Builder(4).build, np.array(values))
        shardline.fit(make, numbers(), max_steps=1, checkpoint_dir=tmp_path, verbose=0)

    fit([1, 2])
    with pytest.raises(SettingsError, match=r"another run: model was .*Builder.build"):
        fit([1, 3])


def test_repeated_data_is_not_decoded_again(tmp_path, capsys):
    calls = []

    def decode(x: Any, y: Any) -> Any:
        (read,) = tf.py_function(lambda value: (calls.append(0), [value])[1], [x], [tf.float32])
        return tf.ensure_shape(read, x.shape), y

    def fit(directory: Path | None, **options: Any) -> keras.callbacks.History:
        data = tf.data.Dataset.from_tensor_slices(numbers(160)).shuffle(50, seed=1).map(decode)
        given = {"steps_per_epoch": 50, "checkpoint_dir": directory, "verbose": 0, **options}
        return shardline.fit(averaged, data.batch(16).repeat().prefetch(2), epochs=2, **given)

    fit(tmp_path, max_steps=97)
    calls.clear()
    capsys.readouterr()
    ours = fit(tmp_path)
    # The last three batches, those read ahead, and the first, which builds the model.
    assert len(calls) < 16 * 10
    assert "skipping 97 batches of train_data" in capsys.readouterr().out
    check_states(ours, fit(None))


def test_a_run_continues_with_more_epochs(tmp_path):
    train("none", tmp_path, epochs=2)
    ours = train("none", tmp_path, epochs=3)
    check(ours, train("none", None, epochs=3))


def test_backup_and_restore_is_the_checkpoint_directory(whole, tmp_path):
    def backup() -> list[keras.callbacks.Callback]:
        return [keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=3)]

    class Broken(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if int(self.model.optimizer.iterations) == 11:
                raise ValueError("power")

    with pytest.raises(
        SettingsError, match="callback Broken failed in on_train_batch_end: ValueError: power"
    ):
        train("none", None, [*backup(), Broken()])
    kept = sorted(path.name for path in (tmp_path / "backup").iterdir())
    assert any("9" in name for name in kept), kept
    seen = []

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(int(self.model.optimizer.iterations))

    check(train("none", None, [*backup(), Steps()]), whole("none"))
    assert seen == [*range(10, EPOCHS * STEPS + 1)]
    assert not (tmp_path / "backup").exists()  # as Keras does with delete_checkpoint


def test_another_model_is_refused(tmp_path):
    train("none", tmp_path, max_steps=3)
    with pytest.raises(SettingsError, match="checkpoint"):
        shardline.fit(line, numbers(), checkpoint_dir=tmp_path, epochs=EPOCHS, verbose=0)


@pytest.mark.parametrize(
    ("again", "steps", "said"),
    [
        (True, None, "and train_data draw from one shuffle"),
        (True, 1, "is shuffled anew each time"),
        (False, 1, ""),
    ],
)
def test_a_validation_on_other_examples_is_reported(again, steps, said, capsys):
    order = tf.data.Dataset.from_tensor_slices(numbers()).shuffle(50, 1, reshuffle_each_iteration=again)
    data = batches(numbers()) if steps else order.skip(32).batch(16)
    held_out = order.batch(16) if steps else order.take(32).batch(16)
    shardline.fit(
        lambda: compiled(keras.optimizers.SGD()), data, validation_data=held_out, validation_steps=steps
    )
    printed = capsys.readouterr().out
    assert f"validation_data {said}" in printed if said else "validation_data" not in printed


class Noise(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x))


@pytest.mark.parametrize(
    ("layer", "directory", "said"),
    [(Noise, True, 1), (Noise, False, 0), (lambda: keras.layers.GaussianNoise(0.1), True, 0)],
)
def test_random_numbers_outside_checkpoints_are_reported(layer, directory, said, tmp_path, capsys):
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((WIDTH,)), layer(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    shardline.fit(build, numbers(), checkpoint_dir=tmp_path if directory else None, verbose=0)
    words = "a step draws random numbers by RandomStandardNormal"
    assert capsys.readouterr().out.count(words) == said


# One with two optimizers, and one whose batch has another form.
ALWAYS = {"wgan_gp", "metric_learning"}


@pytest.mark.parametrize(
    "name",
    with_matrix(
        {name: name for name in custom_train_steps.PROGRAMS}, custom_train_steps.PROGRAMS.keys() - ALWAYS
    ),
)
def test_a_model_built_by_its_own_step_resumes(name, tmp_path):
    program = custom_train_steps.PROGRAMS[name]

    def fit(directory: Path | None, **options: Any) -> keras.callbacks.History:
        arguments = {"epochs": 2, "verbose": 0, "checkpoint_dir": directory, **options}
        return shardline.fit(program.make, program.data(), **arguments)

    cut = fit(tmp_path, max_steps=2)
    assert any(one.built and int(one.iterations) for one in optimizers(cut.model))
    ours, whole = fit(tmp_path), fit(None)
    check_states(ours, whole)
    # A sum of losses that is shown is rounded otherwise from one run to the next, whether cut or not.
    for shown, values in whole.history.items():
        np.testing.assert_allclose(ours.history[shown], values, rtol=1e-6)
