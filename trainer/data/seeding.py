"""Seeding: what draws numbers in a dataset's graph gets seeds of ours, of the run and of the pass.

The functions of a dataset, such as the one that `interleave` calls for each file, have graphs of their own:
those that draw, or call what draws, get the pass as one more argument. What is asked to give its elements in
the order in which they are ready gives them in the one they have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from shardline.trainer.tensorflow_internals import add_functions

#: The node that stands for the pass, int64 (): a number that no other pass has.
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
_STATEFUL = (
    "AssignAddVariableOp",
    "AssignVariableOp",
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "RngReadAndSkip",
    "TruncatedNormal",
)

# First of the two seeds of an op that has been given one, where the program has set no global one. Where it
# has, TensorFlow draws the second: another one whenever the program makes the dataset again.
_NO_GLOBAL_SEED = 87654321

# Functions of one name have one graph in a process: that of each seeded one gets a name of its own.
_serials = itertools.count()


def stateful_ops(graph: Any) -> list[str]:
    """Returns the names of the ops in a graph, a GraphDef, that no seed decides, such as RandomUniform."""
    bodies = (graph.node, *(function.node_def for function in graph.library.function))
    return sorted({node.op for body in bodies for node in body if node.op in _STATEFUL})


class Seeding:
    """Makes of a dataset's graph one whose draws follow from a seed and, but for cached ones, the pass."""

    def __init__(self, graph: Any, seed: int, cached: Iterable[str]) -> None:
        """Changes a graph in place.

        Args:
            graph: A tf.compat.v1.GraphDef without a node PASS, which it is given, a placeholder.
            seed: Of the run.
            cached: Names of the nodes that a cache keeps the elements of, which are those of one pass.
        """
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
        kept = frozenset(cached)
        added: list[Any] = [_node(PASS, "Placeholder", dtype=tf.int64)]
        for node in graph.node:
            added += self._changed(node, _constants(graph.node), "" if node.name in kept else PASS, ("", ""))
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
        own = tuple(constants.get(node_name(seed)) for seed in node.input[first : first + 2])
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
        for index, value in enumerate(_mixed(run, -1 if position is None else position)):
            name = f"{node.name}/seed_{index}"
            added.append(_node(f"{name}/run", "Const", dtype=tf.int64, value=value))
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
        made = type(function)()
        made.CopyFrom(function)
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


def mixed_with(seed: int, number: tf.Tensor) -> tf.Tensor:
    """Returns a number, int64 (), that other seeds and numbers do not give."""
    mixed = tf.random.experimental.stateless_fold_in(tf.constant([seed % 2**63, 0], tf.int64), number)
    return tf.random.stateless_uniform([], mixed, minval=None, maxval=None, dtype=tf.int64)


def _mixed(seed: int, position: int) -> Any:
    """Returns two numbers, int64, that another seed or position does not give."""
    numbers = np.random.SeedSequence([seed % 2**63, position + 1]).generate_state(2, np.uint64)
    return numbers.astype(np.int64)


def _constants(nodes: Iterable[Any]) -> dict[str, int]:
    """Returns the values of the whole numbers among nodes, by name."""
    found = (node for node in nodes if node.op == "Const" and node.attr["dtype"].type == tf.int64)
    values = ((node.name, tf.make_ndarray(node.attr["value"].tensor)) for node in found)
    return {name: int(value) for name, value in values if value.ndim == 0}


def _is_unordered(node: Any) -> bool:
    return "deterministic" in node.attr and node.attr["deterministic"].s == b"false"


def node_name(reference: str) -> str:
    """Returns the name of the node that an input of another refers to."""
    return reference.partition(":")[0].lstrip("^")


def _node(name: str, op: str, *inputs: str, value: Any = None, **types: Any) -> Any:
    node = tf.compat.v1.NodeDef(name=name, op=op, input=inputs)
    for attribute, dtype in types.items():
        node.attr[attribute].type = dtype.as_datatype_enum
    if value is not None:
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return node
