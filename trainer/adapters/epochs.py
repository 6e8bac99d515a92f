"""Passes over a program's own data, each in an order that follows from the run's seed and the pass's number.

A dataset shuffles in another order each time, and on each process. Here its graph is made anew for every
pass, and what draws in it gets seeds of ours. The functions of a dataset, such as the one that `interleave`
calls for each file, have graphs of their own: those that draw get the pass as one more argument.
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

# What passes on examples, one for one, behind the op that makes batches of them.
_ONE_FOR_ONE = re.compile(r"(Cache|ParallelMap|Shuffle)DatasetV\d|(Map|Model|Options|Prefetch)Dataset")
_BATCHING = ("BatchDatasetV2", "ParallelBatchDataset")

# Bytes of a constant that is kept beside the graph: it would be copied with every function.
_LARGE = 1 << 16

# The node that stands for the pass, int64 (): a number that no other pass has.
PASS = "shardline_pass"

# Datasets that draw: the position of the first of their two seeds among the inputs.
_DRAWING = {"RandomDataset": 0, "RandomDatasetV2": 0, "ShuffleDatasetV3": 2}
# Attributes that say whether a dataset draws anew in each pass.
_ANEW = ("reshuffle_each_iteration", "rerandomize_each_iteration")
# Datasets whose function "f" takes what it captured, "Targuments", from behind their first input.
_CALLING = (
    "FlatMapDataset",
    "InterleaveDataset",
    "MapDataset",
    "ParallelInterleaveDatasetV4",
    "ParallelMapDatasetV2",
)
# Ops that draw numbers from a state of their own, or change one: no seed of a pass decides what they do.
_STATEFUL = re.compile(
    "Assign(Add)?VariableOp|Multinomial|(Parameterized)?TruncatedNormal|RngReadAndSkip"
    "|Random(Gamma|PoissonV2|Shuffle|StandardNormal|Uniform|UniformInt)"
)

# First of the two seeds of an op that has been given one, where the program has set no global one. Where it
# has, TensorFlow draws the second: another one whenever the program makes the dataset again.
_NO_GLOBAL_SEED = 87654321

# Functions of one name have one graph in a process: that of each seeded one gets a name of its own.
_serials = itertools.count()


class ArrayEpochs:
    """Passes over arrays of as many examples: batches of a size, shuffled or in their order."""

    def __init__(self, arrays: Any, *, batch_size: int, shuffle: bool, seed: int) -> None:
        with tf.device("CPU:0"):
            self._arrays = tf.nest.map_structure(tf.convert_to_tensor, arrays)
        self._shuffle = shuffle
        self._seed = seed
        count = int(tf.nest.flatten(self._arrays)[0].shape[0])
        self.examples: tuple[int, int] | None = (count, batch_size)
        self.cardinality = -(-count // batch_size)
        self.random: list[str] = []
        self.ahead = 0
        self.element_spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), self._arrays
        )

    def dataset(self, number: tf.Tensor) -> tf.data.Dataset:
        """Returns the pass of a number, int64 (); to be called in a function that is traced."""
        count, size = self.examples or (0, 1)
        order = tf.range(count, dtype=tf.int64)
        if self._shuffle:
            order = tf.random.experimental.stateless_shuffle(
                order, tf.stack([_mixed_with(self._seed, number), 0])
            )

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def batch(first: tf.Tensor) -> Any:
            chosen = order[first : first + size]
            return tf.nest.map_structure(lambda array: tf.gather(array, chosen), self._arrays)

        return tf.data.Dataset.range(0, count, size).map(batch)


class DatasetEpochs:
    """Passes over a `tf.data.Dataset` of batches.

    Attributes:
        cardinality: Batches of a pass; -1 for infinitely and -2 for unknown many.
        examples: Examples of a pass and of a batch, where both are known.
        random: Ops that draw numbers which no seed of ours decides.
        ahead: Batches that the program reads ahead, left to whoever reads the passes; -1 for AUTOTUNE.
    """

    def __init__(self, dataset: tf.data.Dataset, name: str, seed: int) -> None:
        """Takes a dataset apart; a SettingsError says that it cannot be."""
        self._dataset = dataset  # whose functions last as long as it does
        self._seed = seed
        self.element_spec = dataset.element_spec
        self._graph, self._output = _taken_apart(dataset, name)
        self._nodes = {node.name: node for node in self._graph.node}
        held = (tf.resource, tf.variant)
        constants = (node for node in self._graph.node if node.op == "Const")
        plain = [node for node in constants if node.attr["dtype"].type not in held]
        with tf.device("CPU:0"):  # tf.make_ndarray cannot read texts as a dataset's graph has them
            self._constants = {
                node.name: tf.io.parse_tensor(
                    node.attr["value"].tensor.SerializeToString(), tf.as_dtype(node.attr["dtype"].type)
                )
                for node in plain
            }
        # Not part of a graph that is traced, and of which there would be copies.
        self._large = {
            node.name: self._constants[node.name] for node in plain if node.attr["value"].ByteSize() > _LARGE
        }
        for large in self._large:
            self._nodes[large].op = "Placeholder"
            del self._nodes[large].attr["value"]
        # Kept by all passes: what a cache holds is read once.
        self._caches = {
            node.input[2]: tf.raw_ops.AnonymousMemoryCache()
            for node in self._graph.node
            if node.op == "CacheDatasetV2" and not self._constants[_node_name(node.input[1])]
        }
        caches = [node for node in self._graph.node if node.op.startswith("CacheDataset")]
        cached = {name for cache in caches for name in self._above(cache.input[0])}
        self.random = stateful_ops(self._graph)
        if Seeding(self._graph, seed, cached).decides_order:
            progress.report(
                "train",
                f"warning: {name} is shuffled once and without a seed (reshuffle_each_iteration=False), so "
                "that its order here is not the one in which the program reads it: where take and skip split "
                "it, training has examples of the other part; give shuffle a seed",
            )
        self.ahead, last = 0, self._nodes[_node_name(self._output)]
        if last.op == "PrefetchDataset":
            # Every batch would be handed from thread to thread twice.
            self.ahead, self._output = int(self._constants[_node_name(last.input[1])]), str(last.input[0])
            self._graph.node.remove(last)
        self.cardinality = self._count(self._output)
        self.examples = self._examples()

    def dataset(self, number: tf.Tensor) -> tf.data.Dataset:
        """Returns the pass of a number; what a cache holds is of the first."""
        return self._imported(self._output, _mixed_with(self._seed, number))

    def _imported(self, output: str, number: tf.Tensor) -> tf.data.Dataset:
        caches = {name: handle for name, (handle, _) in self._caches.items()}
        given = {**self._large, **caches, PASS: number}
        # The identity makes an input of the traced function of what was made outside.
        replaced = {_tensor(name): tf.identity(value) for name, value in given.items()}
        (variant,) = tf.graph_util.import_graph_def(
            self._graph, input_map=replaced, return_elements=[_tensor(output)], name=""
        )
        return tf.data.experimental.from_variant(variant, self.element_spec)

    def _above(self, name: str) -> Iterator[str]:
        node = self._nodes[_node_name(name)]
        yield node.name
        for source in node.input:
            yield from self._above(source)

    def _examples(self) -> tuple[int, int] | None:
        """Returns the examples of a pass and of a batch, where both are known."""
        node = self._nodes[_node_name(self._output)]
        while _ONE_FOR_ONE.fullmatch(node.op):
            node = self._nodes[_node_name(node.input[0])]
        if node.op not in _BATCHING:
            return None
        count, inputs = self._count(node.input[0]), list(node.input)
        size = int(self._constants[_node_name(inputs[1])])
        drops = bool(self._constants[_node_name(inputs[3 if node.op == "ParallelBatchDataset" else 2])])
        return None if count < 0 else (count // size * size if drops else count, size)

    def _count(self, output: str) -> int:
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def count() -> tf.Tensor:
            found = self._imported(output, tf.constant(0, tf.int64))
            return tf.raw_ops.DatasetCardinality(input_dataset=tf.data.experimental.to_variant(found))

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
    taken.node.remove(last)
    return taken, str(last.input[0])


def _tensor(reference: str) -> str:
    return reference if ":" in reference else f"{reference}:0"


#: Passes of either kind.
Passes: TypeAlias = ArrayEpochs | DatasetEpochs


def stateful_ops(graph: Any) -> list[str]:
    """Returns the names of the ops in a graph, a GraphDef, that no seed decides, such as RandomUniform."""
    bodies = (graph.node, *(function.node_def for function in graph.library.function))
    return sorted({node.op for body in bodies for node in body if _STATEFUL.fullmatch(node.op)})


class Seeding:
    """Makes of a dataset's graph one whose draws follow from a seed and, but for cached ones, the pass."""

    def __init__(self, graph: Any, seed: int, cached: Iterable[str]) -> None:
        """Changes a GraphDef in place; a cache keeps the elements of the nodes `cached`, of one pass."""
        self._seed = seed
        #: Whether something is shuffled in one order for all passes, which no seed of the program decides.
        self.decides_order = False
        self._serial = next(_serials)
        self._library = {function.signature.name: function for function in graph.library.function}
        self._seeded: dict[tuple[str, bool], str] = {}
        self._made: list[Any] = []
        # Counts what draws, in the order in which it is found: names are others in another process.
        self._draws = itertools.count()
        self._numbers: dict[Any, int] = {}
        kept, constants = frozenset(cached), _constants(graph.node)
        added: list[Any] = [_node(PASS, "Placeholder", dtype=tf.int64)]
        for node in graph.node:
            added += self._changed(node, constants, "" if node.name in kept else PASS, ("", ""))
        graph.node.extend(added)
        graph.library.function.extend(self._made)
        add_functions(self._made)

    def _changed(
        self, node: Any, constants: Mapping[str, int], number: str, outputs: tuple[str, str]
    ) -> list[Any]:
        """Changes a node; returns the nodes that it needs.

        `number` names the pass, "" if there is none; `outputs` follow the names of a Const and of a
        BitwiseXor where one refers to them.
        """
        if node.op in _DRAWING:
            return self._reseeded(node, constants, number, outputs)
        if _is_unordered(node):
            node.attr["deterministic"].s = b"true"
        for attribute in sorted(node.attr):
            called = node.attr[attribute].func
            takes_pass = bool(number) and node.op in _CALLING and attribute == "f"
            name = self._function(called.name, takes_pass) if called.name else ""
            if name:
                called.name = name
                if takes_pass:
                    arguments = node.attr["Targuments"].list.type
                    inputs = list(node.input)
                    node.input[:] = [*inputs[: 1 + len(arguments)], number, *inputs[1 + len(arguments) :]]
                    arguments.append(tf.int64.as_datatype_enum)
        return []

    def _reseeded(
        self, node: Any, constants: Mapping[str, int], number: str, outputs: tuple[str, str]
    ) -> list[Any]:
        first = _DRAWING[node.op]
        own = tuple(constants.get(_node_name(seed)) for seed in node.input[first : first + 2])
        unseeded, added = own == (0, 0), list[Any]()
        drawn = next(self._draws)
        position: int | None = drawn
        if not unseeded:
            # Equal seeds stay in one order, as inputs and labels that are zipped.
            position = None if own[0] in (None, _NO_GLOBAL_SEED) else self._numbers.setdefault(own, drawn)
        anew = any(node.attr[name].b for name in _ANEW if name in node.attr)
        constant, either = outputs
        if not constant and len(node.input) > first + 2:
            # Not the generator of the given dataset, which goes on with its own.
            node.input[first + 2] = f"{node.name}/generator"
            added.append(_node(f"{node.name}/generator", "DummySeedGenerator"))
        if not anew and not unseeded:
            # The program reads it in the same order, and may have split it by take and skip.
            return added
        run = self._seed
        if not anew and node.op == "ShuffleDatasetV3":
            number, run, self.decides_order = "", 0, True
        # Two numbers that another seed or position does not give.
        mixed = np.random.SeedSequence([run % 2**63, 0 if position is None else position + 1])
        for index, value in enumerate(mixed.generate_state(2, np.uint64)):
            name = f"{node.name}/seed_{index}"
            added.append(_node(f"{name}/run", "Const", dtype=tf.int64, value=value.astype(np.int64)))
            seed = f"{name}/run{constant}"
            if position is None:
                added.append(_node(name, "BitwiseXor", node.input[first + index], seed, T=tf.int64))
                seed = f"{name}{either}"
            if number:
                added.append(_node(f"{name}/pass", "BitwiseXor", seed, number, T=tf.int64))
                seed = f"{name}/pass{either}"
            node.input[first + index] = seed
        return added

    def _function(self, name: str, takes_pass: bool) -> str:
        """Returns the name of what a function becomes, "" where nothing in it is changed."""
        if (name, takes_pass) in self._seeded:
            return self._seeded[name, takes_pass]
        function = self._library.get(name)
        if function is None or not self._changes(name):
            return ""
        made = type(function).FromString(function.SerializeToString())
        made.signature.name = seeded = f"{name}_seeded_{self._serial}_{len(self._seeded)}"
        self._seeded[name, takes_pass] = seeded
        if takes_pass:
            made.signature.input_arg.add(name=PASS, type=tf.int64.as_datatype_enum)
        constants = _constants(made.node_def)
        added: list[Any] = []
        for node in made.node_def:
            added += self._changed(node, constants, PASS if takes_pass else "", (":output:0", ":z:0"))
        made.node_def.extend(added)
        self._made.append(made)
        return seeded

    def _changes(self, name: str) -> bool:
        """Whether a function draws or has an order of its own, or one that it calls."""
        if name not in self._library:
            return False
        body = self._library[name].node_def
        return any(node.op in _DRAWING or _is_unordered(node) for node in body) or any(
            self._changes(value.func.name) for node in body for value in node.attr.values()
        )


