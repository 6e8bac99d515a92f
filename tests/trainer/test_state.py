"""Training state: captured and restored into a new model, training continues bit for bit."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.base.errors import ModelError
from shardline.trainer.checkpoint.state import Position, TrainingState, restore_model
from tests.helpers import replicas
from tests.helpers.states import build, check_that_training_continues_exactly, train

CASES = "from tests.helpers import states; states."


def test_training_continues_exactly_on_one_device():
    check_that_training_continues_exactly(tf.distribute.OneDeviceStrategy("CPU:0"))


def test_training_continues_exactly_mirrored_on_two_devices():
    replicas.run(["-c", CASES + "mirrored()"], 1)


@pytest.mark.multiworker
def test_training_continues_exactly_on_two_workers():
    replicas.run(["-c", CASES + "multi_worker()"], 2)


@pytest.mark.multiworker
def test_a_checkpoint_takes_about_the_memory_of_the_model_once_and_on_the_chief_alone(tmp_path):
    """The best weights of EarlyStopping, the same on both workers, are neither copied nor sent."""
    command = ["-m", "benchmarks.checkpoint_memory", "--megabytes", "64", "--directory", str(tmp_path)]
    chief, worker = (last_json(output) for output in replicas.run(command, 2))
    (restored,) = (last_json(output) for output in replicas.run([*command, "--restore"], 1))

    assert chief["save"] < 1.5
    assert worker["save"] < 0.3
    assert restored["restore"] < 1.5
    assert restored["weight"] == 1


def last_json(output):
    return json.loads(output.splitlines()[-1])


def test_names_do_not_depend_on_the_models_built_before():
    strategy = tf.distribute.get_strategy()
    first = TrainingState(build(strategy, seed=1)).variables
    second = TrainingState(build(strategy, seed=1)).variables

    assert first == second
    assert first["model/0000/sequential/dense/kernel"] == "float32 6x5"
    assert first["metric/0001/loss/count"] == "float32 scalar"
    assert {name.split("/")[0] for name in first} == {"model", "optimizer", "metric", "random"}


def test_an_evaluated_model_takes_the_weights_only():
    strategy = tf.distribute.get_strategy()
    model = build(strategy, seed=1)
    train(strategy, model, range(2))
    snapshot = TrainingState(model).capture(Position())
    other = build(strategy, seed=2)
    other.compile("sgd", "mse")
    restore_model(other, snapshot)

    for one, two in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(one, two)


def test_the_weights_of_another_model_are_refused():
    strategy = tf.distribute.get_strategy()
    snapshot = TrainingState(build(strategy, seed=1)).capture(Position())
    wider = keras.Sequential([keras.Input((6,)), keras.layers.Dense(7)])

    with pytest.raises(
        ModelError,
        match=r"model/0000/sequential/dense/kernel has shape \(6, 7\), .* has one of shape \(6, 5\)",
    ):
        restore_model(wider, snapshot)


class TwoOptimizers(keras.Model):
    def __init__(self, built):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.dense.build((None, 3))
        self.optimizers = {"ours": keras.optimizers.Adam(), "theirs": keras.optimizers.SGD(momentum=0.9)}
        self.compile()
        self.optimizer.build(self.dense.trainable_variables)  # by default there is one more
        for optimizer in self.optimizers.values() if built else ():
            optimizer.build(self.dense.trainable_variables)

    def call(self, inputs):
        return self.dense(inputs)


def test_optimizers_that_are_attributes_of_the_model_count_once_a_step_has_built_them():
    names, unbuilt = (" ".join(TrainingState(TwoOptimizers(built)).variables) for built in (True, False))

    assert "adam/dense_kernel_velocity" in names
    assert "sgd/dense_kernel_momentum" in names
    assert "optimizer/0000" in unbuilt
    assert "adam" not in unbuilt


def test_a_run_that_a_callback_has_stopped_stays_stopped():
    strategy = tf.distribute.get_strategy()
    model = build(strategy, seed=1)
    model.stop_training = True
    snapshot = TrainingState(model).capture(Position())
    again = build(strategy, seed=1)
    TrainingState(again).restore(snapshot)

    assert again.stop_training
