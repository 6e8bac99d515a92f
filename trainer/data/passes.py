"""Passes: one pass after the other over somebody's own data, each in an order that its number decides.

A dataset shuffles in another order each time, and on each process. Here its graph is made anew for every
pass, with seeds that follow from the seed of the run and the number of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf

from shardline.trainer import progress
from shardline.trainer.data.seeding import PASS, Seeding, mixed_with, node_name, stateful_ops
from shardline.trainer.errors import SettingsError

# What passes on examples, one for one, behind the op that makes batches of them.
_ONE_FOR_ONE = (
    "CacheDatasetV2",
    "MapDataset",
    "ModelDataset",
    "OptionsDataset",
    "ParallelMapDatasetV2",
    "PrefetchDataset",
    "ShuffleDatasetV3",
)
_BATCHING = ("BatchDatasetV2", "ParallelBatchDataset")

# Bytes of a constant that is kept beside the graph: it would be copied with every function.
_LARGE = 1 << 16


class Passes(Protocol):
    """One pass after the other over batches."""

    element_spec: Any
    #: Batches of a pass; -1 for infinitely and -2 for unknown many.
    cardinality: int
    #: Examples of a pass and of a batch, where both are known.
    examples: tuple[int, int] | None
    #: Ops that draw numbers which no seed of ours decides.
    random: list[str]
    #: Batches that the program reads ahead, which is left to whoever reads the passes; -1 for AUTOTUNE.
    ahead: int

    def dataset(self, number: tf.Tensor) -> tf.data.Dataset:
        """Returns the pass of a number, int64 (); to be called in a function that is traced."""


class ArrayPasses:
    """Passes over arrays of as many examples: batches of a size, shuffled or in their order."""

    def __init__(self, arrays: Any, *, batch_size: int, shuffle: bool, seed: int) -> None:
        with tf.device("CPU:0"):
            self._arrays = tf.nest.map_structure(tf.convert_to_tensor, arrays)
        self._shuffle = shuffle
        self._seed = seed
        count = int(tf.nest.flatten(self._arrays)[0].shape[0])
        self.examples = (count, batch_size)
        self.cardinality = -(-count // batch_size)
        self.random: list[str] = []
        self.ahead = 0
        self.element_spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), self._arrays
        )

    def dataset(self, number: tf.Tensor) -> tf.data.Dataset:
        """Returns the pass of a number."""
        count, size = self.examples
        order = tf.range(count, dtype=tf.int64)
        if self._shuffle:
            order = tf.random.experimental.stateless_shuffle(
                order, tf.stack([mixed_with(self._seed, number), 0])
            )

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def batch(first: tf.Tensor) -> Any:
            chosen = order[first : first + size]
            return tf.nest.map_structure(lambda array: tf.gather(array, chosen), self._arrays)

        return tf.data.Dataset.range(0, count, size).map(batch)


class DatasetPasses:
    """Passes over a `tf.data.Dataset` of batches."""

    def __init__(self, dataset: tf.data.Dataset, name: str, seed: int) -> None:
        """Takes a dataset apart; a SettingsError says that it cannot be."""
        self._dataset = dataset  # whose functions last as long as it does
        self._seed = seed
        self.element_spec = dataset.element_spec
        self._graph, self._output = _taken_apart(dataset, name)
        self._nodes = {node.name: node for node in self._graph.node}
        plain = [
            node
            for node in self._graph.node
            if node.op == "Const" and node.attr["dtype"].type not in (tf.resource, tf.variant)
        ]
        self._constants = {node.name: _value(node) for node in plain}
        # Not part of a graph that is traced, and of which there would be copies.
        self._large = {
            node.name: self._constants[node.name] for node in plain if node.attr["value"].ByteSize() > _LARGE
        }
        for large in self._large:
            self._nodes[large].op = "Placeholder"
            self._nodes[large].attr["value"].Clear()
            del self._nodes[large].attr["value"]
        # Kept by all passes: what a cache holds is read once.
        self._caches = {
            node.input[2]: tf.raw_ops.AnonymousMemoryCache()
            for node in self._graph.node
            if node.op == "CacheDatasetV2" and not self._constants[node_name(node.input[1])]
        }
        caches = [node for node in self._graph.node if node.op.startswith("CacheDataset")]
        cached = {name for cache in caches for name in self._above(cache.input[0])}
        self.random = stateful_ops(self._graph)
        if Seeding(self._graph, seed, cached).decides_order:
            progress.say(
                "train",
                f"warning: {name} is shuffled once and without a seed (reshuffle_each_iteration=False), so "
                "that its order here is not the one in which the program reads it: where take and skip split "
                "it, training has examples of the other part; give shuffle a seed",
            )
        self.ahead, last = 0, self._nodes[node_name(self._output)]
        if last.op == "PrefetchDataset":
            # Every batch would be handed from thread to thread twice.
            self.ahead, self._output = int(self._constants[node_name(last.input[1])]), str(last.input[0])
            self._graph.node.remove(last)
        self.cardinality = self._count(self._output)
        self.examples = self._examples()

    def dataset(self, number: tf.Tensor) -> tf.data.Dataset:
        """Returns the pass of a number; what a cache holds is of the first."""
        return self._imported(self._output, mixed_with(self._seed, number))

    def _imported(self, output: str, number: tf.Tensor) -> tf.data.Dataset:
        caches = {name: handle for name, (handle, _) in self._caches.items()}
        # The identity makes an input of the traced function of what was made outside.
        replaced = {
            _tensor(name): tf.identity(value)
            for name, value in {**self._large, **caches, PASS: number}.items()
        }
        (variant,) = tf.graph_util.import_graph_def(
            self._graph, input_map=replaced, return_elements=[_tensor(output)], name=""
        )
        return tf.data.experimental.from_variant(variant, self.element_spec)

    def _above(self, name: str) -> Iterator[str]:
        node = self._nodes[node_name(name)]
        yield node.name
        for source in node.input:
            yield from self._above(source)

    def _examples(self) -> tuple[int, int] | None:
        """Returns the examples of a pass and of a batch, where both are known."""
        node = self._nodes[node_name(self._output)]
        while node.op in _ONE_FOR_ONE:
            node = self._nodes[node_name(node.input[0])]
        if node.op not in _BATCHING:
            return None
        count, inputs = self._count(node.input[0]), list(node.input)
        size = int(self._constants[node_name(inputs[1])])
        drops = bool(self._constants[node_name(inputs[3 if node.op == "ParallelBatchDataset" else 2])])
        return None if count < 0 else (count // size * size if drops else count, size)

    def _count(self, output: str) -> int:
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def count() -> tf.Tensor:
            return tf.raw_ops.DatasetCardinality(
                input_dataset=tf.data.experimental.to_variant(
                    self._imported(output, tf.constant(0, tf.int64))
                )
            )

        return int(count.get_concrete_function()())


def _taken_apart(dataset: tf.data.Dataset, name: str) -> tuple[Any, str]:
    """Returns a dataset's graph, a GraphDef, and its output; a SettingsError where there is none."""
    try:
        variant = tf.data.experimental.to_variant(dataset)
        # The functions of a generator are found again in this process.
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=1, strip_device_assignment=True
        )
        taken = tf.compat.v1.GraphDef.FromString(graph.numpy())
    except (tf.errors.OpError, ValueError, TypeError) as error:
        reason = (str(error).splitlines() or ["?"])[0][:200]
        raise SettingsError(
            f"{name} cannot be read in the same order by all processes, nor again when training goes on "
            f"({reason}); give arrays, or a dataset that reads files"
        ) from error
    last = next((node for node in taken.node if node.op == "_Retval"), None)
    if last is None:
        # TensorFlow returns a graph without a node where it would be too large.
        raise SettingsError(
            f"{name} holds arrays of more than 2 GB, which a tf.data.Dataset cannot; give the arrays "
            "themselves, (x, y), or a dataset that reads files"
        )
    output = str(last.input[0])
    taken.node.remove(last)
    return taken, output


def _value(constant: Any) -> tf.Tensor:
    """Returns the value of a node Const; tf.make_ndarray cannot read texts as a dataset's graph has them."""
    with tf.device("CPU:0"):
        content = constant.attr["value"].tensor.SerializeToString()
        return tf.io.parse_tensor(content, tf.as_dtype(constant.attr["dtype"].type))


def _tensor(reference: str) -> str:
    return reference if ":" in reference else f"{reference}:0"
