"""End of an epoch and of a run: when what is saved, and that the metrics are those of the saved model."""

import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base.errors import DivergedError, RestartError, SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.loop.step import EvaluationLoop
from shardline.trainer.models.saving import load_model
from shardline.trainer.preemption import Preemption
from shardline.trainer.train import train
from tests.helpers.datasets import read_examples
from tests.helpers.history import read_history

HERE = "tests.trainer.test_end_of_training:"
LOSS = "sparse_categorical_crossentropy"


def run(dataset, out, **changes):
    changes = {"epochs": 3, **changes}
    changes["model"] = HERE + changes.get("model", "steady")
    changes["callbacks"] = tuple(HERE + name for name in changes.get("callbacks", ()))
    settings = TrainSettings(dataset=str(dataset), model_dir=str(out), **changes)
    return train(settings, {})


def evaluated(dataset, out):
    """Returns loss and accuracy of the saved model on the validation split, by plain Keras."""
    _, encoded, labels = zip(*read_examples(dataset, "validation"), strict=True)
    images = np.stack([tf.io.decode_png(one).numpy() for one in encoded])
    model = load_model(out / "model.keras")
    model.compile("sgd", LOSS, metrics=["accuracy"])
    return model.evaluate(images, np.array(labels), batch_size=16, verbose=0)


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """Where a run of `steady` is that nothing has disturbed."""
    directory = tmp_path_factory.mktemp("whole")
    run(dataset, directory, model="steady")
    return directory


def written(out):
    metrics = json.loads((out / "metrics.json").read_text())
    return [metrics["val_loss"], metrics["val_accuracy"]]


def dense(dataset, optimizer, metrics=("accuracy",)):
    first = [keras.Input(dataset.input_shape, dtype="uint8"), keras.layers.Rescaling(1 / 255)]
    dense = [keras.layers.Dense(8, "relu"), keras.layers.Dense(dataset.num_classes, "softmax")]
    model = keras.Sequential([*first, keras.layers.Flatten(), *dense])
    model.compile(optimizer, LOSS, metrics=list(metrics))
    return model


def steady(dataset):
    return dense(dataset, keras.optimizers.SGD(0.05))


def exponential_average(dataset):
    return dense(dataset, keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9))


