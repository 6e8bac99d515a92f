"""Callbacks of a run of the trainer; that hooks are called as Keras calls them, tests of `fit` ask."""

import keras
import pytest

from shardline.trainer.base.errors import ModelError, RunError, SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.keras_compat.keras_internals import has_batch_hooks
from shardline.trainer.loop.callbacks import callback_scope
from shardline.trainer.train import train
from tests.helpers.history import read_history

# What a callback of this process has seen.
SEEN = []


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


def compiled(dataset, cls=keras.Model):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(dataset.input_shape, dtype="uint8")
    hidden = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs))
    model = cls(inputs, keras.layers.Dense(3, activation="softmax")(hidden))
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@keras.saving.register_keras_serializable("tests")
class OwnLogs(keras.Model):
    """A model whose steps return what no metric has."""

    def train_step(self, data):
        super().train_step(data)
        return {"objective": self.compute_loss(*data, self(data[0])), "twins": keras.ops.ones(2)}

    def test_step(self, data):
        return {"objective": self.compute_loss(*data, self(data[0]))}


def custom_logs(dataset):
    return compiled(dataset, cls=OwnLogs)


def run(dataset, out, model="compiled", callback="ByStep", epochs=2, **changes):
    settings = TrainSettings(
        dataset=str(dataset),
        model_dir=str(out),
        model=f"tests.trainer.test_callback_hooks:{model}",
        callbacks=(f"tests.trainer.test_callback_hooks:{callback}",),
        per_replica_batch_size=16,
        epochs=epochs,
        **changes,
    )
    train(settings, {})


def test_what_a_step_of_ones_own_returns_is_shown_and_kept(dataset, tmp_path, capsys):
    run(dataset, tmp_path, model="custom_logs")

    (row, _) = read_history(tmp_path)
    assert row["twins"] == "[1.0, 1.0]"
    assert 0 < float(row["objective"]) < 2
    assert 0 < float(row["val_objective"]) < 2
    assert "loss" not in row
    assert "objective" in capsys.readouterr().out


class ByStep(keras.callbacks.Callback):
    """A learning rate for each step."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (1 + batch)
        SEEN.append(batch)


def test_a_learning_rate_by_step_is_the_same_in_every_run(dataset, tmp_path):
    for out in ("one", "two"):
        run(dataset, tmp_path / out, callback="ByStep")

    rows = [[row["loss"] for row in read_history(tmp_path / out)] for out in ("one", "two")]
    assert rows[0] == rows[1]
    assert [*range(6)] * 4 == SEEN


def backup(directory):
    return keras.callbacks.BackupAndRestore(directory)


def test_a_callback_that_would_restore_another_state_is_refused(dataset, tmp_path):
    with pytest.raises(SettingsError, match=r"BackupAndRestore.*leave it out"):
        run(dataset, tmp_path, callback="backup")


def test_where_a_callback_runs(tmp_path):
    own = keras.callbacks.Callback()
    assert callback_scope(own) == "all"
    assert callback_scope(keras.callbacks.ModelCheckpoint(tmp_path / "x.keras")) == "chief"
    own.on = "chief"
    assert callback_scope(own) == "chief"
    own.on = "worker"
    with pytest.raises(SettingsError, match="on = 'worker'"):
        callback_scope(own)


@keras.saving.register_keras_serializable("tests")
class NoDict(keras.Model):
    """A model whose step returns no dict."""

    def train_step(self, data):
        super().train_step(data)


def no_dict(dataset):
    return compiled(dataset, cls=NoDict)


def test_a_step_that_returns_no_dict_is_refused(dataset, tmp_path):
    with pytest.raises(ModelError, match="train_step of the model returned NoneType, not a dict"):
        run(dataset, tmp_path, model="no_dict")


def undirected():
    return keras.callbacks.ReduceLROnPlateau("val_strange", mode="auto")


def failing():
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs["val_f1"])


def unreachable():
    def send(epoch, logs):
        raise ConnectionRefusedError(111, "Connection refused")

    return keras.callbacks.LambdaCallback(on_epoch_end=send)


@pytest.mark.parametrize(
    ("callback", "error", "message"),
    [
        ("undirected", SettingsError, r"^callback ReduceLROnPlateau failed in on_epoch_end: .*`mode='max'`"),
        (
            "failing",
            SettingsError,
            r"^callback LambdaCallback failed in .*: KeyError: 'val_f1' \(test_callback_hooks.py, .*\)$",
        ),
        ("unreachable", RunError, "ConnectionRefusedError"),  # may work later
    ],
)
def test_an_exception_of_a_callback_is_one_line(dataset, tmp_path, callback, error, message):
    with pytest.raises(error, match=message):
        run(dataset, tmp_path, callback=callback, epochs=1)


class Overriding(keras.callbacks.TensorBoard):
    def on_train_batch_end(self, batch, logs=None):
        SEEN.append(batch)


@pytest.mark.parametrize(
    ("make", "train", "test"),
    [
        (lambda path: keras.callbacks.TensorBoard(path), False, False),
        (lambda path: keras.callbacks.TensorBoard(path, update_freq=3), True, True),
        (lambda path: keras.callbacks.TensorBoard(path, write_steps_per_second=True), True, True),
        (lambda path: Overriding(path), True, False),
        (lambda path: keras.callbacks.ModelCheckpoint(path / "x.keras"), False, False),
        (lambda path: keras.callbacks.ModelCheckpoint(path / "x.keras", save_freq=2), True, False),
    ],
)
def test_callbacks_that_write_by_epoch_do_not_make_steps_single(tmp_path, make, train, test):
    assert has_batch_hooks(make(tmp_path), "train") is train
    assert has_batch_hooks(make(tmp_path), "test") is test
