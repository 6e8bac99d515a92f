"""Callbacks passed to `shardline.fit` see and do the same as with `keras.Model.fit`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import shardline
from shardline.trainer.base.errors import DivergedError, SettingsError
from tests.helpers.fitting import batches, check_alike, fitted, fitted_by_keras, line, numbers

k = keras.callbacks
VALIDATION = numbers(21, seed=1)
HOOKS = [
    *("train_begin", "train_end", "epoch_begin", "epoch_end", "train_batch_begin", "train_batch_end"),
    *("test_begin", "test_end", "test_batch_begin", "test_batch_end"),
]


class Recorder(keras.callbacks.Callback):
    """Notes each hook with all its arguments, and what can be read in it; may stop the training in one."""

    def __init__(self, hooks: list[str] = HOOKS, stop: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        for hook in hooks:
            setattr(self, f"on_{hook}", self._note(hook, stop))

    def _note(self, hook: str, stop: tuple[Any, ...]) -> Callable[..., None]:
        def note(*args: Any, logs: Any = None) -> None:
            number = [one for one in args if isinstance(one, int)]
            logs = next((one for one in args if isinstance(one, dict)), logs)
            optimizer = self.model.optimizer
            read = (dict(self.params), int(optimizer.iterations), float(optimizer.learning_rate))
            self.seen.append((hook, *number, logs, read))
            if stop == (hook, *number):
                self.model.stop_training = True

        return note


def both(
    make: Callable[[Path], Any], path: Path, model: Callable[[], keras.Model] = line, **options: Any
) -> tuple[Any, Any]:
    """Returns the callbacks of a training by Shardline and of one by Keras, which have to be alike."""
    made = []
    histories = []
    for name, train in (("ours", fitted), ("theirs", fitted_by_keras)):
        (path / name).mkdir()
        made.append(make(path / name))
        arguments = {"batch_size": 16, "epochs": 4, "validation_data": VALIDATION, **options}
        histories.append(train(model, arguments.pop("data", numbers()), callbacks=[made[-1]], **arguments))
    check_alike(*histories)
    return made[0], made[1]


def check_seen(ours: Recorder, theirs: Recorder) -> None:
    assert [one[:-2] for one in ours.seen] == [one[:-2] for one in theirs.seen]
    for own, other in zip(ours.seen, theirs.seen, strict=True):
        assert own[-1][0] == other[-1][0], own[0]
        assert own[-1][1:] == pytest.approx(other[-1][1:]), own[0]
        assert list(own[-2] or {}) == list(other[-2] or {}), own[0]
        assert (own[-2] or {}) == pytest.approx(other[-2] or {}, rel=1e-5), own[0]


@pytest.mark.parametrize(
    "options",
    [
        {"validation_freq": 2, "validation_batch_size": 8},
        {"data": batches(numbers()).repeat(), "steps_per_epoch": 3, "batch_size": None},
        {"initial_epoch": 2},
    ],
)
def test_hooks_are_called_in_keras_order_with_the_same_arguments(options, tmp_path):
    check_seen(*both(lambda _: Recorder(), tmp_path, **options))


def test_hooks_of_epochs_alone_are_called_so(tmp_path):
    check_seen(*both(lambda _: Recorder(HOOKS[:4]), tmp_path))


@pytest.mark.parametrize(
    "stop",
    [("train_batch_end", 1), ("test_end",), ("train_begin",)],
    ids=lambda stop: "_".join(map(str, stop)),
)
def test_a_callback_may_stop_the_training(stop, tmp_path):
    check_seen(*both(lambda _: Recorder(stop=stop), tmp_path))


def test_the_last_of_several_steps_is_the_last_that_was_taken(tmp_path):
    """Keras counts on: it names the step 5 of an epoch of four where it takes three at a time."""
    ours, theirs = both(
        lambda _: Recorder(["train_batch_end"]), tmp_path, lambda: line(steps_per_execution=3)
    )
    assert [number for _, number, *_ in ours.seen][:2] == [2, 3]
    assert [number for _, number, *_ in theirs.seen][:2] == [2, 5]


def averaging() -> keras.Model:
    return line(optimizer=keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9))


STOPPING = {"mode": "max", "restore_best_weights": True, "start_from_epoch": 1}
PLATEAU = {"factor": 0.5, "patience": 1, "min_delta": 0.5, "cooldown": 1}
PLAIN: dict[str, tuple[Any, ...]] = {
    "stopping": (lambda: k.EarlyStopping("mae", **STOPPING), line, "best wait stopped_epoch best_epoch"),
    "plateau": (lambda: k.ReduceLROnPlateau(**PLATEAU), line, "best wait cooldown_counter"),
    "scheduler": (lambda: k.LearningRateScheduler(lambda n, rate: rate * 0.5 if n else rate), line, ""),
    "averages": (lambda: k.SwapEMAWeights(swap_on_epoch=True), averaging, ""),
}


@pytest.mark.parametrize("case", PLAIN)
def test_callbacks_of_keras_keep_their_meaning(case, tmp_path):
    make, model, attributes = PLAIN[case]
    ours, theirs = both(lambda path: make(), tmp_path, model, epochs=6)
    for name in attributes.split():
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-5), name
    assert ("learning_rate" in ours.model.history.history) == (case in ("plateau", "scheduler"))
    rates = [float(each.model.optimizer.learning_rate) for each in (ours, theirs)]
    assert rates[0] == pytest.approx(rates[1])


def saved(name: str, **options: Any) -> Callable[[Path], keras.callbacks.Callback]:
    return lambda path: keras.callbacks.ModelCheckpoint(str(path / name), **options)


CHECKPOINTS = {
    "numbered": saved("{epoch:02d}-{val_loss:.2f}.keras"),
    "highest": saved("best.keras", save_best_only=True, monitor="mae", mode="max"),
    "by_step": saved("{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=3),
}


@pytest.mark.parametrize("make", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_model_checkpoint_writes_the_same_files(make, tmp_path):
    both(make, tmp_path)
    files = {name: sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("ours", "theirs")}
    assert files["ours"] == files["theirs"]
    assert files["ours"]
    for name in files["ours"]:
        own, other = (weights_of(tmp_path / side / name) for side in ("ours", "theirs"))
        for mine, keras_ in zip(own, other, strict=True):
            np.testing.assert_allclose(mine, keras_, rtol=1e-6, atol=1e-6)


def weights_of(path: Path) -> list[np.ndarray]:
    if path.suffix == ".keras":
        model = keras.saving.load_model(path)
        assert model.optimizer.iterations.numpy() % 4 == 0
        return model.get_weights()
    model = line()
    model.load_weights(path)
    return model.get_weights()


def test_csv_logger_writes_the_same_rows(tmp_path):
    both(lambda path: k.CSVLogger(str(path / "log.csv"), separator=";"), tmp_path, validation_freq=1)
    own, other = ((tmp_path / side / "log.csv").read_text().splitlines() for side in ("ours", "theirs"))
    assert own[0] == other[0]
    for row, expected in zip(own[1:], other[1:], strict=True):
        assert list(map(float, row.split(";"))) == pytest.approx(list(map(float, expected.split(";"))))


def test_tensorboard_writes_the_same_tags(tmp_path):
    options = {"write_graph": False, "update_freq": 3, "histogram_freq": 2}
    both(lambda path: keras.callbacks.TensorBoard(str(path), **options), tmp_path)
    own, other = (events(tmp_path / side) for side in ("ours", "theirs"))
    assert own.keys() == other.keys()
    assert any("epoch_learning_rate" in tag for _, tag, _ in own)
    for key, value in other.items():
        assert own[key] == pytest.approx(value, rel=1e-5), key


def events(directory: Path) -> dict[tuple[str, str, int], float]:
    """Returns the numbers of event files by directory, tag and step."""
    found = {}
    for file in directory.rglob("events.out.*"):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                content = tf.make_ndarray(value.tensor)
                number = float(content) if content.ndim == 0 and content.dtype.kind == "f" else 0.0
                found[file.parent.name, re.sub(r"_\d+", "", value.tag), event.step] = number
    return found


def test_a_callback_in_no_list_and_lists_in_lists_are_taken():
    first, second = Recorder(HOOKS[:2]), Recorder(HOOKS[:2])
    fitted(line, numbers(), callbacks=first)
    fitted(line, numbers(), callbacks=[[second]])
    assert [one[0] for one in first.seen] == [one[0] for one in second.seen] == ["train_begin", "train_end"]


def test_terminate_on_nan_is_an_error_here():
    """Keras returns what there is without a word."""
    x, y = numbers()
    y[20] = np.nan
    callbacks = [keras.callbacks.TerminateOnNaN()]
    theirs = fitted_by_keras(line, (x, y), batch_size=16, callbacks=callbacks, epochs=3)
    assert theirs.epoch == [0]
    with pytest.raises(DivergedError, match="the loss is not finite since step 2"):
        fitted(line, (x, y), batch_size=16, callbacks=callbacks, epochs=3)


def test_a_callback_that_fails_is_one_line():
    class Broken(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise KeyError("val_accuracy")

    with pytest.raises(SettingsError, match=r"^callback Broken failed in on_epoch_end: KeyError: 'val_acc"):
        fitted(line, numbers(), callbacks=[Broken()])


def test_the_model_has_the_history_and_knows_that_it_was_stopped():
    model = line()
    own = keras.callbacks.History()
    history = fitted(model, numbers(), epochs=2, callbacks=[own])
    assert model.history is history
    assert own.history == history.history
    assert history.params["epochs"] == 2
    assert not model.stop_training


@pytest.mark.parametrize("verbose", [2, "auto"])
def test_what_is_shown_is_what_keras_shows(verbose, capsys):
    fitted_by_keras(line, numbers(), epochs=2, verbose=verbose, validation_data=VALIDATION)
    theirs = capsys.readouterr()
    shardline.fit(line, numbers(), epochs=2, verbose=verbose, validation_data=VALIDATION, shuffle=False)
    ours = capsys.readouterr()
    if verbose == 2:
        # But for the times.
        assert [words(one) for one in ours.out.splitlines()] == [
            words(one) for one in theirs.out.splitlines()
        ]
    else:  # without a terminal: lines, and Keras' is a bar
        assert ours.out.splitlines()[0] == "Epoch 1/2"


def words(line_: str) -> list[str]:
    return [one for one in line_.split() if not one.endswith(("s", "step"))]
