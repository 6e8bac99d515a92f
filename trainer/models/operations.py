"""Operations of a model's graph: those that need Python, other libraries or files, which no server gives."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from shardline.trainer.errors import ModelError

_CALLS_OF_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")

# TensorFlow's own, though not in tf.raw_ops: the inner ones, and XlaCallModule of models from JAX.
_INNER = ("_", "Xla")

# Whatever takes or makes a path, or an address.
_OF_FILES = re.compile(
    "File|TextLine|FixedLengthRecord|TFRecord|Reader|^Save|^Restore|DistributedSave|Checkpoint|SummaryWriter"
    "|SummaryDbWriter|^Write.*Summary|ImportEvent|(Cache|CSV|Sql|Load|Snapshot|Chunks?)Dataset|DataService"
    "|LMDB|LoadAndRemap|VocabRemapping|FixedUnigram|^Debug(Identity|Nan|Numeric)|DecodeProto|EncodeProto"
)
# The vocabulary of a table is a file among the assets of a SavedModel.
_OF_ASSETS = "InitializeTableFromTextFile"


def check_operations(concrete: Any) -> None:
    """Checks that a traced, concrete function can run where there is neither our code nor the user's.

    Raises ModelError when it calls Python, operations of a library that TensorFlow does not bring along, or
    those that read or write files.
    """
    graph = concrete.graph.as_graph_def()
    functions = {function.signature.name for function in graph.library.function}
    _check(
        [*graph.node, *(node for function in graph.library.function for node in function.node_def)], functions
    )


def check_saved_model(path: Path) -> None:
    """Checks the operations of a SavedModel, of which some run as soon as it is loaded.

    Raises ModelError as `check_operations`, OSError or ValueError when there is none that can be read.
    """
    for meta in tf.__internal__.saved_model.parse_saved_model(str(path)).meta_graphs:
        functions = {one.signature.name: one.node_def for one in meta.graph_def.library.function}
        _check(_reachable(meta, functions), functions)


def _reachable(meta: Any, functions: dict[str, Any]) -> Iterator[Any]:
    """Yields the nodes that may run: all but those that only save the variables, or restore them.

    A loader reads the variables itself, of a SavedModel with objects; earlier ones run their graph.
    """
    objects, saver = meta.object_graph_def, meta.saver_def
    own = (saver.save_tensor_name, saver.restore_op_name) if meta.HasField("object_graph_def") else ()
    skipped = {name.partition(":")[0] for name in own}
    bodies = functions | {"": [node for node in meta.graph_def.node if node.name not in skipped]}
    waiting = ["", *objects.concrete_functions]
    for node in objects.nodes:
        waiting += [*node.function.concrete_functions, node.bare_concrete_function.concrete_function_name]
    while waiting:
        for node in bodies.pop(waiting.pop(), ()):
            yield node
            waiting += [node.op, *(name for value in node.attr.values() for name in _functions_of(value))]


def _functions_of(value: Any) -> list[str]:
    return [value.func.name, *(function.name for function in value.list.func)]


def _check(nodes: Iterable[Any], functions: Collection[str]) -> None:
    of_files, used = set(), set()
    for node in nodes:
        used.add(node.op)
        if node.op == "PrintV2" and node.attr["output_stream"].s.startswith(b"file:"):
            of_files.add(node.op)
    used -= set(functions)
    if calls := sorted(used.intersection(_CALLS_OF_PYTHON)):
        raise ModelError(
            f"the model calls Python while it predicts ({', '.join(calls)}), which a server cannot run; "
            "replace tf.py_function and tf.numpy_function by operations of TensorFlow or Keras"
        )
    if foreign := sorted(
        name for name in used if not name.startswith(_INNER) and not hasattr(tf.raw_ops, name)
    ):
        raise ModelError(
            f"the model needs operations that are not TensorFlow's own ({', '.join(foreign)}), which a "
            "server does not have; do without them"
        )
    of_files |= {one for one in used if _OF_FILES.search(one) and not one.startswith(_OF_ASSETS)}
    if of_files:
        raise ModelError(
            f"the model reads or writes files while it predicts ({', '.join(sorted(of_files))}), and none "
            "that does is loaded; give it what it needs as weights or inputs"
        )
