"""Operations: checks that a traced function or SavedModel can run on a server, without Python or files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from shardline.trainer.base.errors import ModelError

_PYTHON_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")

# Prefixes of TensorFlow's operations that are not in tf.raw_ops; XlaCallModule is of models from JAX.
_INTERNAL_PREFIXES = ("_", "Xla")

# Operations that take or return a path or an address.
_FILE_OPERATIONS = re.compile(
    "File|TextLine|FixedLengthRecord|TFRecord|Reader|^Save|^Restore|DistributedSave|Checkpoint|SummaryWriter"
    "|SummaryDbWriter|^Write.*Summary|ImportEvent|(Cache|CSV|Sql|Load|Snapshot|Chunks?)Dataset|DataService"
    "|LMDB|LoadAndRemap|VocabRemapping|FixedUnigram|^Debug(Identity|Nan|Numeric)|DecodeProto|EncodeProto"
)
# A table's vocabulary is a file in the assets of a SavedModel.
_ASSET_OPERATIONS = "InitializeTableFromTextFile"


def check_operations(concrete: Any) -> None:
    """Checks that a concrete function can run without this package or the user's code.

    Raises ModelError when it calls Python, operations that are not TensorFlow's, or operations that read or
    write files.
    """
    graph = concrete.graph.as_graph_def()
    bodies = {function.signature.name: function.node_def for function in graph.library.function}
    _check([*graph.node, *(node for body in bodies.values() for node in body)], bodies)


def check_saved_model(path: Path) -> None:
    """Checks the operations of a SavedModel before it is loaded, since some run then.

    Raises ModelError as `check_operations`, and OSError or ValueError when there is no readable SavedModel.
    """
    for meta in tf.__internal__.saved_model.parse_saved_model(str(path)).meta_graphs:
        bodies = {function.signature.name: function.node_def for function in meta.graph_def.library.function}
        _check(_reachable(meta, bodies), bodies)


def _reachable(meta: Any, bodies: dict[str, Any]) -> Iterator[Any]:
    """Yields the nodes that may run: all except those that only save or restore the variables."""
    objects, saver = meta.object_graph_def, meta.saver_def
    own = (saver.save_tensor_name, saver.restore_op_name) if meta.HasField("object_graph_def") else ()
    skipped = {name.partition(":")[0] for name in own}
    left = bodies | {"": [node for node in meta.graph_def.node if node.name not in skipped]}
    waiting = ["", *objects.concrete_functions]
    for node in objects.nodes:
        waiting += [*node.function.concrete_functions, node.bare_concrete_function.concrete_function_name]
    while waiting:
        for node in left.pop(waiting.pop(), ()):
            yield node
            called = (each for value in node.attr.values() for each in (value.func, *value.list.func))
            waiting += [node.op, *(function.name for function in called)]


def _check(nodes: Iterable[Any], functions: Collection[str]) -> None:
    used = set()
    for node in nodes:
        to_file = node.op == "PrintV2" and node.attr["output_stream"].s.startswith(b"file:")
        used.add("PrintV2 to a File" if to_file else node.op)
    used -= set(functions)
    faults = {
        "calls Python while it predicts ({}), which a server cannot run; replace tf.py_function and "
        "tf.numpy_function by operations of TensorFlow or Keras": used.intersection(_PYTHON_OPERATIONS),
        "reads or writes files while it predicts ({}), and such a model is not loaded; give it the data as "
        "weights or inputs": {
            name for name in used if _FILE_OPERATIONS.search(name) and not name.startswith(_ASSET_OPERATIONS)
        },
        "needs operations that are not TensorFlow's own ({}), which a server does not have; do without "
        "them": {
            name for name in used if not name.startswith(_INTERNAL_PREFIXES) and not hasattr(tf.raw_ops, name)
        },
    }
    for message, names in faults.items():
        if names:
            raise ModelError(f"the model {message.format(', '.join(sorted(names)))}")
