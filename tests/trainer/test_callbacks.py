"""Callbacks: their state survives an interruption, and those of a user are checked."""

import contextlib
import io
import json
import logging
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.checkpoint.state import CallbackStates
from shardline.trainer.loop import callbacks as reports
from shardline.trainer.loop.callbacks import Stopping, load_callbacks

LOSSES = [5.0, 4.0, 4.5, 4.4, 3.0, 3.5, 3.4, 3.3, 3.2]


def tiny_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse", metrics=["mae"])
    return model


class Own(keras.callbacks.Callback):
    """Remembers in all the ways in which callbacks do."""

    def __init__(self, patience=3):
        super().__init__()
        self.patience = patience
        self.file = open  # cannot be kept, and need not
        self.seen = []
        self.table = {}
        self._mean = np.zeros(2)

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append((epoch, np.float32(logs["val_loss"])))
        self.table[epoch] = {"loss": logs["val_loss"], "best": float("inf")}
        self._mean += logs["val_loss"]
        self.last = None


class Keeper(keras.callbacks.Callback):
    """Says itself what has to be kept."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def on_epoch_end(self, epoch, logs=None):
        self.total += 1

    def get_state(self):
        return {"count": self.total, "array": np.arange(self.total)}

    def set_state(self, state):
        assert state["array"].shape == (state["count"],)
        self.total = state["count"]


def begin(model, callbacks):
    both = keras.callbacks.CallbackList(callbacks, model=model)
    both.on_train_begin()
    return both, CallbackStates(callbacks)


def run(model, both, losses, first=0):
    """Runs epochs with some validation losses, each of which changes the weights."""
    for epoch, loss in enumerate(losses, first):
        if model.stop_training:
            return
        model.set_weights([np.full_like(w, loss) for w in model.get_weights()])
        both.on_epoch_end(epoch, {"val_loss": loss})


def through_json(state):
    host, arrays = state
    return json.loads(json.dumps(host)), arrays


@pytest.mark.parametrize("cut", range(len(LOSSES)))
def test_early_stopping_and_learning_rate_resume_where_they_were(cut):
    def make():
        model = tiny_model()
        callbacks = [
            Stopping("val_loss", 3),
            keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=2, cooldown=1),
        ]
        return model, callbacks, *begin(model, callbacks)

    whole, callbacks, both, _ = make()
    run(whole, both, LOSSES)
    both.on_train_end()

    before, _, both, states = make()
    run(before, both, LOSSES[:cut])
    kept = through_json(states.capture())
    after, resumed, both, states = make()
    states.restore(*kept)
    after.optimizer.learning_rate = before.optimizer.learning_rate.numpy()
    after.stop_training = before.stop_training
    run(after, both, LOSSES[cut:], first=cut)
    both.on_train_end()

    assert callbacks[0].stopped_epoch == resumed[0].stopped_epoch == 7
    assert whole.stop_training
    assert after.stop_training
    np.testing.assert_array_equal(whole.get_weights()[0], np.full((2, 1), 3.0))  # the best
    np.testing.assert_array_equal(whole.get_weights()[0], after.get_weights()[0])
    assert whole.optimizer.learning_rate.numpy() == after.optimizer.learning_rate.numpy() < 1.0


def test_attributes_of_any_callback_are_kept():
    model = tiny_model()
    before, after = Own(), Own(patience=9)
    both, states = begin(model, [before])
    run(model, both, LOSSES)
    kept = through_json(states.capture())
    _, states = begin(model, [after])
    states.restore(*kept)

    assert after.seen == before.seen
    assert type(after.seen[0]) is tuple
    assert type(after.seen[0][1]) is np.float32
    assert after.table == before.table
    np.testing.assert_array_equal(after._mean, before._mean)
    assert after.last is None
    assert after.patience == 9  # an option is not state
    assert after.model is model


CLOCK = datetime(2026, 11, 29, 1, 2, 3, 4, tzinfo=UTC)
VALUES = {
    "a set": {3, 1, 2},
    "a set of tuples": {("b", 2), ("a", 1)},
    "a frozenset": frozenset({"x", "y"}),
    "a deque": deque([1.5, 2.5], maxlen=2),
    "a Counter": Counter({"cat": 3, "dog": 1}),
    "a defaultdict": defaultdict(list, {"loss": [1.0, 0.5]}),
    "an OrderedDict": OrderedDict(b=1, a=2),
    "keys of numpy": {np.int64(3): np.float32(0.25)},
    "texts": np.array(["one", "three"]),
    "a text": np.str_("one"),
    "no texts": np.empty((0, 2), "U4"),
    "objects": np.array(["one", None, {1}], dtype=object),
    "complex numbers": np.array([1 + 2j]),
    "times": np.array(["2026-11-29"], "datetime64[D]"),
    "bytes": b"\0\xff",
    "a path": Path("a", "b"),
    "a time": CLOCK,
    "a duration": timedelta(days=1, microseconds=7),
    "a complex number": 1 - 2j,
    "nested": [{"seen": {1}}, (deque([frozenset({2})]),)],
}


class Holder(keras.callbacks.Callback):
    """Has one attribute."""

    def __init__(self, value):
        super().__init__()
        self.value = value


def resumed(begun, trained, again):
    """Returns a callback with the attribute `again` that resumes one whose attribute went to `trained`."""
    before, after = Holder(begun), Holder(again)
    _, states = begin(tiny_model(), [before])
    before.value = trained
    kept = through_json(states.capture())
    begin(tiny_model(), [after])[1].restore(*kept)
    return after


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_an_attribute_of_this_kind_is_kept(value):
    after = resumed(None, value, None).value

    assert type(after) is type(value)
    np.testing.assert_equal(after, value)
    assert getattr(after, "dtype", None) == getattr(value, "dtype", None)
    assert getattr(after, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(after, "default_factory", None) is getattr(value, "default_factory", None)
    if isinstance(value, dict):
        assert [*map(type, after)] == [*map(type, value)]


@pytest.mark.parametrize("value", [tf.constant([1.5, 2.5], tf.bfloat16), tf.constant(["a", "b"])])
def test_tensors_are_kept(value):
    after = resumed(None, value, None).value

    assert isinstance(after, tf.Tensor)
    assert after.dtype == value.dtype
    assert after.numpy().tolist() == value.numpy().tolist()


@pytest.mark.parametrize("kind", [keras.Variable, tf.Variable])
def test_variables_are_assigned_and_stay_the_same_objects(kind):
    present = {"best": [kind(0.0)]}
    after = resumed({"best": [kind(0.0)]}, {"best": [kind(7.0)]}, present).value

    assert after["best"][0] is present["best"][0]
    assert float(after["best"][0].numpy()) == 7.0


def test_random_numbers_go_on():
    generator = np.random.default_rng(7)
    generator.random(3)
    after = resumed(np.random.default_rng(7), generator, np.random.default_rng(7)).value

    assert after.random() == generator.random()


def test_a_function_that_makes_the_missing_values_stays_the_programs():
    now = defaultdict(lambda: [0, 0])

    after = resumed(now, defaultdict(lambda: [9, 9], {"a": [1, 2]}), now).value
    assert (after["a"], after["b"]) == ([1, 2], [0, 0])


class Tracker:
    """A class of a program, of which nothing is known."""

    def __init__(self):
        self.best = 0.0


class Losing(keras.callbacks.Callback):
    """Its first three attributes are state that cannot be kept; what the others hold is not state."""

    def __init__(self, path):
        super().__init__()
        self.tracker, self.trackers, self.generator = Tracker(), {}, random.Random(0)
        self.option = Tracker()
        self.functions, self.model_too, self.log = [print], tiny_model(), logging.getLogger("x")
        self.file, self.lock, self.thread = open(path, "w"), threading.Lock(), None  # noqa: SIM115
        self.kernel = None

    def on_epoch_end(self, epoch, logs=None):
        self.tracker.best += 1.0
        self.trackers[epoch] = Tracker()
        self.generator.random()
        self.file.write("epoch\n")
        self.thread = threading.Thread()
        self.model_too.layers[0].kernel.assign_add([[1.0], [1.0]])
        self.kernel = self.model.layers[0].kernel


def test_what_changes_and_cannot_be_kept_is_named_once(tmp_path):
    model, callback = tiny_model(), Losing(tmp_path / "file")
    both = keras.callbacks.CallbackList([callback], model=model)
    states = CallbackStates([callback], variables=model.variables)
    states.capture()
    assert states.lost == set()
    run(model, both, LOSSES[:2])
    host, _ = states.capture()
    callback.file.close()

    assert states.lost == {"Losing.tracker", "Losing.trackers", "Losing.generator"}
    assert host == {"Losing/0": {}}  # the model's weights are kept with the model


class Pair(NamedTuple):
    best: float


class Sums(dict):
    """A dict of the program's own."""


