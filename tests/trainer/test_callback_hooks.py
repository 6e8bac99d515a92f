"""Hooks of callbacks: order, number, arguments, `params` and logs are those of `keras.Model.fit`."""

import keras
import numpy as np
import pytest

from shardline.trainer.base.errors import ModelError, RunError, SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.loop.callbacks import callback_scope
from shardline.trainer.train import train
from tests.helpers.datasets import RECORDS
from tests.helpers.history import read_history

BATCH = 16

# What the recorder of this process has seen.
SEEN = []


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


class Recorder(keras.callbacks.Callback):
    """Notes every hook that is called, with its number and the names in its logs."""

    def __init__(self):
        super().__init__()
        names = ["train_begin", "train_end", "test_begin", "test_end", "epoch_begin", "epoch_end"]
        names += [f"{stage}_batch_{end}" for stage in ("train", "test") for end in ("begin", "end")]
        for name in names:
            setattr(self, f"on_{name}", self._note(name))

    def _note(self, name):
        def note(*arguments, logs=None):
            *numbers, logs = (
                arguments if arguments and not isinstance(arguments[-1], int) else (*arguments, logs)
            )
            if name == "train_begin":
                SEEN.append(("params", {key: self.params[key] for key in ("epochs", "steps")}))
            SEEN.append((name, *numbers, tuple(sorted(logs))))

        return note


def recorder():
    return Recorder()


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


def custom_logs(dataset):
    return compiled(dataset, cls=OwnLogs)


def fit(model, callback, epochs):
    """Returns what Keras' own loop calls for as many steps."""
    rng = np.random.default_rng(0)
    data = {
        split: (rng.integers(0, 255, (count, 12, 12, 3)).astype(np.uint8), np.zeros(count, np.int64))
        for split, count in RECORDS.items()
    }
    model.fit(
        *data["train"],
        batch_size=BATCH,
        epochs=epochs,
        validation_data=data["validation"],
        callbacks=[callback],
        verbose=0,
    )
    seen = list(SEEN)
    SEEN.clear()
    return seen


def run(dataset, out, model="compiled", callback="recorder", epochs=2, **changes):
    """Returns what our loop calls."""
    settings = TrainSettings(
        dataset=str(dataset),
        model_dir=str(out),
        model=f"tests.trainer.test_callback_hooks:{model}",
        callbacks=(f"tests.trainer.test_callback_hooks:{callback}",),
        per_replica_batch_size=BATCH,
        epochs=epochs,
        **changes,
    )
    train(settings, {}, Preemption(1))
    return list(SEEN)


@pytest.mark.parametrize("model", [compiled, custom_logs])
def test_every_hook_is_called_as_fit_calls_it(dataset, tmp_path, model):
    expected = fit(model(None), recorder(), epochs=2)
    assert len(expected) > 20

    assert run(dataset, tmp_path, model=model.__name__) == expected


def test_what_a_step_of_ones_own_returns_is_shown_and_kept(dataset, tmp_path, capsys):
    run(dataset, tmp_path, model="custom_logs")

    (row, _) = read_history(tmp_path)
    assert row["twins"] == "[1.0, 1.0]"
    assert 0 < float(row["objective"]) < 2
    assert 0 < float(row["val_objective"]) < 2
    assert "loss" not in row
    assert "objective" in capsys.readouterr().out


def learning_rates():
    """A learning rate for each step, as a callback sets it."""

    class ByStep(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.1 / (1 + batch)
            SEEN.append(batch)

    return ByStep()


def test_a_learning_rate_by_step_is_the_same_in_every_run(dataset, tmp_path):
    for out in ("one", "two"):
        run(dataset, tmp_path / out, callback="learning_rates")

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
