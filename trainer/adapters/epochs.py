"""Epoch sources: a program's own data, read epoch by epoch."""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

from shardline.trainer.base.errors import SettingsError
from shardline.trainer.keras_compat.datasets import (
    Watch,
    after_epochs,
    bodies,
    count_elements,
    count_examples,
    elements,
    no_autograph,
    stateful_ops,
)

# Datasets that draw random numbers: the index of the first of their two seeds among the inputs.
_RANDOM_DATASETS = {"RandomDataset": 0, "RandomDatasetV2": 0, "ShuffleDatasetV3": 2}


class ArrayEpochs:
    """Epochs over arrays of equal length: batches of `batch_size`, shuffled or in order."""

    def __init__(self, arrays: Any, *, batch_size: int, shuffle: bool, seed: int) -> None:
        with tf.device("CPU:0"):
            self._arrays = tf.nest.map_structure(tf.convert_to_tensor, arrays)
        self._shuffle = shuffle
        self._seed = seed
        count = int(tf.nest.flatten(self._arrays)[0].shape[0])
        self.examples: tuple[int, int] | None = (count, batch_size)
        self.cardinality = -(-count // batch_size)
        self.random_ops: list[str] = []
        self.unseeded: list[str] = []
        self.watch: Watch = lambda done, total: None
        self.element_spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), self._arrays
        )

    def dataset(self, number: tf.Tensor, first: int = 0, count: int = -1) -> tf.data.Dataset:
        """Returns `count` (-1: all) batches, from `first` on, of epoch `number`, int64 (), while traced."""
        examples, size = self.examples or (0, 1)
        order = tf.range(examples, dtype=tf.int64)
        if self._shuffle:
            order = tf.random.experimental.stateless_shuffle(
                order, tf.stack([_fold_in(self._seed, number), 0])
            )

        @no_autograph  # type: ignore[untyped-decorator]
        def batch(first: tf.Tensor) -> Any:
            chosen = order[first : first + size]
            return tf.nest.map_structure(lambda array: tf.gather(array, chosen), self._arrays)

        return tf.data.Dataset.range(first * size, examples, size).take(count).map(batch)

    def count_batches(self) -> int | None:
        """Returns the batches of an epoch."""
        return self.cardinality

    def after(self, epochs: int, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns batches unchanged: the number of an epoch decides its order."""
        return batches


class DatasetEpochs:
    """Epochs over a `tf.data.Dataset` of batches, as TensorFlow reads it again and again.

    Attributes:
        cardinality: Batches of the dataset; -1 if infinite, -2 if unknown.
        examples: Examples of the dataset and of a batch, if both are known.
        random_ops: Names of ops whose random numbers no seed decides.
        unseeded: What has no seed, or no order: "shuffle(100)".
        watch: Called while data before a resume is read again.
    """

    def __init__(self, dataset: tf.data.Dataset, name: str) -> None:
        """Looks into a dataset; raises SettingsError if it cannot be converted to a graph."""
        self._dataset = dataset
        self.element_spec = dataset.element_spec
        self.cardinality = int(dataset.cardinality())
        self.examples = count_examples(dataset)
        graph = _to_graph(dataset, name)
        self.random_ops = stateful_ops(graph)
        self.unseeded: list[str] = []
        self.watch: Watch = lambda done, total: None
        for nodes in bodies(graph):
            self._read_seeds(nodes)

    def dataset(self, number: tf.Tensor, first: int = 0, count: int = -1) -> tf.data.Dataset:
        """Returns `count` (-1: all) batches of an epoch from number `first` on; called while it is traced."""
        with tf.init_scope():
            return elements(self._dataset, first, count, self.watch)

    def count_batches(self) -> int | None:
        """Returns the batches of an epoch, read for that if need be; None where that draws an order."""
        return count_elements(self._dataset, self.watch)

    def after(self, epochs: int, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns batches after some epochs, whose orders are drawn first."""
        return after_epochs(self._dataset, epochs, batches, self.watch)

    def _read_seeds(self, nodes: Any) -> None:
        values = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
        constants = {name: tensor.int64_val[0] for name, tensor in values.items() if tensor.int64_val}
        for node in nodes:
            if node.op in _RANDOM_DATASETS:
                first = _RANDOM_DATASETS[node.op]
                inputs = [constants.get(reference.partition(":")[0], 0) for reference in node.input]
                if inputs[first : first + 2] == [0, 0]:
                    self.unseeded.append(f"shuffle({inputs[1]})" if first else "a random dataset")
            elif "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
                self.unseeded.append("deterministic=False")


def _to_graph(dataset: tf.data.Dataset, name: str) -> Any:
    """Returns a dataset's GraphDef; a SettingsError if it cannot be converted."""
    try:
        variant = tf.data.experimental.to_variant(dataset)
        # External state is kept: the Python functions of a generator are in this process.
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=1, strip_device_assignment=True
        )
        definition = tf.compat.v1.GraphDef.FromString(graph.numpy())
    except (tf.errors.OpError, ValueError, TypeError) as error:
        reason = (str(error).splitlines() or ["?"])[0][:200]
        raise SettingsError(
            f"{name} cannot be read in the same order by all processes, nor by a resumed run "
            f"({reason}); pass arrays, or a dataset that reads files"
        ) from error
    if not definition.node:
        # TensorFlow returns an empty graph if it would be too large.
        raise SettingsError(
            f"{name} holds arrays of more than 2 GB, which a tf.data.Dataset cannot; pass the arrays "
            "themselves, (x, y), or a dataset that reads files"
        )
    return definition


#: Source of either kind.
EpochSource: TypeAlias = ArrayEpochs | DatasetEpochs


def _fold_in(seed: int, number: tf.Tensor) -> tf.Tensor:
    """Returns a number, int64 (), unique to a seed and a number."""
    mixed = tf.random.experimental.stateless_fold_in(tf.constant([seed % 2**63, 0], tf.int64), number)
    return tf.random.stateless_uniform([], mixed, minval=None, maxval=None, dtype=tf.int64)