class Phase(Enum):
    """Constants of a program."""

    WARM, FULL = 1, 2


UNKNOWN = [
    (bytearray(b"a"), bytearray(b"ab")),
    (date(2026, 11, 28), date(2026, 11, 29)),
    (Decimal("0.1"), Decimal("0.2")),
    (Pair(1.0), Pair(2.0)),
    (Sums(a=1), Sums(a=2)),
    (Phase.WARM, Phase.FULL),
    (SimpleNamespace(best=1), SimpleNamespace(best=2)),
]


@pytest.mark.parametrize(("begun", "trained"), UNKNOWN, ids=lambda value: type(value).__name__)
def test_values_of_other_kinds_are_named_when_they_change(begun, trained):
    callback = Holder(begun)
    states = CallbackStates([callback])
    states.capture()
    assert states.lost == set()
    callback.value = trained
    states.capture()
    assert states.lost == {"Holder.value"}


def built_in(tmp_path):
    made = {
        "BackupAndRestore": {"backup_dir": tmp_path / "backup"},
        "CSVLogger": {"filename": tmp_path / "log.csv"},
        "EarlyStopping": {"patience": 1, "restore_best_weights": True},
        "LambdaCallback": {"on_epoch_end": lambda epoch, logs: None},
        "LearningRateScheduler": {"schedule": lambda epoch, rate: rate * 0.5},
        "ModelCheckpoint": {"filepath": tmp_path / "model.keras"},
        "ReduceLROnPlateau": {"patience": 0},
        "TensorBoard": {"log_dir": tmp_path / "board"},
    }
    # These need a package, a server, or an optimizer with moving averages.
    left_out = {"Callback", "CallbackList", "OrbaxCheckpoint", "RemoteMonitor", "SwapEMAWeights"}
    names = {name for name in dir(keras.callbacks) if name[0] != "_"} - left_out
    return [getattr(keras.callbacks, name)(**made.get(name, {})) for name in sorted(names)]