def _mixed_with(seed: int, number: tf.Tensor) -> tf.Tensor:
    """Returns a number, int64 (), that other seeds and numbers do not give."""
    mixed = tf.random.experimental.stateless_fold_in(tf.constant([seed % 2**63, 0], tf.int64), number)
    return tf.random.stateless_uniform([], mixed, minval=None, maxval=None, dtype=tf.int64)


def _constants(nodes: Iterable[Any]) -> dict[str, int]:
    """Returns the values of the whole numbers among nodes, by name."""
    found = (node for node in nodes if node.op == "Const" and node.attr["dtype"].type == tf.int64)
    values = ((node.name, tf.make_ndarray(node.attr["value"].tensor)) for node in found)
    return {name: int(value) for name, value in values if value.ndim == 0}


def _is_unordered(node: Any) -> bool:
    return "deterministic" in node.attr and node.attr["deterministic"].s == b"false"


def _node_name(reference: str) -> str:
    """Returns the name of the node that an input of another refers to."""
    return reference.partition(":")[0].lstrip("^")


def _node(name: str, op: str, *inputs: str, value: Any = None, **types: Any) -> Any:
    node = tf.compat.v1.NodeDef(name=name, op=op, input=inputs)
    for attribute, dtype in types.items():
        node.attr[attribute].type = dtype.as_datatype_enum
    if value is not None:
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return node
