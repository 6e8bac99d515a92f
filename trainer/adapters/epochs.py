"""Epoch sources: a program's own data, in an order that follows from the run's seed and the epoch's number.

A `tf.data.Dataset` shuffles in another order each time it is read, and on each process. Here its graph is
imported for every epoch, and its random datasets get seeds of the run. The functions of a dataset, such as
the one that `interleave` calls for each file, have graphs of their own: those with random datasets get the
epoch as one more argument.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.keras_compat.tensorflow_internals import add_functions

# Datasets after the batching op that yield one element for each of their input.
_ONE_FOR_ONE = re.compile(r"(Cache|ParallelMap|Shuffle)DatasetV\d|(Map|Model|Options|Prefetch)Dataset")
_BATCHING = ("BatchDatasetV2", "ParallelBatchDataset")

# Bytes of a constant from which on it is kept out of the graph: it would be copied with every function.
_LARGE = 1 << 16

# Name of the node with the number of the epoch, int64 ().
EPOCH = "shardline_epoch"

# Datasets that draw random numbers: the index of the first of their two seeds among the inputs.
_RANDOM_DATASETS = {"RandomDataset": 0, "RandomDatasetV2": 0, "ShuffleDatasetV3": 2}
# Attributes of datasets that draw other numbers in each epoch.
_RESHUFFLES = ("reshuffle_each_iteration", "rerandomize_each_iteration")
# Datasets whose function "f" takes its captured values, "Targuments", from the inputs after the first.
_FUNCTION_DATASETS = (
    "FlatMapDataset",
    "InterleaveDataset",
    "MapDataset",
    "ParallelInterleaveDatasetV4",
    "ParallelMapDatasetV2",
)
# Ops that draw from a state of their own, or change one: no seed decides their result.
_STATEFUL = re.compile(
    "Assign(Add)?VariableOp|Multinomial|(Parameterized)?TruncatedNormal|RngReadAndSkip"
    "|Random(Gamma|PoissonV2|Shuffle|StandardNormal|Uniform|UniformInt)"
)

# First of the two seeds of an op with a seed, if the program has set no global one. If it has, TensorFlow
# draws the second, another one each time the program makes the dataset.
_NO_GLOBAL_SEED = 87654321

# A process keeps one function by name: each seeded one gets a name of its own.
_serials = itertools.count()


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
        self.prefetch = 0
        self.element_spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), self._arrays
        )

    def dataset(self, number: tf.Tensor) -> tf.data.Dataset:
        """Returns the batches of epoch `number`, int64 (); called while a function is traced."""
        count, size = self.examples or (0, 1)
        order = tf.range(count, dtype=tf.int64)
        if self._shuffle:
            order = tf.random.experimental.stateless_shuffle(
                order, tf.stack([_fold_in(self._seed, number), 0])
            )

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def batch(first: tf.Tensor) -> Any:
            chosen = order[first : first + size]
            return tf.nest.map_structure(lambda array: tf.gather(array, chosen), self._arrays)

        return tf.data.Dataset.range(0, count, size).map(batch)


class DatasetEpochs:
    """Epochs over a `tf.data.Dataset` of batches.

    Attributes:
        cardinality: Batches of the dataset; -1 if infinite, -2 if unknown.
        examples: Examples of the dataset and of a batch, if both are known.
        random_ops: Names of ops whose random numbers no seed of the run decides.
        prefetch: Buffer size of the dataset's last `prefetch`, which the reader applies; -1 for AUTOTUNE.
    """

    def __init__(self, dataset: tf.data.Dataset, name: str, seed: int) -> None:
        """Converts a dataset to a graph and seeds it; raises SettingsError if it cannot be converted."""
        self._dataset = dataset  # keeps its functions alive
        self._seed = seed
        self.element_spec = dataset.element_spec
        self._graph, self._output = _to_graph(dataset, name)
        self._nodes = {node.name: node for node in self._graph.node}
        held = (tf.resource, tf.variant)
        constants = (node for node in self._graph.node if node.op == "Const")
        plain = [node for node in constants if node.attr["dtype"].type not in held]
        with tf.device("CPU:0"):  # tf.make_ndarray cannot read the strings of a dataset's graph
            self._constants = {
                node.name: tf.io.parse_tensor(
                    node.attr["value"].tensor.SerializeToString(), tf.as_dtype(node.attr["dtype"].type)
                )
                for node in plain
            }
        # Kept out of the graph, which is copied when it is traced.
        self._large = {
            node.name: self._constants[node.name] for node in plain if node.attr["value"].ByteSize() > _LARGE
        }
        for large in self._large:
            self._nodes[large].op = "Placeholder"
            del self._nodes[large].attr["value"]
        # Shared by all epochs, so that cached elements are read once.
        self._caches = {
            node.input[2]: tf.raw_ops.AnonymousMemoryCache()
            for node in self._graph.node
            if node.op == "CacheDatasetV2" and not self._constants[_node_name(node.input[1])]
        }
        caches = [node for node in self._graph.node if node.op.startswith("CacheDataset")]
        cached = {name for cache in caches for name in self._ancestors(cache.input[0])}
        self.random_ops = stateful_ops(self._graph)
        if Seeding(self._graph, seed, cached).unseeded_shuffle:
            progress.report(
                "train",
                f"warning: {name} is shuffled once and without a seed (reshuffle_each_iteration=False), so "
                "its order here is not the one in which the program reads it: where take and skip split "
                "it, training has examples of the other part; give shuffle a seed",
            )
        self.prefetch, last = 0, self._nodes[_node_name(self._output)]
        if last.op == "PrefetchDataset":
            # Else every batch would be handed from thread to thread twice.
            self.prefetch, self._output = int(self._constants[_node_name(last.input[1])]), str(last.input[0])
            self._graph.node.remove(last)
        self.cardinality = self._cardinality(self._output)
        self.examples = self._count_examples()

    def dataset(self, number: tf.Tensor) -> tf.data.Dataset:
        """Returns the batches of epoch `number`; cached elements are those of the first one read."""
        return self._import_graph(self._output, _fold_in(self._seed, number))

    def _import_graph(self, output: str, number: tf.Tensor) -> tf.data.Dataset:
        caches = {name: handle for name, (handle, _) in self._caches.items()}
        values = {**self._large, **caches, EPOCH: number}
        # The identity turns values from outside the traced function into its inputs.
        replaced = {_tensor(name): tf.identity(value) for name, value in values.items()}
        (variant,) = tf.graph_util.import_graph_def(
            self._graph, input_map=replaced, return_elements=[_tensor(output)], name=""
        )
        return tf.data.experimental.from_variant(variant, self.element_spec)

    def _ancestors(self, name: str) -> Iterator[str]:
        node = self._nodes[_node_name(name)]
        yield node.name
        for source in node.input:
            yield from self._ancestors(source)

    def _count_examples(self) -> tuple[int, int] | None:
        """Returns the examples of the dataset and of a batch, if both are known."""
        node = self._nodes[_node_name(self._output)]
        while _ONE_FOR_ONE.fullmatch(node.op):
            node = self._nodes[_node_name(node.input[0])]
        if node.op not in _BATCHING:
            return None
        count, inputs = self._cardinality(node.input[0]), list(node.input)
        size = int(self._constants[_node_name(inputs[1])])
        drops = bool(self._constants[_node_name(inputs[3 if node.op == "ParallelBatchDataset" else 2])])
        return None if count < 0 else (count // size * size if drops else count, size)

    def _cardinality(self, output: str) -> int:
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def count() -> tf.Tensor:
            dataset = self._import_graph(output, tf.constant(0, tf.int64))
            return tf.raw_ops.DatasetCardinality(input_dataset=tf.data.experimental.to_variant(dataset))

        return int(count.get_concrete_function()())


def _to_graph(dataset: tf.data.Dataset, name: str) -> tuple[Any, str]:
    """Returns a dataset's GraphDef and the name of its output; a SettingsError if it cannot be converted."""
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
    last = next((node for node in definition.node if node.op == "_Retval"), None)
    if last is None:
        # TensorFlow returns an empty graph if it would be too large.
        raise SettingsError(
            f"{name} holds arrays of more than 2 GB, which a tf.data.Dataset cannot; pass the arrays "
            "themselves, (x, y), or a dataset that reads files"
        )
    definition.node.remove(last)
    return definition, str(last.input[0])