def test_nothing_is_said_of_keras_own_callbacks(tmp_path):
    model, callbacks = tiny_model(), built_in(tmp_path)
    x, y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
    model.fit(x, y, epochs=1, verbose=0)
    states = CallbackStates(callbacks, variables=model.variables)
    with contextlib.redirect_stdout(io.StringIO()):
        model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks, validation_data=(x, y))
    states.capture()

    assert states.lost == set()


def test_what_is_captured_no_longer_changes():
    callback = Own()
    model = tiny_model()
    both, states = begin(model, [callback])
    run(model, both, [1.0])
    _, arrays = states.capture()
    run(model, both, [1.0])

    np.testing.assert_array_equal(arrays["callback/Own/0/_mean"], [1.0, 1.0])


def test_a_callback_may_keep_its_state_itself():
    model = tiny_model()
    both, states = begin(model, [Keeper()])
    run(model, both, LOSSES)
    kept = through_json(states.capture())
    after = Keeper()
    begin(model, [after])[1].restore(*kept)

    assert after.total == len(LOSSES)


def test_a_state_that_cannot_be_kept_is_refused():
    class Wrong(Keeper):
        def get_state(self):
            return {"model": object()}

    _, states = begin(tiny_model(), [])
    assert states.capture() == ({}, {})
    with pytest.raises(
        SettingsError,
        match=r"get_state\(\) of Wrong: 'model' holds a value of type object; only numbers, text",
    ):
        begin(tiny_model(), [Wrong()])[1].capture()


def test_replicas_may_have_different_callbacks(tmp_path):
    model = tiny_model()
    chief = [keras.callbacks.TensorBoard(str(tmp_path)), Own(), Own(), keras.callbacks.History()]
    both, states = begin(model, chief)
    run(model, both, LOSSES[:2])
    kept = through_json(states.capture())
    both.on_train_end()
    worker = [Own(), keras.callbacks.LambdaCallback()]
    begin(model, worker)[1].restore(*kept)

    assert worker[0].seen == chief[2].seen
    assert "TensorBoard/0" not in kept[0]


