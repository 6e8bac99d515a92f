"""A process of the training benchmark: `python -m benchmarks.training_process JSON`, with TF_CONFIG or alone.

JSON: model, side, batch, cores, strategy, steps, rounds, variants (settings of the trainer by name).
Every variant has a model of its own in the same process; they take turns. Prints one JSON line: milliseconds
a step by variant, one for each round.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from shardline.trainer.keras_compat import tensorflow_internals

_WARM_UP = 3


def main(request: dict[str, Any]) -> None:
    """Measures."""
    os.sched_setaffinity(0, request["cores"])
    tensorflow_internals.keep_freed_memory()  # as the trainer does before it loads TensorFlow
    tensorflow_internals.import_tensorflow()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(len(request["cores"]))
    from shardline.trainer.base.settings import TrainSettings
    from shardline.trainer.cluster import read_cluster
    from shardline.trainer.distribute import Collectives
    from shardline.trainer.distribute import strategy as strategies

    cluster = read_cluster(os.environ)
    plain = TrainSettings(
        dataset="-",
        model=request["model"],
        strategy=request["strategy"],
        cpu_devices=2 if request["strategy"] == "mirrored" else 1,
    )
    strategy = strategies.create_strategy(plain, cluster)
    together = Collectives(strategy)
    runs = {
        name: _variant(request, strategy, cluster, name, options)
        for name, options in request["variants"].items()
    }
    for run in runs.values():
        run(_WARM_UP)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(request["rounds"]):
        for name, run in runs.items():
            together.barrier()
            started = time.perf_counter()
            run(request["steps"])
            found[name].append((time.perf_counter() - started) / request["steps"] * 1000)
    together.barrier()
    print(json.dumps(found), flush=True)
    together.barrier()


def _variant(
    request: dict[str, Any], strategy: Any, cluster: Any, name: str, options: dict[str, Any]
) -> Callable[[int], None]:
    """Returns what trains some steps in one way."""
    import keras
    import tensorflow as tf

    from shardline.trainer.base.settings import TrainSettings
    from shardline.trainer.distribute import make_summation
    from shardline.trainer.distribute import strategy as strategies
    from shardline.trainer.loop.build import accumulate_gradients
    from shardline.trainer.loop.step import StepLoop

    settings = TrainSettings(dataset="-", model=request["model"], **options)
    replicas = strategy.num_replicas_in_sync
    batch = _batch(request["batch"], request["side"])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = _model(request)
        accumulate_gradients(model, settings.gradient_accumulation_steps)
        model._symbolic_build(data_batch=batch)
    if name in _PEERS:
        return _PEERS[name](model, batch)

    def dataset(context: Any) -> Any:
        return tf.data.Dataset.from_tensors(batch).repeat()

    local = strategies.has_one_cpu(strategy)  # as the trainer's own input
    batches: Iterator[Any] = iter(
        dataset(None) if local else strategy.distribute_datasets_from_function(dataset)
    )
    loop = StepLoop(model, strategy, batches, make_summation(settings, strategy, cluster))

    def run(steps: int) -> None:
        loop.train([request["batch"] * replicas] * steps)

    return run


def _model(request: dict[str, Any]) -> Any:
    from shardline.trainer.loop.build import build
    from shardline.trainer.manifest import CLASS, LABEL, DatasetInfo, Feature, Label

    shape = (request["side"], request["side"], 3 if request["model"] == "resnet50" else 1)
    image = Feature("image", "uint8", shape, "raw")
    names = tuple(str(label) for label in range(10))
    info = DatasetInfo(
        shape, {LABEL: Label(LABEL, CLASS, names)}, {"image": image}, {"train": 1000}, {"image": image}
    )
    return build(request["model"], info, {})


def tutorial_cnn(dataset: Any) -> Any:
    """The network of TensorFlow's multi-worker tutorial with its dense layer: 2.77 million weights."""
    import keras

    model = keras.Sequential(
        [
            keras.Input(dataset.input_shape, dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.001), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def _batch(size: int, side: int) -> Any:
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    channels = 1 if side == 28 else 3
    images = random.integers(0, 256, (size, side, side, channels), dtype=np.uint8)
    return tf.constant(images), tf.constant(random.integers(0, 10, size))


def _bare(model: Any, batch: Any) -> Callable[[int], None]:
    """The compiled step and nothing else."""
    import tensorflow as tf

    @tf.function  # type: ignore[untyped-decorator]
    def steps(batch: Any, count: tf.Tensor) -> None:
        for _ in tf.range(count):
            model.train_step(batch)

    # An argument: TensorFlow would compute what follows from a constant once and for all.
    return lambda count: steps(batch, tf.constant(count))


def _keras_fit(model: Any, batch: Any) -> Callable[[int], None]:
    """Keras 3's own `fit`, 50 steps an execution where it can."""
    import tensorflow as tf

    # More than one fails under a strategy of several replicas, in Keras' own loop.
    model.steps_per_execution = 50 if model.distribute_strategy.num_replicas_in_sync == 1 else 1
    data = tf.data.Dataset.from_tensors(batch).repeat()

    def run(steps: int) -> None:
        model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0)

    return run


def _tf_keras_fit(model: Any, batch: Any) -> Callable[[int], None]:
    """Keras 2's `fit`, 50 steps an execution, of the tutorial's network."""
    import tensorflow as tf
    import tf_keras

    layers = tf_keras.layers
    older = tf_keras.Sequential(
        [
            layers.Rescaling(1 / 255, input_shape=model.input_shape[1:]),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = tf_keras.optimizers.SGD(0.001)
    loss = "sparse_categorical_crossentropy"
    older.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=50)
    data = tf.data.Dataset.from_tensors(batch).repeat()

    def run(steps: int) -> None:
        older.fit(data, steps_per_epoch=steps, epochs=1, verbose=0)

    return run


_PEERS: dict[str, Callable[[Any, Any], Callable[[int], None]]] = {
    "bare step": _bare,
    "Keras fit": _keras_fit,
    "tf_keras fit": _tf_keras_fit,
}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
