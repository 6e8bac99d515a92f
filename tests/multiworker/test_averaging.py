"""Local SGD: workers train apart between two averages, and end with the same weights."""

import csv
import json

import numpy as np
import pytest

from shardline.trainer.models.saving import load_model
from tests.helpers import replicas
from tests.helpers.datasets import write_dataset

pytestmark = pytest.mark.multiworker

PROGRAM = """
import json, os, sys
import keras
import numpy as np
import tensorflow as tf
from shardline.trainer.cluster import strategy
from shardline.trainer.cluster.cluster import read_cluster
from shardline.trainer.cluster.collectives import Collectives, make_summation, replica_merger
from shardline.trainer.loop.step import StepLoop
from shardline.trainer.base.settings import TrainSettings

cluster = read_cluster(os.environ)
given = dict(dataset="-", model="-", averaging_steps=3, communication="tcp")
workers = strategy.create(TrainSettings(**given), cluster)
together = Collectives(workers)

def data(context):
    target = 1.0 + 2 * context.input_pipeline_id
    batch = np.ones((2, 1), np.float32), np.full((2, 1), target, np.float32)
    return tf.data.Dataset.from_tensors(batch).repeat()

def train(compression):
    settings = TrainSettings(**given, gradient_compression=compression)
    with workers.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
        model._symbolic_build(data_batch=(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)))
    batches = iter(workers.distribute_datasets_from_function(data))
    loop = StepLoop(model, workers, batches, make_summation(settings, workers, cluster), averaging_steps=3)
    found = []
    for _ in range(7):
        loop.train([4])
        found.append([float(w.flatten()[0]) for w in model.get_weights()])
    replica_merger(workers, model, weights=True)()
    found.append([float(w.flatten()[0]) for w in model.get_weights()])
    slots = [float(v.numpy().flatten()[0]) for v in model.optimizer.variables if "momentum" in v.path]
    return found, slots

found, slots = train("none")
assert train("bfloat16") == (found, slots), "weights have travelled compressed"
print("found", json.dumps([found, slots]), flush=True)
together.barrier()
"""


def alone(target, weights, momenta, steps):
    """Returns the weights after each step of SGD with momentum on (kernel + bias - target)^2."""
    found = []
    for _ in range(steps):
        gradient = 2 * (sum(weights) - target)
        momenta = [0.5 * momentum - 0.1 * gradient for momentum in momenta]
        weights = [weight + momentum for weight, momentum in zip(weights, momenta, strict=True)]
        found.append(weights)
    return found, momenta


def test_weights_are_averaged_every_few_steps_and_slots_at_a_checkpoint():
    outputs = replicas.run(["-c", PROGRAM], 2)
    lines = (next(one for one in output.splitlines() if one.startswith("found")) for output in outputs)
    workers = [json.loads(line.removeprefix("found ")) for line in lines]

    weights, momenta = [[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2
    for first in (0, 3, 6):
        steps = min(3, 7 - first)
        ways = [alone(1.0 + 2 * rank, weights[rank], momenta[rank], steps) for rank in range(2)]
        mean = np.mean([way[0][-1] for way in ways], axis=0)
        momenta = [way[1] for way in ways]
        for rank, (found, _) in enumerate(workers):
            expected = [*ways[rank][0][:-1], mean if steps == 3 else ways[rank][0][-1]]
            np.testing.assert_allclose(found[first : first + steps], expected, rtol=1e-5)
        weights = [mean.tolist()] * 2
    for found, slots in workers:
        np.testing.assert_allclose(found[7], mean, rtol=1e-5)
        np.testing.assert_allclose(slots, np.mean(momenta, axis=0), rtol=1e-5)


def test_a_run_with_averaging_learns_and_validates_one_model(tmp_path):
    write_dataset(tmp_path / "data", records={"train": 96, "validation": 24, "test": 8}, shards=4)
    arguments = ["-m", "shardline.trainer.task", "--dataset", tmp_path / "data", "--model", "mnist_cnn"]
    arguments += ["--model-dir", tmp_path / "out", "--epochs", 3, "--per-replica-batch-size", 8]
    replicas.run([str(one) for one in [*arguments, "--averaging-steps", 4]], 2)

    with (tmp_path / "out" / "history.csv").open() as file:
        losses = [float(row["val_loss"]) for row in csv.DictReader(file)]
    assert losses[-1] < losses[0]
    assert all(np.isfinite(one).all() for one in load_model(tmp_path / "out" / "model.keras").get_weights())