def test_what_tensorboard_shows_is_in_the_bucket_after_each_epoch(tmp_path, monkeypatch):
    """A mounted bucket takes a file that is still written to at fsync alone."""
    uploaded = {}
    monkeypatch.setattr(
        reports.files, "sync", lambda path: uploaded.update({path.parent.name: path.stat().st_size})
    )
    board = reports.Board(str(tmp_path), write_graph=False)
    begin(tiny_model(), [board])
    board.on_epoch_end(0, {"loss": 1.0, "val_loss": 1.0})
    first = dict(uploaded)
    board.on_epoch_end(1, {"loss": 0.5, "val_loss": 0.5})

    assert first.keys() == {"train", "validation"}
    assert all(uploaded[name] > size > 100 for name, size in first.items())


def test_an_epoch_is_two_lines():
    counters = reports.Counters(total_steps=900)
    report = reports.Report(counters, 20)
    counters.steps, counters.examples, counters.seconds, counters.waited = 45, 1_444, 0.2, 0.05
    said = []
    with progress.sink(lambda event: said.append(progress.render(event))):
        report.on_train_batch_end(44, {"loss": 0.02772, "accuracy": 0.99381})
        report.on_epoch_end(19, {"val_loss": 0.0652, "accuracy": 0.99381, "loss": 0.02772})
    assert said[1].startswith("train: epoch 20/20  loss 0.0277  accuracy 0.9938  7,220 examples/s  ETA ")
    assert said[2:] == ["train:   val_loss 0.0652  input wait 25%"]


def test_a_metric_without_a_direction_is_refused():
    class Strange(keras.metrics.Mean):
        _direction = None

        def __init__(self):
            super().__init__("strange")
            del type(self)._direction

    model = tiny_model()
    stopping = Stopping("val_strange", 3)
    begin(model, [stopping])
    with pytest.raises(
        SettingsError, match="does not know whether val_strange improves upwards or downwards"
    ):
        stopping.check_metric({"val_strange": ()})


def test_a_metric_that_rises_stops_the_training_when_it_no_longer_does():
    model = tiny_model()
    model._symbolic_build(data_batch=(np.zeros((1, 2)), np.zeros((1, 1))))
    model.compile("sgd", "mse", metrics=["accuracy"])
    model._symbolic_build(data_batch=(np.zeros((1, 2)), np.zeros((1, 1))))
    both, _ = begin(model, [Stopping("val_accuracy", 1)])
    for epoch, value in enumerate([0.1, 0.5, 0.5]):
        assert not model.stop_training
        both.on_epoch_end(epoch, {"val_accuracy": value})
    assert model.stop_training


MODULE = """
import keras

class Mine(keras.callbacks.Callback):
    def __init__(self, directory=None):
        super().__init__()
        self.directory = directory

def one():
    return Mine()

def two(directory):
    return [Mine(directory), Mine()]

def none():
    return None

def fails():
    raise KeyError("TOKEN")

def needs(path, directory, other=1):
    return Mine()

number = 3

def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("brought_callbacks.py").write_text(MODULE)


@pytest.mark.parametrize(
    ("name", "directories"), [("one", [None]), ("two", [Path("out"), None]), ("Mine", [Path("out")])]
)
def test_callbacks_of_the_user(module, name, directories):
    made = load_callbacks(f"brought_callbacks:{name}", Path("out"))
    assert [callback.directory for callback in made] == directories


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "has to return a keras.callbacks.Callback or a list of them, it returned NoneType"),
        ("fails", r"failed: KeyError: 'TOKEN' \(brought_callbacks.py, line 19\)"),
        ("leaves", r"failed: SystemExit: 0 \(brought_callbacks.py, line 27\)"),
        ("needs", "missing a required argument: 'path'; it is called without arguments, or with directory"),
        ("number", "is a int, not a function"),
        ("nothing", "brought_callbacks has no 'nothing'"),
    ],
)
def test_callbacks_that_cannot_be_used(module, name, message):
    with pytest.raises(SettingsError, match=f"callback 'brought_callbacks:{name}'.* {message}"):
        load_callbacks(f"brought_callbacks:{name}", Path("out"))
