"""State of a run: captured and put into a model built anew, training goes on bit for bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.checkpoint.state import Position, TrainingState, restore_model
from shardline.trainer.errors import ModelError
from tests.helpers import replicas

CASES = "from tests.trainer import test_state; test_state."


class Noise(keras.layers.Layer):
    """Draws from the random generator that all unseeded calls share."""

    def call(self, inputs, training=False):
        return inputs + 0.1 * keras.random.normal((6,)) if training else inputs


def build(strategy, seed):
    several = strategy.num_replicas_in_sync > 1
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                # Keras keeps that generator by thread: the threads of several replicas cannot use it.
                keras.layers.GaussianNoise(0.1) if several else Noise(),
                keras.layers.Dense(5),
                # Each replica's own statistics are merged by the loop before a checkpoint, not here.
                keras.layers.BatchNormalization(synchronized=several),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(2),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        model._symbolic_build(data_batch=(np.zeros((1, 6), "float32"), np.zeros(1, "int64")))
    return model


def train(strategy, model, numbers):
    def replica_step(number):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        x = tf.random.stateless_normal((8, 6), tf.stack([number, tf.cast(replica, tf.int32)]))
        model.train_step((x, tf.cast(tf.reduce_sum(x, axis=1) > 0, tf.int64)))

    step = tf.function(lambda number: strategy.run(replica_step, args=(number,)))
    for number in numbers:
        step(tf.constant(number))


def check_that_training_continues_exactly(strategy):
    model = build(strategy, seed=1)
    state = TrainingState(model)
    train(strategy, model, range(10))
    middle = state.capture(Position(0, 80, 10))
    train(strategy, model, range(10, 20))

    restored = build(strategy, seed=2)
    restored_state = TrainingState(restored)
    restored_state.restore(middle)
    restarted = restored_state.capture(Position())
    train(strategy, restored, range(10, 20))

    assert middle.arrays.keys() == restarted.arrays.keys()
    for name, value in middle.arrays.items():
        np.testing.assert_array_equal(value, restarted.arrays[name], err_msg=name)
    for one, other in zip(state._variables.items(), restored_state._variables.items(), strict=True):
        assert one[0] == other[0]
        values = [strategy.experimental_local_results(variable.value) for _, variable in (one, other)]
        for ours, theirs in zip(*values, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=one[0])


def mirrored():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    check_that_training_continues_exactly(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))


def multi_worker():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    check_that_training_continues_exactly(strategy)
    metric = keras.metrics.Mean
    with strategy.scope():
        count = metric().count
    count.assign(6.0)
    assert count.numpy() == 6.0  # a sum over both processes


def test_training_continues_exactly_on_one_device():
    check_that_training_continues_exactly(tf.distribute.OneDeviceStrategy("CPU:0"))


def test_training_continues_exactly_mirrored_on_two_devices():
    replicas.run(["-c", CASES + "mirrored()"], 1)


@pytest.mark.multiworker
def test_training_continues_exactly_on_two_workers():
    replicas.run(["-c", CASES + "multi_worker()"], 2)


def test_names_do_not_depend_on_the_models_built_before():
    strategy = tf.distribute.get_strategy()
    first = TrainingState(build(strategy, seed=1)).variables
    second = TrainingState(build(strategy, seed=1)).variables

    assert first == second
    assert first["model/0000/sequential/dense/kernel"] == "float32 6x5"
    assert first["metric/0001/loss/count"] == "float32 scalar"
    assert {name.split("/")[0] for name in first} == {"model", "optimizer", "metric", "random"}


def test_a_model_that_is_not_trained_takes_the_weights_alone():
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


def test_optimizers_that_are_attributes_of_the_model_count():
    names = " ".join(TrainingState(TwoOptimizers(built=True)).variables)

    assert "adam/dense_kernel_velocity" in names
    assert "sgd/dense_kernel_momentum" in names


def test_an_optimizer_without_state_is_refused():
    with pytest.raises(
        ModelError, match=r"optimizer 'adam.*' has no state yet.* call its build\(variables\)"
    ):
        TrainingState(TwoOptimizers(built=False))


def test_a_run_that_a_callback_has_stopped_stays_stopped():
    strategy = tf.distribute.get_strategy()
    model = build(strategy, seed=1)
    model.stop_training = True
    snapshot = TrainingState(model).capture(Position())
    again = build(strategy, seed=1)
    TrainingState(again).restore(snapshot)

    assert again.stop_training
