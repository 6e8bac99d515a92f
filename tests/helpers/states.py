"""Training that is captured, restored into a model built anew, and has to go on bit for bit."""

import os

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.checkpoint import Position, TrainingState
from shardline.trainer.cluster import without_proxy
from shardline.trainer.keras_compat.tensorflow_internals import local_mean_reads


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
    os.environ |= without_proxy(os.environ, ["127.0.0.1:0"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    check_that_training_continues_exactly(strategy)
    metric = keras.metrics.Mean
    with strategy.scope():
        count = metric().count
    count.assign(6.0)
    assert count.numpy() == 6.0  # a sum over both processes
    with local_mean_reads(strategy, sums=True):
        assert count.numpy() == 6.0  # which one alone knows
