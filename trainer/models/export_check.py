"""Check before training of what would fail after it: a model that cannot be saved, loaded or served."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.data.decode import Prepare
from shardline.trainer.data.manifest import DatasetInfo
from shardline.trainer.errors import ModelError
from shardline.trainer.keras_compilation import reason, refuse_lambda, saveable
from shardline.trainer.models.head import ALL_THE_SAME, probe_inputs

# Layers of Keras that hold code, or need what is not in the file.
_LAMBDA = "__lambda__"  # which Keras leaves out where the lambda is an activation
_FOREIGN = ("Lambda", "TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper")

_SAVEABLE = (
    "give each class of its own a get_config() that returns the arguments of its constructor, as numbers, "
    "text or objects of Keras"
)
_LOADABLE = (
    "classes and functions of its own need @keras.saving.register_keras_serializable(), and a get_config() "
    "that returns the arguments of their constructor"
)
_TRACEABLE = "its call() has to consist of operations of Keras or TensorFlow, for any number of examples"

# A batch of two is computed otherwise than one of many, but no more than this.
_TOLERANCE = 1e-3


def check_export(
    model: keras.Model, dataset: DatasetInfo, *, prepare: Prepare | None = None, exported: bool = True
) -> None:
    """Saves a model, loads it in safe mode, and traces it, where it has any code that is not Keras' own.

    Collective: every replica must call it at the same point, outside the strategy's scope. A model of Keras'
    own layers alone is not tried, which would take seconds for a large one, and one that is not to be
    `exported` is saved only. It takes what `prepare` makes of the dataset's inputs.

    Raises:
        ModelError: When one of it fails, or the loaded model gives other answers than the model.
    """
    with warnings.catch_warnings(), saveable(model):
        warnings.simplefilter("ignore")  # what matters is refused
        with _refused("cannot be saved", _SAVEABLE):
            config = keras.saving.serialize_keras_object(model)
            json.dumps(config)
        own = {name: value for name, value in config.items() if name != "compile_config"}
        if not model.built or not any(_is_foreign(part) for part in _parts(own)):
            return
        with tempfile.TemporaryDirectory(prefix="shardline-check-") as directory:
            path = Path(directory) / "model.keras"
            with _refused("cannot be saved", _SAVEABLE):
                model.save(path)
            if not exported:
                return
            with _refused("cannot be loaded once it is saved", f"{_LOADABLE}; {ALL_THE_SAME}"):
                loaded = keras.models.load_model(path, safe_mode=True, compile=False)
    inputs = probe_inputs(dataset, prepare)
    specs = tf.nest.map_structure(lambda one: tf.TensorSpec([None, *one.shape[1:]], one.dtype), inputs)
    predict = tf.function(lambda inputs: loaded(inputs, training=False), autograph=False)
    with _refused("cannot be traced for an export", f"{_TRACEABLE}; {ALL_THE_SAME}"):
        concrete = predict.get_concrete_function(specs)
    check_operations(concrete)
    _compare(model, loaded, inputs)


@contextlib.contextmanager
def _refused(what: str, otherwise: str) -> Iterator[None]:
    """Makes a ModelError of whatever the user's code, or Keras, raises in the context."""
    try:
        yield
    except Exception as error:
        if "loaded" in what:
            refuse_lambda(error, "the model", ALL_THE_SAME)
        raise ModelError(f"the model {what}: {reason(error)}; {otherwise}") from error


def _parts(config: Any) -> Iterator[dict[str, Any]]:
    """Yields every object in a configuration."""
    nested = (
        config.values() if isinstance(config, dict) else config if isinstance(config, list | tuple) else ()
    )
    if isinstance(config, dict) and ("class_name" in config or config.keys() == {"value"}):
        yield config
    for value in nested:
        yield from _parts(value)


def _is_foreign(part: dict[str, Any]) -> bool:
    module, name = str(part.get("module") or "keras"), str(part.get("class_name", _LAMBDA))
    own = name in (*_FOREIGN, "function", _LAMBDA)
    return own or module.partition(".")[0] not in ("keras", "builtins")


def _compare(model: keras.Model, loaded: keras.Model, inputs: Any) -> None:
    """Refuses a model that forgets weights when it is saved; not one whose answers are never the same."""

    def answer(one: keras.Model) -> list[Any]:
        return [np.asarray(part, np.float64) for part in tf.nest.flatten(one(inputs, training=False))]

    def agree(ours: list[Any], theirs: list[Any]) -> bool:
        pairs = zip(ours, theirs, strict=True)
        return all(np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True) for a, b in pairs)

    first = answer(model)
    if agree(first, answer(model)) and not agree(first, answer(loaded)):
        raise ModelError(
            "the model gives other answers once it is saved and loaded: some of its weights are not saved; "
            "hold them by attributes of layers, and make them in __init__ or build(), from the arguments in "
            f"get_config(); {ALL_THE_SAME}"
        )


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
    bodies = {one.signature.name: one.node_def for one in graph.library.function}
    _check([*graph.node, *(node for body in bodies.values() for node in body)], bodies)


def check_saved_model(path: Path) -> None:
    """Checks the operations of a SavedModel, of which some run as soon as it is loaded.

    Raises ModelError as `check_operations`, OSError or ValueError when there is none that can be read.
    """
    for meta in tf.__internal__.saved_model.parse_saved_model(str(path)).meta_graphs:
        bodies = {one.signature.name: one.node_def for one in meta.graph_def.library.function}
        _check(_reachable(meta, bodies), bodies)


def _reachable(meta: Any, bodies: dict[str, Any]) -> Iterator[Any]:
    """Yields the nodes that may run: all but those that only save the variables, or restore them."""
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
            called = (one for value in node.attr.values() for one in (value.func, *value.list.func))
            waiting += [node.op, *(one.name for one in called)]


def _check(nodes: Iterable[Any], functions: Collection[str]) -> None:
    used = set()
    for node in nodes:
        to_file = node.op == "PrintV2" and node.attr["output_stream"].s.startswith(b"file:")
        used.add("PrintV2 to a File" if to_file else node.op)
    used -= set(functions)
    faults = {
        "calls Python while it predicts ({}), which a server cannot run; replace tf.py_function and "
        "tf.numpy_function by operations of TensorFlow or Keras": used.intersection(_CALLS_OF_PYTHON),
        "reads or writes files while it predicts ({}), and none that does is loaded; give it what it needs "
        "as weights or inputs": {
            one for one in used if _OF_FILES.search(one) and not one.startswith(_OF_ASSETS)
        },
        "needs operations that are not TensorFlow's own ({}), which a server does not have; do without "
        "them": {one for one in used if not one.startswith(_INNER) and not hasattr(tf.raw_ops, one)},
    }
    for words, found in faults.items():
        if found:
            raise ModelError(f"the model {words.format(', '.join(sorted(found)))}")
