"""`python -m tests.helpers.exchange_cases STRATEGY DIRECTORY CASE ...`: trains tiny models, one by one.

STRATEGY is one, mirrored (two logical CPUs), or tcp or ring, the communication of workers (TF_CONFIG). Every
run sees the same global batches;
two replicas divide each. Every process writes its losses, weights and state to `NAME.json` ("chief-0").
"""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.cluster import read_cluster
from shardline.trainer.distribute import Collectives, collectives, make_summation, strategy
from shardline.trainer.distribute.collectives import RingSummation
from shardline.trainer.keras_compat import keras_internals
from shardline.trainer.keras_compat.replicas import exact_losses
from shardline.trainer.loop.step import StepLoop

STEPS = 20
CLASSES = 3


def dense(optimizer, **options):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def averaged(reduction, masked=False):
    """A loss that divides by its weights, or by what a mask leaves: sums that differ by replica."""
    mask = [Hidden()] if masked else []
    model = keras.Sequential([keras.Input((4,)), *mask, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(o.SGD(0.5), loss)
    return model


class Hidden(keras.layers.Layer):
    """Masks the examples whose first number is negative."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def call(self, inputs):
        return inputs

    def compute_mask(self, inputs, mask=None):
        return inputs[..., 0] > 0


def half(optimizer):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return dense(optimizer)
    finally:
        keras.config.set_dtype_policy("float32")


def words(optimizer):
    """Sparse gradients, with words that come more than once in a batch."""
    numbers = keras.layers.Lambda(lambda x: keras.ops.cast(keras.ops.abs(x) * 3, "int32"))
    layers = [keras.layers.Embedding(50, 5), keras.layers.Flatten(), keras.layers.Dense(CLASSES, "softmax")]
    model = keras.Sequential([keras.Input((4,)), numbers, *layers])
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


class Pair(keras.Model):
    """Two networks, each with an optimizer of its own, trained in turn by a train_step of its own."""

    def __init__(self):
        super().__init__()
        self.left = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh")])
        self.right = keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES)])
        self.left_optimizer = keras.optimizers.Adam(0.02, clipnorm=0.05)
        self.objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def call(self, inputs):
        return self.right(self.left(inputs))

    def train_step(self, data):
        inputs, labels = data
        for part, optimizer in ((self.left, self.left_optimizer), (self.right, self.optimizer)):
            with tf.GradientTape() as tape:
                predicted = self(inputs, training=True)
                loss = self.objective(labels, predicted)
            gradients = tape.gradient(loss, part.trainable_variables)
            optimizer.apply_gradients(zip(gradients, part.trainable_variables, strict=True))
        return self.compute_metrics(inputs, labels, predicted)


def pair():
    model = Pair()
    model.compile(
        keras.optimizers.SGD(0.2, momentum=0.9, clipvalue=0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=5, decay_rate=0.5)


def both():
    inner = keras.optimizers
    return inner.MultiOptimizer(
        inner.OptimizerMap(inner.SGD(0.3, global_clipnorm=0.1), {".*bias": inner.Adam(0.01)})
    )


def scaled(inner, **options):
    return keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=9, **options)


o = keras.optimizers
#: Functions that make the model of each case.
MODELS = {
    "global_clipnorm": lambda: dense(o.SGD(0.5, momentum=0.9, global_clipnorm=0.1)),
    "clipnorm": lambda: dense(o.SGD(0.5, momentum=0.9, clipnorm=0.05)),
    "clipvalue": lambda: dense(o.SGD(0.5, clipvalue=0.01)),
    "adam_schedule": lambda: dense(o.Adam(schedule())),
    "adamw": lambda: dense(o.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1)),
    "nadam": lambda: dense(o.Nadam(0.01, clipnorm=0.1)),
    "ema": lambda: dense(o.SGD(0.3, use_ema=True, ema_momentum=0.8)),
    "ema_overwrite": lambda: dense(o.SGD(0.3, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)),
    "accumulation": lambda: dense(o.Adam(schedule(), gradient_accumulation_steps=2, global_clipnorm=0.1)),
    "loss_scale_factor": lambda: dense(o.SGD(0.3, loss_scale_factor=64.0, clipnorm=0.1)),
    "overflow": lambda: dense(scaled(o.SGD(0.3, momentum=0.9, global_clipnorm=0.2), initial_scale=1024.0)),
    "overflow_accumulation": lambda: dense(
        scaled(o.SGD(0.3, gradient_accumulation_steps=2, clipvalue=0.02), initial_scale=1024.0)
    ),
    "half": lambda: half(scaled(o.SGD(0.1, global_clipnorm=0.1), initial_scale=1024.0)),
    "half_overflow": lambda: half(scaled(o.Adam(0.01), initial_scale=2.0**20)),
    "two_optimizers": pair,
    "multi_optimizer": lambda: dense(both()),
    "multi_optimizer_scaled": lambda: dense(scaled(both())),
    "sparse": lambda: words(o.Adam(0.01)),
    "sparse_clipnorm": lambda: words(o.SGD(0.5, clipnorm=0.05)),
    "sparse_accumulation": lambda: words(o.SGD(0.5, gradient_accumulation_steps=2, clipvalue=0.01)),
    "uneven": lambda: dense(o.SGD(0.5, momentum=0.9)),
    "uneven_clipped": lambda: words(o.SGD(0.5, global_clipnorm=0.05)),
    "uneven_accumulation": lambda: dense(o.Adam(0.01, gradient_accumulation_steps=2)),
    "uneven_half": lambda: half(scaled(o.SGD(0.1, clipnorm=0.1), initial_scale=1024.0)),
    "masked": lambda: averaged("sum_over_batch_size", masked=True),
    "uneven_masked": lambda: averaged("mean", masked=True),
    "weighted_mean": lambda: averaged("mean_with_sample_weight"),
    "uneven_weighted_masked": lambda: averaged("mean_with_sample_weight", masked=True),
    "empty": lambda: dense(o.SGD(0.5, momentum=0.9)),
}


def batches(case):
    """Returns every step's batch with the number of examples of the first of two replicas."""
    random = np.random.default_rng(7)
    size, first = {"uneven": (9, 5), "empty": (4, 4)}.get(case.split("_")[0], (8, 4))
    for step in range(STEPS):
        inputs = random.normal(size=(size, 4)).astype(np.float32)
        if case.startswith("overflow") and step in (3, 10):
            inputs[-1, 0] = np.inf  # an example of the second replica
        labels = random.integers(0, CLASSES, size)
        weights = [random.uniform(0, 2, size).astype(np.float32)] if "weighted" in case else []
        yield (inputs, labels, *weights), first


def train(case, replicas_of, summation):
    keras.utils.set_random_seed(1)
    with replicas_of.scope():
        model = MODELS[case]()
        sample = (np.zeros((1, 4), np.float32), np.zeros(1, np.int64))
        model._symbolic_build(data_batch=sample)
    config = model.get_compile_config()
    changed = collectives.GradientExchange(model, summation)
    assert model.get_compile_config() == config
    replicas = replicas_of.num_replicas_in_sync

    @tf.function(reduce_retracing=True)
    def step(data, size):
        def one(data):
            local = tf.cast(tf.shape(data[0])[0], tf.float32)
            with changed.weighted(local / size):
                model.train_step(data)

        for _ in tf.range(1):  # as the training loop does
            with exact_losses():
                replicas_of.run(one, args=(data,))

    losses = []
    for data, first in batches(case):
        cut = [slice(None)] if replicas == 1 else [slice(first), slice(first, None)]
        values = [
            replicas_of.experimental_distribute_values_from_function(
                lambda context, whole=whole, cut=cut: whole[cut[context.replica_id_in_sync_group]]
            )
            for whole in data
        ]
        step(tuple(values), tf.constant(float(len(data[0]))))
        if case != "empty":  # its mean on no example at all is not a number
            losses.append(float(model.get_metrics_result()["loss"]))
            model.reset_metrics()
    return trained(replicas_of, model, losses)


def trained(replicas_of, model, losses):
    return {
        "losses": losses,
        "weights": local_values(replicas_of, model.weights),
        "state": [
            local_values(replicas_of, [v for v in optimizer.variables if "accumulator" not in v.path])
            for optimizer in keras_internals.optimizers(model)
        ],
    }


def stretch(replicas_of, summation):
    """Takes sparse steps through the loop, several in a call, of which the last of an epoch is smaller."""
    keras.utils.set_random_seed(4)
    with replicas_of.scope():
        model = words(o.Adam(0.01))
        model._symbolic_build(data_batch=(np.zeros((1, 4), np.float32), np.zeros(1, np.int64)))
    random = np.random.default_rng(8)
    sizes = [8, 8, 8, 6]
    epochs = [(random.normal(size=(n, 4)), random.integers(0, CLASSES, n)) for n in sizes * 2]

    def parts(context):
        replicas = context.num_replicas_in_sync
        local = replicas // context.num_input_pipelines
        first = context.input_pipeline_id * local
        for batch in epochs:
            own = [np.array_split(array, replicas)[first : first + local] for array in batch]
            yield from zip(*own, strict=True)

    signature = (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64))
    batches = replicas_of.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_generator(lambda: parts(context), output_signature=signature)
    )
    loop = StepLoop(model, replicas_of, iter(batches), summation)
    losses = []
    for _ in range(2):
        loop.train(sizes)
        losses.append(loop.read_metrics()["loss"])
    return trained(replicas_of, model, losses)


