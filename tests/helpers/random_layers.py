"""`python -m tests.helpers.random_layers STRATEGY DIRECTORY`: random numbers of layers on each replica.

STRATEGY is one, mirrored (two logical CPUs), or tcp, the communication of workers (TF_CONFIG). Every process
writes what its replicas drew in each step, and the state of the generators behind it, to `NAME.json`.
"""

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster import read_cluster
from shardline.trainer.distribute import Collectives, make_summation, strategy
from shardline.trainer.keras_compat.keras_internals import random_state
from shardline.trainer.loop.step import StepLoop

SIZE = 16
STEPS = 60


class Drawing(keras.Model):
    """A model whose step draws in every way that Keras has, and in TensorFlow's, and notes the numbers."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=1)
        self.noise = keras.layers.GaussianNoise(1.0)
        self.flip = keras.layers.RandomFlip("horizontal")
        ways = ("dropout", "noise", "flip", "keras.random", "tf.random")
        self.drawn = {name: self._variable() for name in ways}
        self.counted = keras.metrics.Mean("loss")

    def _variable(self):
        return tf.Variable(
            tf.zeros((SIZE,)),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def call(self, x, training=True):
        rows = tf.tile(tf.range(2.0)[None, None, :, None], (SIZE, 1, 1, 1))
        return {
            "dropout": self.dropout(x, training=training),
            "noise": self.noise(x, training=training),
            "flip": self.flip(rows, training=training)[:, 0, 0, 0],
            "keras.random": keras.random.uniform((SIZE,)),
            "tf.random": tf.random.uniform((SIZE,)),
        }

    def train_step(self, data):
        for name, value in self(tf.ones((SIZE,))).items():
            self.drawn[name].assign(value)
        self.counted.update_state(0.0)
        return {"loss": self.counted.result()}


def main(kind, directory):
    cluster = read_cluster(os.environ)
    settings = TrainSettings(dataset="-", model="-", cpu_devices=2 if kind == "mirrored" else 0)
    replicas_of = strategy.create_strategy(settings, cluster)
    keras.utils.set_random_seed(5)
    with replicas_of.scope():
        model = Drawing()
        model.compile()
        shared = random_state()
        model(tf.ones((SIZE,)))
    batches = replicas_of.experimental_distribute_dataset(tf.data.Dataset.range(2).batch(2).repeat())
    loop = StepLoop(model, replicas_of, iter(batches), make_summation(settings, replicas_of, cluster))
    drawn = []
    for _ in range(STEPS):
        loop.train([2])
        drawn.append({name: local(replicas_of, variable) for name, variable in model.drawn.items()})
    generators = [shared, model.dropout.seed_generator.state, model.noise.seed_generator.state]
    state = [local(replicas_of, variable.value) for variable in generators]
    Path(directory, f"{cluster.name}.json").write_text(json.dumps({"drawn": drawn, "state": state}))
    Collectives(replicas_of).barrier()


def local(replicas_of, variable):
    """Returns what every replica of this process holds."""
    return [np.asarray(part).tolist() for part in replicas_of.experimental_local_results(variable)]


if __name__ == "__main__":
    main(*sys.argv[1:])
