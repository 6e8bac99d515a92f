"""Passes: one pass after the other over somebody's own data, each in an order that its number decides.

A dataset shuffles in another order each time, and on each process. Here its graph is made anew for every
pass, with seeds that follow from the seed of the run and the number of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import tensorflow as tf

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
_RANDOM = ("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle")

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

    def dataset(self, number: tf.Tensor) -> tf.data.Dataset:
        """Returns the pass of a number, int64 (); to be called in a function that is traced."""


class ArrayPasses:
    """Passes over arrays of as many examples: batches of a size, shuffled or in their order."""

    def __init__(self, arrays: Any, *, batch_size: int, shuffle: bool, seed: int) -> None:
        self._arrays = tf.nest.map_structure(tf.convert_to_tensor, arrays)
        self._shuffle = shuffle
        self._seed = seed
        count = int(tf.nest.flatten(self._arrays)[0].shape[0])
        self.examples = (count, batch_size)
        self.cardinality = -(-count // batch_size)
        self.random: list[str] = []
        self.element_spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), self._arrays
        )

    def dataset(self, number: tf.Tensor) -> tf.data.Dataset:
        """Returns the pass of a number."""
        count, size = self.examples
        order = tf.range(count, dtype=tf.int64)
        if self._shuffle:
            order = tf.random.experimental.stateless_shuffle(order, _mixed(self._seed, number))
        indices = tf.data.Dataset.from_tensor_slices(order).batch(size)
        take = tf.autograph.experimental.do_not_convert(
            lambda index: tf.nest.map_structure(lambda array: tf.gather(array, index), self._arrays)
        )
        return indices.map(take, num_parallel_calls=tf.data.AUTOTUNE)


class DatasetPasses:
    """Passes over a `tf.data.Dataset` of batches."""

    def __init__(self, dataset: tf.data.Dataset, name: str, seed: int) -> None:
        """Takes a dataset apart; a SettingsError says that it cannot be."""
        self._dataset = dataset  # whose functions last as long as it does
        self._seed = seed
        self.element_spec = dataset.element_spec
        try:
            variant = tf.data.experimental.to_variant(dataset)
            # The functions of a generator are found again in this process.
            graph = tf.raw_ops.DatasetToGraphV2(
                input_dataset=variant, external_state_policy=1, strip_device_assignment=True
            )
            self._graph = tf.compat.v1.GraphDef.FromString(graph.numpy())
        except (tf.errors.OpError, ValueError, TypeError) as error:
            reason = (str(error).splitlines() or ["?"])[0][:200]
            raise SettingsError(
                f"{name} cannot be read in the same order by all processes, nor again when training goes on "
                f"({reason}); give arrays, or a dataset that reads files"
            ) from error
        last = next(node for node in self._graph.node if node.op == "_Retval")
        self._output = last.input[0]
        self._graph.node.remove(last)
        self._nodes = {node.name: node for node in self._graph.node}
        self._constants = {
            node.name: tf.make_ndarray(node.attr["value"].tensor)
            for node in self._graph.node
            if node.op == "Const" and node.attr["dtype"].type not in (tf.resource, tf.variant)
        }
        # Not part of a graph that is traced, and of which there would be copies.
        self._large = {
            name: tf.constant(value) for name, value in self._constants.items() if value.nbytes > _LARGE
        }
        for name in self._large:
            self._nodes[name].op = "Placeholder"
            self._nodes[name].attr["value"].Clear()
            del self._nodes[name].attr["value"]
        # Kept by all passes: what a cache holds is read once.
        self._caches = {
            node.input[2]: tf.raw_ops.AnonymousMemoryCache()
            for node in self._graph.node
            if node.op == "CacheDatasetV2" and not self._constants[_name(node.input[1])]
        }
        caches = [node for node in self._graph.node if node.op.startswith("CacheDataset")]
        self._cached = {name for cache in caches for name in self._above(cache.input[0])}
        self.cardinality = self._count(self._output)
        self.examples = self._examples()
        bodies = (function.node_def for function in self._graph.library.function)
        self.random = sorted({node.op for body in bodies for node in body if node.op in _RANDOM})

    def dataset(self, number: tf.Tensor) -> tf.data.Dataset:
        """Returns the pass of a number; what a cache holds is of the first."""
        changed: dict[str, Any] = {}
        for index, node in enumerate(self._graph.node):
            if node.op != "ShuffleDatasetV3":
                continue
            again = node.name in self._cached or not node.attr["reshuffle_each_iteration"].b
            own = [int(self._constants[_name(seed)]) for seed in node.input[2:4]]
            mixed = _mixed(self._seed, index, *own, 0 if again else number)
            changed |= dict(zip(node.input[2:4], tf.unstack(mixed), strict=True))
            # Not that of the given dataset, which goes on with its own.
            changed[node.input[4]] = tf.raw_ops.DummySeedGenerator()
        return self._imported(self._output, changed)

    def _imported(self, output: str, changed: Mapping[str, Any]) -> tf.data.Dataset:
        caches = {name: handle for name, (handle, _) in self._caches.items()}
        # The identity makes an input of the traced function of what was made outside.
        replaced = {
            _tensor(name): tf.identity(value) for name, value in {**self._large, **caches, **changed}.items()
        }
        (variant,) = tf.graph_util.import_graph_def(
            self._graph, input_map=replaced, return_elements=[_tensor(output)], name=""
        )
        return tf.data.experimental.from_variant(variant, self.element_spec)

    def _above(self, name: str) -> Iterator[str]:
        node = self._nodes[_name(name)]
        yield node.name
        for source in node.input:
            yield from self._above(source)

    def _examples(self) -> tuple[int, int] | None:
        """Returns the examples of a pass and of a batch, where both are known."""
        node = self._nodes[_name(self._output)]
        while node.op in _ONE_FOR_ONE:
            node = self._nodes[_name(node.input[0])]
        if node.op not in _BATCHING:
            return None
        count, inputs = self._count(node.input[0]), list(node.input)
        size = int(self._constants[_name(inputs[1])])
        drops = bool(self._constants[_name(inputs[3 if node.op == "ParallelBatchDataset" else 2])])
        return None if count < 0 else (count // size * size if drops else count, size)

    def _count(self, output: str) -> int:
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def count() -> tf.Tensor:
            return tf.raw_ops.DatasetCardinality(
                input_dataset=tf.data.experimental.to_variant(self._imported(output, {}))
            )

        return int(count())


def _name(reference: str) -> str:
    return reference.partition(":")[0].lstrip("^")


def _tensor(reference: str) -> str:
    return reference if ":" in reference else f"{reference}:0"


def _mixed(seed: int, *numbers: int | tf.Tensor) -> tf.Tensor:
    """Returns two seeds, int64 (2,), that other numbers do not give."""
    mixed = tf.constant([seed % 2**63, len(numbers)], tf.int64)
    for number in numbers:
        mixed = tf.random.experimental.stateless_fold_in(mixed, tf.cast(number, tf.int64))
    return tf.random.stateless_uniform([2], mixed, minval=None, maxval=None, dtype=tf.int64)