def merged(replicas_of, summation):
    """Returns an accumulator and a moving mean that differ by replica, before and after they are merged."""
    keras.utils.set_random_seed(2)
    with replicas_of.scope():
        layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(o.SGD(0.1, gradient_accumulation_steps=3), "mse")
        model._symbolic_build(data_batch=(np.zeros((1, 4), np.float32), np.zeros((1, 1), np.float32)))
    collectives.GradientExchange(model, summation)
    inputs = np.random.default_rng(5).normal(size=(8, 4)).astype(np.float32)

    def own(context):
        return inputs[4 * context.replica_id_in_sync_group :][:4]

    batch = replicas_of.experimental_distribute_values_from_function(own)
    tf.function(lambda: replicas_of.run(lambda x: model.train_step((x, x[:, :1])) and None, args=(batch,)))()
    variables = [model.layers[0].moving_mean, keras_internals.accumulators(model)[2]]
    before = local_values(replicas_of, variables)
    collectives.replica_merger(replicas_of, model)()
    after = local_values(replicas_of, variables)
    return {"before": before, "after": after}


def local_values(replicas_of, variables):
    """Returns what every replica of this process holds, by replica."""
    values = [replicas_of.experimental_local_results(variable.value) for variable in variables]
    return [[part.numpy().tolist() for part in replica] for replica in zip(*values, strict=True)]


def main(kind, directory, *cases):
    cluster = read_cluster(os.environ)
    settings = TrainSettings(
        dataset="-",
        model="-",
        cpu_devices=2 if kind == "mirrored" else 0,
        communication=kind if kind in ("tcp", "ring", "nccl") else "auto",
    )
    replicas_of = strategy.create_strategy(settings, cluster)
    collectives = Collectives(replicas_of)
    summation = make_summation(settings, replicas_of, cluster)
    assert isinstance(summation, RingSummation) == (kind == "tcp")
    results = {
        case: stretch(replicas_of, summation) if case == "stretch" else train(case, replicas_of, summation)
        for case in cases
    }
    if replicas_of.num_replicas_in_sync > 1:
        results["merged"] = merged(replicas_of, summation)
        results["total"] = collectives.total([1.0 + (not cluster.is_chief), 0.75])
    Path(directory, f"{cluster.name}.json").write_text(json.dumps(results))
    # A worker that leaves early would look like a failure, to a barrier too that is not over for the other.
    while not all(Path(directory, f"{name}.json").exists() for name in cluster.addresses):
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
