"""Datasets of TensorFlow, by undocumented attributes: the rest of one without what comes before it.

A dataset's inputs, functions and counts are private; with them a resume reads only what it returns, and draws
the orders of shuffles that an undisturbed run would have drawn.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from shardline.trainer.base.errors import SettingsError

#: Keeps AutoGraph from functions that branch on no tensor: converting them takes longer than tracing.
no_autograph = tf.autograph.experimental.do_not_convert

# Datasets, by the names of their classes, that make batches, and those that yield one element for each.
_BATCHING = ("_BatchDataset", "_ParallelBatchDataset")
_ONE_FOR_ONE = re.compile("CacheDataset|_(Map|ParallelMap|Options|Prefetch|Shuffle)Dataset")
_UNCHANGED = ("_PrefetchDataset", "_OptionsDataset")
# Ops that draw from a state of their own, or change one: no seed decides their result.
_STATEFUL = re.compile(
    "Assign(Add)?VariableOp|Multinomial|(Parameterized)?TruncatedNormal|RngReadAndSkip"
    "|Random(Gamma|PoissonV2|Shuffle|StandardNormal|Uniform|UniformInt)"
)
# Datasets that draw random numbers: the index of the first of their two seeds among the inputs.
_RANDOM_DATASETS = {"RandomDataset": 0, "RandomDatasetV2": 0, "ShuffleDatasetV3": 2}
#: Called with the elements that have been read again, and with how many there are, at least every second or
#: after every element.
Watch = Callable[[int, int], None]


def _inputs(data: Any) -> list[Any]:
    inputs: list[Any] = getattr(data, "_inputs", list)()
    return inputs


def stateful_ops(graph: Any) -> list[str]:
    """Returns the names of the ops in a GraphDef that no seed decides, such as RandomUniform."""
    return sorted({node.op for nodes in bodies(graph) for node in nodes if _STATEFUL.fullmatch(node.op)})


def bodies(graph: Any) -> list[Any]:
    """Returns the nodes of a GraphDef and of each of its functions."""
    return [graph.node, *(function.node_def for function in graph.library.function)]


def without_prefetch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset that reads nothing ahead at its end, such as past a repetition that shuffles."""
    options = dataset.options()
    while type(dataset).__name__ in _UNCHANGED:
        (dataset,) = dataset._inputs()
    return dataset.with_options(options)


def without_repeat(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, int]:
    """Returns a dataset without `repeat` at its end, and how often it is repeated; -1 for without end."""
    options, times, found = dataset.options(), 1, dataset
    while type(found).__name__ in (*_UNCHANGED, "_RepeatDataset"):
        if type(found).__name__ == "_RepeatDataset":
            count = int(found._count)
            times = -1 if min(count, times) < 0 else times * count
        (found,) = found._inputs()
    return (dataset, 1) if times in (0, 1) else (found.with_options(options), times)


def drawing_datasets(data: Any) -> list[tf.data.Dataset]:
    """Returns the datasets within a dataset that draw another seeded order in each epoch, one per use."""
    below = [found for inner in _inputs(data) for found in drawing_datasets(inner)]
    draws = getattr(data, "_reshuffle_each_iteration", getattr(data, "_rerandomize", False))
    return [data, *below] if draws and (int(data._seed) or int(data._seed2)) else below


def epochs_to_read(data: Any) -> int:
    """Returns how many first epochs have to be read to their ends for the order of those after them."""
    inputs, kind = _inputs(data), type(data).__name__
    if kind in ("_RepeatDataset", "_ConcatenateDataset") and drawing_datasets(data):
        return 2**40  # shuffles within an epoch
    own = int(kind == "CacheDataset" and bool(drawing_datasets(data)))  # which keeps the first order
    return max([own, *(epochs_to_read(each) for each in inputs)])


