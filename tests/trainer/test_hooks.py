"""Hooks of callbacks: order, number, arguments, `params` and logs are those of `keras.Model.fit`."""

import keras
import pytest

from shardline.trainer.callbacks import place_of
from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.errors import ModelError, RunError, SettingsError
from shardline.trainer.settings import TrainSettings
from shardline.trainer.train import train
from tests.helpers.history import read_history

BATCH = 16


def compiled(dataset, cls=keras.Model):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(dataset.input_shape if dataset else (12, 12, 3), dtype="uint8")
    hidden = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs))
    model = cls(inputs, keras.layers.Dense(3, activation="softmax")(hidden))
    metrics = ["accuracy"]
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=metrics)
    return model


@keras.saving.register_keras_serializable("tests")
class OwnLogs(keras.Model):
    """A model whose steps return what no metric has."""

    def train_step(self, data):
        super().train_step(data)
        return {"objective": self.compute_loss(*data, self(data[0])), "twins": keras.ops.ones(2)}

    def test_step(self, data):
        return {"objective": self.compute_loss(*data, self(data[0]))}


def own_logs(dataset):
    return compiled(dataset, cls=OwnLogs)


def run(dataset, out, model="compiled", callback="keras.callbacks:History", epochs=2, **changes):
    settings = TrainSettings(
        dataset=str(dataset),
        model_dir=str(out),
        model=f"tests.trainer.test_hooks:{model}",
        callbacks=(callback if ":" in callback else f"tests.trainer.test_hooks:{callback}",),
        per_replica_batch_size=BATCH,
        epochs=epochs,
        **changes,
    )
    train(settings, {}, Preemption(1))


def test_what_a_step_of_ones_own_returns_is_shown_and_kept(dataset, tmp_path, capsys):
    run(dataset, tmp_path, model="own_logs")

    (row, _) = read_history(tmp_path)
    assert row["twins"] == "[1.0, 1.0]"
    assert 0 < float(row["objective"]) < 2
    assert 0 < float(row["val_objective"]) < 2
    assert "loss" not in row
    assert "objective" in capsys.readouterr().out


def backup(directory):
    return keras.callbacks.BackupAndRestore(directory)


def test_a_callback_that_would_restore_another_state_is_refused(dataset, tmp_path):
    with pytest.raises(SettingsError, match=r"BackupAndRestore.*leave it out"):
        run(dataset, tmp_path, callback="backup")


def test_where_a_callback_runs(tmp_path):
    own = keras.callbacks.Callback()
    assert place_of(own) == "all"
    assert place_of(keras.callbacks.ModelCheckpoint(tmp_path / "x.keras")) == "chief"
    own.on = "chief"
    assert place_of(own) == "chief"
    own.on = "worker"
    with pytest.raises(SettingsError, match="on = 'worker'"):
        place_of(own)


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


def unreachable():
    def send(epoch, logs):
        raise ConnectionRefusedError(111, "Connection refused")

    return keras.callbacks.LambdaCallback(on_epoch_end=send)


def test_what_may_work_later_is_no_mistake_of_a_callback(dataset, tmp_path):
    with pytest.raises(RunError, match="ConnectionRefusedError"):
        run(dataset, tmp_path, callback="unreachable", epochs=1)
