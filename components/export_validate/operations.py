"""The operations of an exported graph: whether a server has all of them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from shardline.trainer.errors import ModelError

_CALLS_OF_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")

# TensorFlow's own, though not in tf.raw_ops: the inner ones, and XlaCallModule of models from JAX.
_INNER = ("_", "Xla")


def check_operations(concrete: Any) -> None:
    """Checks that a traced function can be run where there is neither our code nor the user's.

    Args:
        concrete: A concrete function.

    Raises:
        ModelError: When it calls Python, or operations of a library that TensorFlow does not bring along.
    """
    graph = concrete.graph.as_graph_def()
    functions = {function.signature.name for function in graph.library.function}
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    used = {node.op for node in nodes} - functions
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