class Spoiler(keras.callbacks.Callback):
    """Spoils the weights at the beginning of the last epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            self.model.set_weights([0 * one for one in self.model.get_weights()])


@pytest.mark.parametrize(
    ("model", "patience"),
    [pytest.param("exponential_average", 1, id="stops"), pytest.param("steady", 9, id="does not stop")],
)
def test_the_metrics_are_those_of_the_model_that_is_saved(dataset, tmp_path, model, patience):
    """Early stopping puts the best weights back at the end, after the averages, stopped or not."""
    changes = {"early_stopping": "val_loss", "early_stopping_patience": patience, "callbacks": ("Spoiler",)}
    run(dataset, tmp_path, model=model, **changes)

    rows = read_history(tmp_path)
    assert float(rows[2]["val_loss"]) > float(rows[1]["val_loss"])
    np.testing.assert_allclose(written(tmp_path), evaluated(dataset, tmp_path), rtol=1e-5)
    assert written(tmp_path)[0] == float(rows[1]["val_loss"])


@pytest.mark.parametrize(("model", "evaluations"), [("steady", 3), ("exponential_average", 4)])
def test_final_weights_are_evaluated_once(dataset, tmp_path, monkeypatch, model, evaluations):
    """Moving averages are other weights than those of the last epoch."""
    begun = []
    begin = EvaluationLoop.begin
    monkeypatch.setattr(EvaluationLoop, "begin", lambda self: begun.append(1) or begin(self))
    run(dataset, tmp_path, model=model)

    assert len(begun) == evaluations
    np.testing.assert_allclose(written(tmp_path), evaluated(dataset, tmp_path), rtol=1e-5)


def averages(dataset, pattern, **options):
    model = dense(dataset, "sgd")
    default, other = (keras.optimizers.SGD(0.05, use_ema=True, **options) for _ in range(2))
    optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(default, {pattern: other}))
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    return model


def two_averages(dataset):
    return averages(dataset, ".*kernel", ema_momentum=1.0)


def no_default(dataset):
    """Its default optimizer, which keeps averages, has no weights to update."""
    return averages(dataset, ".*")


def test_averages_of_several_optimizers_are_put_in(dataset, tmp_path):
    """Momentum 1 keeps the average at the weights after the first step."""
    run(dataset, tmp_path / "one", model="two_averages", max_steps=1)
    run(dataset, tmp_path / "all", model="two_averages")

    first, last = (load_model(tmp_path / name / "model.keras").get_weights() for name in ("one", "all"))
    for one, other in zip(first, last, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(written(tmp_path / "all"), evaluated(dataset, tmp_path / "all"), rtol=1e-5)


def test_averages_where_there_are_none_of_some_weights(dataset, tmp_path):
    run(dataset, tmp_path, model="no_default", max_steps=1)

    np.testing.assert_allclose(written(tmp_path), evaluated(dataset, tmp_path), rtol=1e-5)


class Crash(keras.callbacks.Callback):
    at = ""

    def on_epoch_end(self, epoch, logs=None):
        if (self.at, epoch) == ("epoch_end", 1):
            raise ZeroDivisionError("a callback of the user's")

    def on_test_begin(self, logs=None):
        if self.at == "test_begin":
            raise ZeroDivisionError("in the validation")


@pytest.mark.parametrize("at", ["epoch_end", "test_begin"])
def test_a_crash_in_a_callback_or_the_validation_loses_nothing(dataset, tmp_path, monkeypatch, whole, at):
    monkeypatch.setattr(Crash, "at", at)
    with pytest.raises(SettingsError, match="callback Crash failed in on_"):
        run(dataset, tmp_path, model="steady", callbacks=("Crash",))
    monkeypatch.setattr(Crash, "at", "")
    run(dataset, tmp_path, model="steady", callbacks=("Crash",))

    rows = [[{**row, "seconds": 0} for row in read_history(out)] for out in (tmp_path, whole)]
    assert rows[0] == rows[1]
    assert written(tmp_path) == written(whole)


def test_a_crash_at_the_end_of_an_epoch_that_was_cut_short(dataset, tmp_path, monkeypatch):
    """Its end comes when the run is started again, unless the epoch goes on."""
    monkeypatch.setattr(Crash, "at", "epoch_end")
    with pytest.raises(SettingsError, match="callback Crash failed in on_"):
        run(dataset, tmp_path, model="steady", callbacks=("Crash",), max_steps=9)
    monkeypatch.setattr(Crash, "at", "")
    assert [row["examples"] for row in read_history(tmp_path)] == ["96"]
    run(dataset, tmp_path, model="steady", callbacks=("Crash",), max_steps=9)
    assert [row["examples"] for row in read_history(tmp_path)] == ["96", "48"]
    run(dataset, tmp_path, model="steady", callbacks=("Crash",))
    assert [row["examples"] for row in read_history(tmp_path)] == ["96", "96", "96"]


def test_a_run_that_is_asked_to_stop_during_a_validation_does(dataset, tmp_path, capsys, monkeypatch):
    """Looks of a run with steps of the validation one by one: six of the training, one of the validation."""
    looks = itertools.count()
    monkeypatch.setattr(Preemption, "requested", property(lambda self: next(looks) >= 6))
    with pytest.raises(RestartError, match="a checkpoint was saved at step 6"):
        run(dataset, tmp_path, model="steady", steps_per_execution=1, callbacks=("ByTestStep",))
    monkeypatch.undo()
    assert not (tmp_path / "history.csv").exists()
    run(dataset, tmp_path, model="steady")

    assert "resuming after step 6, " in capsys.readouterr().out
    assert [row["examples"] for row in read_history(tmp_path)] == ["96"] * 3


class ByTestStep(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        pass


@keras.saving.register_keras_serializable("tests")
class Infinite(keras.optimizers.schedules.LearningRateSchedule):
    """Infinite from the sixth update on."""

    def __call__(self, step):
        return keras.ops.where(step >= 5, np.inf, 0.01)

    def get_config(self):
        return {}


def explodes_at_the_end(dataset):
    """Its sixth update, the last of the first epoch, makes every weight infinite, and no loss before."""
    return dense(dataset, keras.optimizers.SGD(Infinite()))


def test_weights_that_are_not_finite_are_never_saved(dataset, tmp_path):
    message = r"is not finite after step 6, .* the checkpoint of step 3 is finite and is kept"
    for _ in range(2):
        with pytest.raises(DivergedError, match=message):
            run(dataset, tmp_path, model="explodes_at_the_end", checkpoint_steps=3)
    assert [path.stem for path in tmp_path.glob("checkpoints/*.index")] == ["ckpt-3"]


def accumulates_nan(dataset):
    """Its gradients are not finite, though its loss is, and every fourth step takes them."""
    model = dense(dataset, keras.optimizers.SGD(0.01, gradient_accumulation_steps=4))
    inputs, hidden = model.inputs, model.layers[-2].output
    nothing = keras.ops.sqrt(0.0 * keras.ops.relu(hidden))
    outputs = keras.layers.Dense(dataset.num_classes, "softmax")(hidden + nothing)
    own = keras.Model(inputs, outputs)
    own.compile(model.optimizer, LOSS)
    return own


def test_sums_of_gradients_that_are_not_finite_are_never_saved(dataset, tmp_path):
    with pytest.raises(DivergedError, match=r"optimizer/.* is not finite after step 2"):
        run(dataset, tmp_path, model="accumulates_nan", checkpoint_steps=2)
    assert not list(tmp_path.glob("checkpoints/*.index"))


@keras.saving.register_keras_serializable("tests")
class NoLoss(keras.Model):
    """A model with a step of its own that returns no loss, and whose weights become infinite in step 3."""

    def train_step(self, data):
        super().train_step(data)
        factor = keras.ops.where(self.optimizer.iterations == 3, np.inf, 1.0)
        self.layers[-1].bias.assign(self.layers[-1].bias * factor + factor - 1)
        return {"accuracy": keras.ops.ones(())}


def no_loss(dataset):
    model = dense(dataset, "sgd")
    own = NoLoss(model.inputs, model.outputs)
    own.compile("sgd", LOSS)
    return own


def test_a_step_that_returns_no_loss_is_checked_by_its_weights(dataset, tmp_path):
    with pytest.raises(DivergedError, match="since step 3"):  # the smaller one at the epoch's end
        run(dataset, tmp_path, model="no_loss", per_replica_batch_size=40, steps_per_execution=6)


@keras.saving.register_keras_serializable("tests")
class Masked(keras.layers.Layer):
    """Has a constant -inf, a weight that stays so, and a state that becomes so."""

    def build(self, shape):
        excluded = keras.initializers.Constant(-np.inf)
        self.constant = self.add_weight(shape=(), initializer=excluded, trainable=False)
        self.learned = self.add_weight(shape=(), initializer=excluded)
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.seen.assign(self.constant)
        return inputs * (1 + keras.ops.exp(self.constant) + keras.ops.exp(self.learned))


def masked(dataset, kind=keras.Model):
    model = dense(dataset, "sgd")
    outputs = model.layers[-1](Masked()(model.layers[-2].output))
    own = kind(model.inputs, outputs)
    own.compile(keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True), LOSS)
    return own


@keras.saving.register_keras_serializable("tests")
class QuietlyMasked(keras.Model):
    def train_step(self, data):
        super().train_step(data)
        return {"accuracy": keras.ops.ones(())}


def quietly_masked(dataset):
    return masked(dataset, QuietlyMasked)


@pytest.mark.parametrize("model", ["masked", "quietly_masked"])
def test_what_is_not_finite_at_the_start_is_trained_saved_and_resumed(dataset, tmp_path, model):
    run(dataset, tmp_path, model=model, max_steps=4, checkpoint_steps=2)
    run(dataset, tmp_path, model=model)

    (layer,) = (item for item in load_model(tmp_path / "model.keras").layers if isinstance(item, Masked))
    assert [float(weight) for weight in layer.weights] == [-np.inf] * 3


@keras.saving.register_keras_serializable("tests")
class Undefined(keras.metrics.SparseCategoricalAccuracy):
    def result(self):
        return super().result() * np.nan


def undefined_metric(dataset):
    return dense(dataset, "sgd", metrics=["accuracy", Undefined(name="undefined")])


def test_a_metric_that_is_not_finite_is_null(dataset, tmp_path, capsys):
    run(dataset, tmp_path, model="undefined_metric", epochs=1)

    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["undefined"] is None
    assert metrics["val_undefined"] is None
    assert metrics["val_accuracy"] >= 0
    assert "warning: undefined, val_undefined of the model is not finite" in capsys.readouterr().out


def test_an_early_stopped_run_resumes_with_more_patience(dataset, tmp_path, capsys):
    changes = {"early_stopping": "val_loss", "callbacks": ("Spoiler",), "epochs": 6, "model": "steady"}
    for _ in range(2):
        run(dataset, tmp_path, early_stopping_patience=1, **changes)
        assert len(read_history(tmp_path)) == 3
    assert "a callback has stopped it" in capsys.readouterr().out
    run(dataset, tmp_path, early_stopping_patience=9, **changes)

    assert len(read_history(tmp_path)) == 6


class Multiplied(keras.callbacks.Callback):
    """Halves the learning rate at the beginning of each epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.5


def test_what_a_callback_does_at_the_beginning_of_an_epoch_is_not_done_twice(dataset, tmp_path):
    changes = {"model": "steady", "callbacks": ("Multiplied",)}
    run(dataset, tmp_path / "whole", **changes)
    for steps in (9, 12, 0):
        run(dataset, tmp_path / "parts", max_steps=steps, **changes)

    assert written(tmp_path / "whole") == written(tmp_path / "parts")
