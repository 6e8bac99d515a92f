"""Models that count the examples which an epoch has had exactly once, and a program that trains them.

`python -m tests.helpers.elastic OUT STEPS` trains on each kind of data up to a step, 0 for the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import shardline
from shardline.trainer import manifest as manifests
from tests.helpers.fit_programs import NAME, arrays, summary

BATCH, EPOCHS = 24, 3


@keras.saving.register_keras_serializable("tests")
class SeenOnce(keras.metrics.Metric):
    """The number of rows of a table that an epoch has had exactly once."""

    def __init__(self, table: Any, name: str = "seen_once", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.table = np.asarray(table, "float32")
        self.counts = self.add_weight(shape=(len(self.table),), initializer="zeros", name="counts")

    def note(self, x: Any) -> None:
        rows = tf.reshape(tf.cast(x, tf.float32), [-1, 1, self.table.shape[1]])
        same = tf.reduce_all(rows == self.table, -1)
        self.counts.assign_add(tf.reduce_sum(tf.cast(same, tf.float32), 0))

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        """Is left to `note`, which takes the inputs."""

    def result(self) -> Any:
        return tf.reduce_sum(tf.cast(self.counts == 1.0, tf.float32))


@keras.saving.register_keras_serializable("tests")
class Noting(keras.Sequential):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        for metric in self.metrics:
            for each in getattr(metric, "metrics", [metric]):
                if isinstance(each, SeenOnce):
                    each.note(x)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def make(table: Any, shape: tuple[int, ...], *layers: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    scaled = keras.layers.Rescaling(1 / 255 if len(shape) > 1 else 1.0)
    dense = [keras.layers.Flatten(), keras.layers.Dense(8, "relu"), *layers, keras.layers.Dense(3)]
    model = Noting([keras.Input(shape), scaled, *dense])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy", SeenOnce(table)])
    return model


def images(directory: Path) -> np.ndarray[Any, Any]:
    """The training examples of a dataset directory of raw images, flat."""
    split = manifests.load(directory).splits["train"]
    form = {"image": tf.io.FixedLenFeature([], tf.string)}
    records = tf.data.TFRecordDataset([str(directory / shard.file) for shard in split.shards])
    return np.array(
        [np.frombuffer(tf.io.parse_single_example(r, form)["image"].numpy(), "uint8") for r in records]
    )


def of_dataset(dataset: Any) -> keras.Model:
    """The model of the trainer."""
    return make(images(Path(sys.argv[sys.argv.index("--dataset") + 1])), dataset.input_shape)


def main(out: Path, steps: int) -> None:
    x, y = arrays()
    data: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
        "arrays": ((x, y), x, ()),
        "tf_data": (tf.data.Dataset.from_tensor_slices((x, y)).shuffle(103, seed=1).batch(BATCH), x, ()),
        "directory": (str(out.parent / "data"), images(out.parent / "data"), ()),
        "small_last_batch": ((x[:98], y[:98]), x[:98], ()),
        "random": ((x, y), x, (keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))),
    }
    found = {}
    for name, (given, table, layers) in data.items():
        shape = (4, 4, 1) if name == "directory" else x.shape[1:]
        history = shardline.fit(
            lambda table=table, shape=shape, layers=layers: make(table, shape, *layers),
            given,
            batch_size=None if name == "tf_data" else BATCH,
            epochs=EPOCHS,
            verbose=0,
            max_steps=steps,
            checkpoint_dir=out / name,
        )
        found[name] = {"history": history.history, "weights": summary(history.model)}
    (out / f"{NAME}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    shardline.strategy()
    main(Path(sys.argv[1]), int(sys.argv[2]))