def _tensor(reference: str) -> str:
    return reference if ":" in reference else f"{reference}:0"


#: Source of either kind.
EpochSource: TypeAlias = ArrayEpochs | DatasetEpochs


def stateful_ops(graph: Any) -> list[str]:
    """Returns the names of the ops in a GraphDef that no seed decides, such as RandomUniform."""
    bodies = (graph.node, *(function.node_def for function in graph.library.function))
    return sorted({node.op for body in bodies for node in body if _STATEFUL.fullmatch(node.op)})


class Seeding:
    """Seeding of a dataset's graph: random numbers follow from a seed and, except cached ones, the epoch."""

    def __init__(self, graph: Any, seed: int, cached: Iterable[str]) -> None:
        """Changes a GraphDef in place; the nodes `cached` feed a cache: seeded alike in all epochs."""
        self._seed = seed
        #: Whether a dataset is shuffled once for all epochs, without a seed of the program.
        self.unseeded_shuffle = False
        self._serial = next(_serials)
        self._library = {function.signature.name: function for function in graph.library.function}
        self._seeded: dict[tuple[str, bool], str] = {}
        self._new_functions: list[Any] = []
        # Numbers the random datasets in graph order: their names differ between processes.
        self._draws = itertools.count()
        self._numbers: dict[Any, int] = {}
        kept, constants = frozenset(cached), _constants(graph.node)
        added: list[Any] = [_node(EPOCH, "Placeholder", dtype=tf.int64)]
        for node in graph.node:
            added += self._rewrite(node, constants, "" if node.name in kept else EPOCH, ("", ""))
        graph.node.extend(added)
        graph.library.function.extend(self._new_functions)
        add_functions(self._new_functions)

    def _rewrite(
        self, node: Any, constants: Mapping[str, int], number: str, outputs: tuple[str, str]
    ) -> list[Any]:
        """Seeds a node; returns the nodes to add for it.

        `number` names the epoch's node, "" for none; `outputs` are the suffixes by which inputs refer to a
        Const and to a BitwiseXor.
        """
        if node.op in _RANDOM_DATASETS:
            return self._reseed(node, constants, number, outputs)
        if _is_unordered(node):
            node.attr["deterministic"].s = b"true"
        for attribute in sorted(node.attr):
            called = node.attr[attribute].func
            takes_epoch = bool(number) and node.op in _FUNCTION_DATASETS and attribute == "f"
            name = self._function(called.name, takes_epoch) if called.name else ""
            if name:
                called.name = name
                if takes_epoch:
                    arguments = node.attr["Targuments"].list.type
                    inputs = list(node.input)
                    node.input[:] = [*inputs[: 1 + len(arguments)], number, *inputs[1 + len(arguments) :]]
                    arguments.append(tf.int64.as_datatype_enum)
        return []

    def _reseed(
        self, node: Any, constants: Mapping[str, int], number: str, outputs: tuple[str, str]
    ) -> list[Any]:
        first = _RANDOM_DATASETS[node.op]
        own = tuple(constants.get(_node_name(seed)) for seed in node.input[first : first + 2])
        unseeded, added = own == (0, 0), list[Any]()
        drawn = next(self._draws)
        position: int | None = drawn
        if not unseeded:
            # Datasets with equal seeds stay in one order, such as zipped inputs and labels.
            position = None if own[0] in (None, _NO_GLOBAL_SEED) else self._numbers.setdefault(own, drawn)
        reshuffles = any(node.attr[name].b for name in _RESHUFFLES if name in node.attr)
        constant, either = outputs
        if not constant and len(node.input) > first + 2:
            # Not the generator of the program's dataset, whose state continues.
            node.input[first + 2] = f"{node.name}/generator"
            added.append(_node(f"{node.name}/generator", "DummySeedGenerator"))
        if not reshuffles and not unseeded:
            # The program reads it in this order, and may have split it by take and skip.
            return added
        run = self._seed
        if not reshuffles and node.op == "ShuffleDatasetV3":
            number, run, self.unseeded_shuffle = "", 0, True
        # Two numbers unique to this seed and position.
        mixed = np.random.SeedSequence([run % 2**63, 0 if position is None else position + 1])
        for index, value in enumerate(mixed.generate_state(2, np.uint64)):
            name = f"{node.name}/seed_{index}"
            added.append(_node(f"{name}/run", "Const", dtype=tf.int64, value=value.astype(np.int64)))
            seed = f"{name}/run{constant}"
            if position is None:
                added.append(_node(name, "BitwiseXor", node.input[first + index], seed, T=tf.int64))
                seed = f"{name}{either}"
            if number:
                added.append(_node(f"{name}/epoch", "BitwiseXor", seed, number, T=tf.int64))
                seed = f"{name}/epoch{either}"
            node.input[first + index] = seed
        return added

    def _function(self, name: str, takes_epoch: bool) -> str:
        """Returns the name of a function's seeded copy, "" if nothing in it needs a seed."""
        if (name, takes_epoch) in self._seeded:
            return self._seeded[name, takes_epoch]
        function = self._library.get(name)
        if function is None or not self._needs_seeding(name):
            return ""
        seeded_copy = type(function).FromString(function.SerializeToString())
        seeded_copy.signature.name = seeded = f"{name}_seeded_{self._serial}_{len(self._seeded)}"
        self._seeded[name, takes_epoch] = seeded
        if takes_epoch:
            seeded_copy.signature.input_arg.add(name=EPOCH, type=tf.int64.as_datatype_enum)
        constants = _constants(seeded_copy.node_def)
        added: list[Any] = []
        for node in seeded_copy.node_def:
            added += self._rewrite(node, constants, EPOCH if takes_epoch else "", (":output:0", ":z:0"))
        seeded_copy.node_def.extend(added)
        self._new_functions.append(seeded_copy)
        return seeded

    def _needs_seeding(self, name: str) -> bool:
        """Whether a function, or one that it calls, has random or unordered datasets."""
        if name not in self._library:
            return False
        body = self._library[name].node_def
        return any(node.op in _RANDOM_DATASETS or _is_unordered(node) for node in body) or any(
            self._needs_seeding(value.func.name) for node in body for value in node.attr.values()
        )


