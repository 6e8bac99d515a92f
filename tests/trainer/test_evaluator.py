"""The evaluator: each checkpoint's exact result, the best model, and when it ends."""

import errno
import json
import os
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import RunError, SettingsError
from shardline.trainer.base.settings import OutputDirs, TrainSettings
from shardline.trainer.checkpoint.state import Position, TrainingState
from shardline.trainer.checkpoint.store import Checkpoints, Identity
from shardline.trainer.loop import evaluator as evaluations_module
from shardline.trainer.loop import evaluator as evaluator_module
from shardline.trainer.loop.evaluator import BEST_FILE, Evaluations, Evaluator, wait_for_last_evaluation
from shardline.trainer.loop.step import EvaluationLoop

RNG = np.random.default_rng(0)
X = RNG.normal(3.0, 2.0, (22, 4)).astype(np.float32)
Y = (X[:, 0] > 3).astype(np.int64)
BATCHES = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


class Objective(keras.Sequential):
    """Its evaluation returns one number, which is not the loss."""

    def test_step(self, data):
        return {"objective": super().test_step(data)["loss"]}


def make_model(classes=2, kind=keras.Sequential):
    """Most of what it has learned after a few steps are BatchNormalization's statistics."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(classes)]
    model = kind(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"])
    model._symbolic_build(data_batch=(X[:1], Y[:1]))
    return model


SETTINGS = TrainSettings(dataset="tests", model="tests", keep_checkpoints=10)


class Chief:
    """Trains in this process, and keeps what each checkpoint should be worth."""

    def __init__(self, directory, evaluations):
        self.model = make_model()
        self.state = TrainingState(self.model)
        identity = Identity("tests", "sha256:0", self.state.variables)
        self.checkpoints = Checkpoints(SETTINGS, directory, identity, write=True)
        self.evaluations = evaluations
        self.expected = {}

    def train(self, steps, learning_rate):
        self.model.optimizer.learning_rate = learning_rate
        self.model.fit(X, Y, batch_size=22, epochs=1, verbose=0)
        self.expected[steps] = self.model.evaluate(X, Y, batch_size=22, verbose=0, return_dict=True)
        self.checkpoints.save(self.state.capture(Position(epoch=1, steps=steps)))
        self.checkpoints.wait()


class World:
    def __init__(self, tmp_path):
        self.directory, self.out = tmp_path / "checkpoints", tmp_path / "model"
        self.logs = tmp_path / "logs"
        self.evaluations = Evaluations(self.directory)
        self.chief = Chief(self.directory, self.evaluations)
        self.evaluated = 0
        self.said = []

    def evaluator(self, metric="loss", model=None):
        model = model or make_model()
        evaluation = EvaluationLoop(model, tf.distribute.get_strategy(), BATCHES.repeat(), 3)

        def evaluate():
            self.evaluated += 1
            return evaluation()

        checkpoints = Checkpoints(SETTINGS, self.directory, Identity("tests", "sha256:0", {}), write=False)
        dirs = OutputDirs(self.out, self.directory, self.logs)
        return Evaluator(model, evaluate, checkpoints, dirs, metric=metric, shown=evaluation.shapes)

    def run(self, evaluator, seconds=60.0):
        with progress.sink(lambda event: self.said.append(event.text)):
            evaluator.evaluate_checkpoints(seconds)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluations_module, "_BEAT_S", 0.01)
    monkeypatch.setattr(evaluator_module, "_POLL_S", 0.01)
    return World(tmp_path)


def best_weights(world):
    return keras.models.load_model(world.out / BEST_FILE).get_weights()


def test_each_checkpoint_is_evaluated_exactly_and_the_best_is_kept(world):
    with world.evaluations.chief_alive(0):
        world.chief.train(3, 0.1)
        world.chief.train(6, 0.1)
        best = world.chief.model.get_weights()
        world.chief.train(9, 30.0)
        world.evaluations.finish(9)
        world.run(world.evaluator())

    assert world.evaluations.steps() == [3, 6, 9]
    for steps, expected in world.chief.expected.items():
        assert world.evaluations.read_metrics(steps) == pytest.approx(expected, abs=1e-6)
    losses = [world.evaluations.read_metrics(steps)["loss"] for steps in (3, 6, 9)]
    assert min(losses) == losses[1]
    for kept, trained in zip(best_weights(world), best, strict=True):
        np.testing.assert_array_equal(kept, trained)
    assert [path.name for path in world.out.iterdir()] == [BEST_FILE]
    assert json.loads((world.directory / "evaluations" / "6.json").read_text())["epoch"] == 1
    assert world.said[-1] == "training has ended, and so does the evaluator"
    assert world.said[1].startswith("step 6, epoch 1: loss ")

    tags = {}
    for path in (world.logs / "evaluator").iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                tags.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
    assert tags["evaluation_loss_vs_iterations"] == pytest.approx(dict(zip((3, 6, 9), losses, strict=True)))


def test_a_restarted_evaluator_continues(world):
    with world.evaluations.chief_alive(0):
        world.chief.train(3, 0.1)
        best = world.chief.model.get_weights()
        world.evaluations.finish(3)
        world.run(world.evaluator())
    with world.evaluations.chief_alive(3):
        world.chief.train(6, 30.0)
        world.evaluations.finish(6)
        world.run(world.evaluator())

    assert world.evaluated == 2
    for kept, trained in zip(best_weights(world), best, strict=True):
        np.testing.assert_array_equal(kept, trained)


def test_a_metric_may_improve_upwards(world):
    with world.evaluations.chief_alive(0):
        world.chief.train(3, 30.0)
        for steps in (6, 9, 12, 15):
            world.chief.train(steps, 0.1)
        world.evaluations.finish(15)
        world.run(world.evaluator(metric="accuracy"))
    accuracies = {steps: logs["accuracy"] for steps, logs in world.chief.expected.items()}
    kept = keras.models.load_model(world.out / BEST_FILE).evaluate(X, Y, 22, verbose=0, return_dict=True)
    assert len(set(accuracies.values())) > 1
    assert kept["accuracy"] == max(accuracies.values())


def test_an_unknown_metric_is_refused(world):
    with pytest.raises(SettingsError, match=r"no metric 'f1'; there are accuracy, loss"):
        world.evaluator(metric="f1")


def test_what_an_evaluation_of_ones_own_does_not_return_is_refused(world):
    with pytest.raises(SettingsError, match=r"no metric 'loss'; there are objective$"):
        world.evaluator(model=make_model(kind=Objective))


def test_a_diverged_model_is_never_the_best(world):
    with world.evaluations.chief_alive(0):
        world.chief.train(3, float("nan"))
        world.evaluations.finish(3)
        world.run(world.evaluator())
    assert "loss" not in world.evaluations.read_metrics(3)
    assert not (world.out / BEST_FILE).exists()


def test_a_damaged_checkpoint_is_left_out(world):
    with world.evaluations.chief_alive(0):
        world.chief.train(3, 0.1)
        (damaged,) = world.directory.glob("ckpt-3.data*")
        damaged.write_bytes(b"\0" * damaged.stat().st_size)
        world.chief.train(6, 0.1)
        world.evaluations.finish(6)
        world.run(world.evaluator())
    assert world.evaluations.steps() == [6]
    assert [text for text in world.said if "ckpt-3" in text and "it is not evaluated" in text]


def test_a_checkpoint_that_cannot_be_read_now_is_evaluated_later(world, monkeypatch):
    load, failures = tf.train.load_checkpoint, [tf.errors.UnavailableError(None, None, "not now")] * 3

    def load_at_last(path):
        if failures:
            raise failures.pop()
        return load(path)

    monkeypatch.setattr(tf.train, "load_checkpoint", load_at_last)
    with world.evaluations.chief_alive(0):
        world.chief.train(3, 0.1)
        world.evaluations.finish(3)
        world.run(world.evaluator())
    assert world.evaluations.steps() == [3]
    assert len([text for text in world.said if "not now" in text]) == 1


def test_results_that_cannot_be_listed_are_not_missing(tmp_path, monkeypatch):
    """Without them, a worse model would replace the best."""
    results = Evaluations(tmp_path)
    results.write(Position(1, 0, 4), {"val_loss": 0.5})
    assert results.steps() == [4]

    def refuse(*args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RunError, match="cannot list"):
        results.steps()


def test_an_evaluator_ends_when_its_chief_is_gone(world):
    with world.evaluations.chief_alive(0):
        pass
    world.chief.train(3, 0.1)
    world.run(world.evaluator(), 0.2)
    assert world.evaluations.steps() == [3]
    assert world.said[-1] == "no heartbeat of the chief for 0.2 s: the evaluator ends"


def test_a_heartbeat_that_a_mounted_bucket_shows_late_does_not_end_the_evaluator(world, monkeypatch):
    """It may show the content of 60 seconds before."""
    clock = [0.0]

    def sleep(seconds):
        clock[0] += 5
        if clock[0] > 125:
            world.evaluations.finish(3)

    fake = types.SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr(evaluator_module, "time", fake)
    monkeypatch.setattr(Evaluations, "heartbeat", lambda _: f"{clock[0] // 65}")
    world.run(world.evaluator())
    assert "training has ended" in world.said[-1]

    clock[0] = 0
    monkeypatch.setattr(Evaluations, "heartbeat", lambda _: f"{min(clock[0] // 65, 1)}")
    monkeypatch.setattr(Evaluations, "finished", False)
    world.run(world.evaluator())
    assert [text for text in world.said if "waiting for a heartbeat of the chief" in text]
    assert "the evaluator ends" in world.said[-1]


def test_what_an_earlier_attempt_has_left_does_not_end_this_one(world):
    """The mark of the end is believed only of a chief that has been seen alive, and that removes it first."""
    world.evaluations.write(Position(steps=3), {"loss": 1.0})
    world.evaluations.write(Position(steps=9), {"loss": 0.5})
    world.evaluations.finish(9)
    world.run(world.evaluator(), 0.2)
    assert "training has ended" not in world.said[-1]

    with world.evaluations.chief_alive(3):
        assert not world.evaluations.finished
        assert world.evaluations.steps() == [3]


def test_the_chief_waits_for_the_last_result_and_not_for_ever(world, monkeypatch):
    monkeypatch.setattr(evaluator_module, "_LAST_EVALUATION_S", 0.05)
    world.evaluations.write(Position(steps=6), {"loss": 0.5, "accuracy": 1.0})
    assert wait_for_last_evaluation(world.directory, Position(steps=6)) == {
        "evaluator_loss": 0.5,
        "evaluator_accuracy": 1.0,
    }
    assert world.evaluations.finished

    with progress.sink(lambda event: world.said.append(event.text)):
        assert wait_for_last_evaluation(world.directory, Position(steps=9)) == {}
    assert world.said[-1].startswith("warning: no evaluation of step 9 within 0.05 s")