def count_examples(dataset: tf.data.Dataset) -> tuple[int, int] | None:
    """Returns the examples of a dataset of batches, and of a batch, if both are known."""
    while _ONE_FOR_ONE.fullmatch(type(dataset).__name__):
        (dataset,) = dataset._inputs()
    if type(dataset).__name__ not in _BATCHING:
        return None
    count, size = int(dataset._inputs()[0].cardinality()), int(dataset._batch_size)
    return None if count < 0 else (count - count % size * bool(dataset._drop_remainder), size)


def count_elements(data: Any, watch: Watch) -> int | None:
    """Returns the number of elements, read below the maps if need be; None where that draws an order."""
    known, kind = int(data.cardinality()), type(data).__name__
    if known != tf.data.UNKNOWN_CARDINALITY:
        return known
    if _ONE_FOR_ONE.fullmatch(kind):
        return count_elements(data._inputs()[0], watch)
    if kind in (*_BATCHING, "_PaddedBatchDataset"):
        examples = count_elements(data._inputs()[0], watch)
        size = int(data._batch_size)
        return examples and (examples // size if data._drop_remainder else -(-examples // size))
    if drawing_datasets(data):
        return None
    done = 0
    for part in data.map(no_autograph(lambda *_: True)).batch(1024).as_numpy_iterator():
        done += len(part)
        watch(done, 0)
    return done


def elements(data: tf.data.Dataset, first: int, count: int, watch: Watch) -> tf.data.Dataset:
    """Returns `count` elements (-1: all) of a dataset from number `first` on.

    Unlike `skip` and `take` it reads no others where batches, maps, repetitions and the like are at the end
    of the dataset, nor ahead of the last one. What has to be read again, such as a shuffle, calls `watch`.
    """
    inputs, kind = _inputs(data), type(data).__name__
    if not first and count < 0:
        return data
    if kind in _AGAIN and not any(
        stateful_ops(each.function.graph.as_graph_def()) for each in data._functions()
    ):
        size = int(getattr(data, "_batch_size", 1))
        inner = [elements(each, first * size, max(count * size, -1), watch) for each in inputs]
        return _again(data, inner)
    if kind == "_SkipDataset" and int(data._count) >= 0:
        return elements(inputs[0], first + int(data._count), count, watch)
    if kind == "_TakeDataset" and int(data._count) >= 0:
        left = max(0, int(data._count) - first)
        return elements(inputs[0], first, left if count < 0 else min(count, left), watch)
    if kind == "_RepeatDataset" and first and (length := int(inputs[0].cardinality())) > 0:
        times, rest = divmod(first, length)
        left = int(data._count) - times
        if left > 0 or int(data._count) < 0:
            begun = elements(inputs[0], rest, -1, watch)
            others = inputs[0].repeat(max(left - 1, -1))
            if left == 1:  # at its end a repetition begins its input once more
                others = tf.data.Dataset.choose_from_datasets([inputs[0]], tf.data.Dataset.range(0))
            return after_epochs(inputs[0], times, begun.concatenate(others), watch).take(count)
    return (_watched(data, first, watch).skip(first) if first else data).take(count)


def after_epochs(
    data: tf.data.Dataset, count: int, batches: tf.data.Dataset, watch: Watch
) -> tf.data.Dataset:
    """Returns a dataset that begins as if `count` epochs of `data`, which it reads from, had been read.

    To begin an epoch draws its order, so those epochs are begun, and if need be read.
    """
    drawing = drawing_datasets(data)
    if not count or not drawing:
        return batches
    whole, nothing, read = min(count, epochs_to_read(data)), tf.data.Dataset.range(0), data
    each = [draws.map(no_autograph(lambda *_: tf.constant(0, tf.int64))) for draws in drawing]
    begun = tf.data.Dataset.choose_from_datasets([nothing, *each], nothing)  # no elements
    past = tf.data.Dataset.range(whole, count).flat_map(no_autograph(lambda _: begun))
    if whole:
        while type(read).__name__ in _AGAIN and len(read._inputs()) == 1:
            (read,) = read._inputs()  # a map draws no order
        all_of_them = tf.data.Dataset.range(whole).flat_map(no_autograph(lambda _: read))
        watched = _watched(all_of_them, whole * int(read.cardinality()), watch)
        past = (
            watched.filter(no_autograph(lambda *_: False))
            .map(no_autograph(lambda *_: tf.constant(0, tf.int64)))
            .concatenate(past)
        )
    return past.flat_map(no_autograph(lambda _: data)).concatenate(batches)


def _watched(data: tf.data.Dataset, total: int, watch: Watch) -> tf.data.Dataset:
    """Returns a dataset that calls `watch` while its first `total` elements (0: unknown) are read.

    A function for each element would cost more than some elements: it is called for each part of them.
    """
    done, size, began, total = 0, 1, 0.0, max(0, total)

    def next_part() -> Any:
        nonlocal done, size, began
        watch(done, total)
        if 0 < total <= done:
            return np.int64(-1)
        now = time.monotonic()
        size = size * 2 if now - began < 1.0 else max(1, size // 2)
        size = min(total - done, size) if total else size
        done, began = done + size, now
        return np.int64(size)

    one = tf.data.Dataset.from_tensors(np.int64(0))
    parts = tf.data.Dataset.counter().flat_map(
        no_autograph(lambda _: one.repeat(tf.ensure_shape(tf.numpy_function(next_part, [], tf.int64), [])))
    )
    return tf.data.Dataset.choose_from_datasets([data], parts)


def _again(data: Any, inputs: Sequence[Any]) -> tf.data.Dataset:
    """Returns what a dataset makes of its inputs, of others, without a new trace of its function."""
    make, names = _AGAIN[type(data).__name__]
    attributes = {name: getattr(data, f"_{name}") for name in names}
    for function in data._functions():
        attributes |= {"f": function.function, "other_arguments": function.function.captured_inputs}
    if "padded_shapes" in names:
        attributes |= {
            name: tf.nest.flatten(attributes[name]) for name in ("padded_shapes", "padding_values")
        }
    if make == "OptionsDataset":
        return inputs[0].with_options(data.options())
    variants = [each._variant_tensor for each in inputs]
    source = {"input_datasets": variants} if make == "ZipDataset" else {"input_dataset": variants[0]}
    shapes = {"metadata": b"", "output_shapes": data._flat_shapes}
    if make != "PaddedBatchDatasetV2":
        shapes["output_types"] = data._flat_types
    variant = getattr(tf.raw_ops, make)(**source, **attributes, **shapes)
    return tf.data.experimental.from_variant(variant, data.element_spec)


# Datasets of which some elements follow from as many elements, or batches, of their inputs: the op that makes
# them, and its attributes.
_AGAIN = {
    "_MapDataset": ("MapDataset", ("use_inter_op_parallelism", "preserve_cardinality", "force_synchronous")),
    "_ParallelMapDataset": (
        "ParallelMapDatasetV2",
        (
            *("num_parallel_calls", "deterministic", "use_inter_op_parallelism", "preserve_cardinality"),
            "use_unbounded_threadpool",
        ),
    ),
    "_BatchDataset": ("BatchDatasetV2", ("batch_size", "drop_remainder")),
    "_ParallelBatchDataset": (
        "ParallelBatchDataset",
        ("batch_size", "num_parallel_calls", "drop_remainder", "deterministic"),
    ),
    "_PaddedBatchDataset": (
        "PaddedBatchDatasetV2",
        ("batch_size", "padded_shapes", "padding_values", "drop_remainder"),
    ),
    "_PrefetchDataset": ("PrefetchDataset", ("buffer_size",)),
    "_OptionsDataset": ("OptionsDataset", ()),
    "_ZipDataset": ("ZipDataset", ()),
}


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
