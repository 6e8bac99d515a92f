"""Gradient exchange on one replica: it changes nothing, except that an optimizer may be built late."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.checkpoint.state import TrainingState
from shardline.trainer.distribute.collectives import GradientExchange, TensorFlowSummation, replica_merger
from shardline.trainer.keras_compat.keras_internals import accumulators, optimizers
from shardline.trainer.loop.build import create_variables
from tests.helpers import exchange_cases

ONE = "/cpu:0"


def trained(case, exchange):
    """Returns the weights after three steps under one device."""
    keras.utils.set_random_seed(3)
    strategy = tf.distribute.OneDeviceStrategy(ONE)
    with strategy.scope():
        model = exchange_cases.MODELS[case]()
        model._symbolic_build(data_batch=(np.zeros((1, 4), np.float32), np.zeros(1, np.int64)))
    changed = GradientExchange(model, TensorFlowSummation()) if exchange else None
    data = (np.ones((2, 4), np.float32), np.array([0, 2]))

    @tf.function
    def step():
        if changed is None:
            strategy.run(model.train_step, args=(data,))
            return
        with changed.weighted(tf.constant(1.0)):
            strategy.run(model.train_step, args=(data,))

    for _ in range(3):
        step()
    return model


@pytest.mark.parametrize(
    "case",
    [
        "accumulation",
        "ema_overwrite",
        pytest.param("global_clipnorm", marks=pytest.mark.matrix),
        pytest.param("overflow", marks=pytest.mark.matrix),
    ],
)
def test_one_replica_trains_as_keras_alone(case):
    plain, changed = trained(case, exchange=False), trained(case, exchange=True)

    for one, other in zip(plain.get_weights(), changed.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_configurations_stay_as_they_are():
    model = trained("overflow", exchange=False)
    before = model.optimizer.get_config()
    GradientExchange(model, TensorFlowSummation())

    assert model.optimizer.get_config() == before


def test_finds_optimizers_that_are_attributes_of_the_model():
    model = trained("two_optimizers", exchange=True)

    assert {type(one).__name__ for one in optimizers(model)} == {"Adam", "SGD"}
    assert all(one.built for one in optimizers(model))


def test_finds_optimizers_of_models_inside_a_model_with_a_step_of_its_own():
    def part():
        one = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        one.compile(keras.optimizers.Adam(), "mse")
        return one

    class Players(keras.Model):
        def __init__(self):
            super().__init__()
            self.judge = part()
            self.players = [part(), part()]

        def train_step(self, data):
            parts = [self.judge, *self.players]
            with tf.GradientTape(persistent=True) as tape:
                losses = [part.compute_loss(y=data[1], y_pred=part(data[0])) for part in parts]
            for loss, part in zip(losses, parts, strict=True):
                weights = part.trainable_variables
                part.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": sum(losses)}

    players = Players()
    players.compile()
    create_variables(players, train_step=(tf.TensorSpec([1, 4]), tf.TensorSpec([1, 2])))
    found = optimizers(players)
    for one in (players.judge, *players.players):
        assert any(optimizer is one.optimizer and optimizer.built for optimizer in found)
    kept = [name for name in TrainingState(players).variables if name.endswith("momentum")]
    assert len(kept) == 6  # of a kernel and a bias each

    unused = keras.Sequential([part(), keras.layers.Dense(1)])
    unused.compile(keras.optimizers.SGD(), "mse")
    assert optimizers(unused) == [unused.optimizer]


def test_accumulators_are_those_of_the_optimizer_inside():
    model = trained("overflow_accumulation", exchange=True)

    assert len(accumulators(model)) == len(model.trainable_variables)


def test_the_changed_model_saves_and_loads(tmp_path):
    model = trained("adamw", exchange=True)
    model.save(tmp_path / "model.keras")

    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()


def test_one_replica_merges_nothing():
    assert replica_merger(tf.distribute.OneDeviceStrategy(ONE), keras.Sequential())() == []