def _fold_in(seed: int, number: tf.Tensor) -> tf.Tensor:
    """Returns a number, int64 (), unique to a seed and a number."""
    mixed = tf.random.experimental.stateless_fold_in(tf.constant([seed % 2**63, 0], tf.int64), number)
    return tf.random.stateless_uniform([], mixed, minval=None, maxval=None, dtype=tf.int64)


def _constants(nodes: Iterable[Any]) -> dict[str, int]:
    """Returns the values of the int64 scalars among nodes, by name."""
    constants = (node for node in nodes if node.op == "Const" and node.attr["dtype"].type == tf.int64)
    values = ((node.name, tf.make_ndarray(node.attr["value"].tensor)) for node in constants)
    return {name: int(value) for name, value in values if value.ndim == 0}


def _is_unordered(node: Any) -> bool:
    return "deterministic" in node.attr and node.attr["deterministic"].s == b"false"


def _node_name(reference: str) -> str:
    """Returns the name of the node that an input reference names."""
    return reference.partition(":")[0].lstrip("^")


def _node(name: str, op: str, *inputs: str, value: Any = None, **types: Any) -> Any:
    node = tf.compat.v1.NodeDef(name=name, op=op, input=inputs)
    for attribute, dtype in types.items():
        node.attr[attribute].type = dtype.as_datatype_enum
    if value is not None:
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return node
