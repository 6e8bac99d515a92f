"""Transforms of examples: augmentation, a user's transformation of batches, class weights, label forms.

An augmentation changes training examples at random, the same on any cluster; a transformation turns a batch
into the data of a model. Its inputs are traced once, before training, as a graph (the preparation) that is
saved next to the model and served, without the user's code.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from shardline.trainer.base import plugins
from shardline.trainer.base.deserialize import nearest
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.data.examples import Inputs, Targets, make_probe_rows
from shardline.trainer.keras_compat.tensorflow_internals import check_saved_model
from shardline.trainer.manifest import CLASS, MULTILABEL, REGRESSION, DatasetInfo, Label, Manifest

#: (x, y) of a batch, y as in `parse_batch` -> x, (x, y) or (x, y, sample_weight): tensors, dicts or tuples.
Transform = Callable[[Any, Targets], Any]


def load_transform(reference: str) -> Transform:
    """Returns the transformation that `pkg.module:function` names."""
    function = _load(reference, "transform")

    def transform(x: Any, y: Targets) -> Any:
        with plugins.calling(f"transform {reference!r} failed", SettingsError):
            return function(x, y)

    return transform


def describe_structure(structure: Any) -> str:
    """Returns a nested structure of tensors, or of their specifications, as "(uint8 (9, 9, 3), int64 ())"."""

    def describe(item: Any) -> str:
        if not hasattr(item, "dtype"):
            return type(item).__name__
        shape = tf.TensorShape(item.shape)
        return f"{item.dtype.name} {'of any shape' if shape.rank is None else tuple(shape)}"

    return str(tf.nest.map_structure(describe, structure)).replace("'", "")


#: (x, y, seed) -> (x, y) of one example: x uint8 (height, width, channels), or for a table a dict of scalars;
#: y the target of one example, of one class a scalar int64; seed int64 (2,), for TensorFlow's stateless
#: random functions.
Augmentation = Callable[[Any, Targets, tf.Tensor], tuple[Any, Targets]]


def load_augmentation(reference: str, dataset: DatasetInfo) -> Augmentation:
    """Returns the augmentation that `pkg.module:function` names, after tracing it on an example."""
    function = _load(reference, "augmentation")
    columns = {name: tf.TensorSpec(feature.shape, feature.dtype) for name, feature in dataset.inputs.items()}
    x = columns if dataset.is_table else tf.TensorSpec(dataset.input_shape, tf.uint8)
    features = {name: label.feature for name, label in dataset.labels.items()}
    y = {name: tf.TensorSpec(feature.shape, feature.dtype) for name, feature in features.items()}
    wanted = (x, y if len(y) > 1 else next(iter(y.values())))
    with plugins.calling(f"augmentation {reference!r} failed on an example (x, y, seed)", SettingsError):
        returned = function.get_concrete_function(*wanted, tf.TensorSpec((2,), tf.int64)).structured_outputs
    same = False
    with contextlib.suppress(ValueError, TypeError):
        tf.nest.assert_same_structure(returned, wanted, check_types=False)
        pairs = zip(tf.nest.flatten(returned), tf.nest.flatten(wanted), strict=True)
        same = all(a.dtype == b.dtype and a.shape.is_compatible_with(b.shape) for a, b in pairs)
    if not same:
        raise SettingsError(
            f"augmentation {reference!r} returned {describe_structure(returned)}; it must return (x, y) "
            f"of the same shapes and types, {describe_structure(wanted)}"
        )
    checked: Augmentation = function
    return checked


def _load(reference: str, kind: str) -> Any:
    """Returns a user's function as a tf.function, so that AutoGraph converts it, but not its callers."""
    function = plugins.load(reference, kind, SettingsError)
    if not callable(function):
        raise SettingsError(f"{kind} {reference!r} is not a function but {type(function).__name__}")
    return tf.function(function)


def class_weights(setting: str | Mapping[str, Any], manifest: Manifest) -> tuple[float, ...]:
    """Returns a weight for each class, in the order of the manifest's class names; () for none ("").

    "balanced" is records / (classes x examples of the class) in the training split: all classes count alike.
    Of weights by class name, a class that is left out has weight 1.
    """
    if not setting:
        return ()
    if not manifest.is_classes:
        kinds = ", ".join(f"{label.name}, {label.kind}" for label in manifest.labels)
        raise SettingsError(
            f"class_weights are for one label of kind class, the dataset has {kinds}; leave them out, or "
            "weigh in the model's loss"
        )
    if isinstance(setting, str):  # BALANCED
        (counts,) = (tally.counts for tally in manifest.splits["train"].labels.values())
        # The weight of a class without examples is not used.
        return tuple(sum(counts) / (len(counts) * count) if count else 0.0 for count in counts)
    names = manifest.class_names
    for name, weight in setting.items():
        if name not in names:
            near = nearest(name, names)
            raise SettingsError(f"class_weights: the dataset has no class {name!r}, it has {near}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise SettingsError(f"class_weights: {name!r} must be a number of at least 0, got {weight!r}")
    return tuple(float(setting.get(name, 1.0)) for name in names)


#: Form of a label in a batch. Class: its index, int64 (batch,) ("sparse"); float32 (batch, classes)
#: ("one-hot"); or for two classes 0 or 1, float32 (batch, 1) ("binary"). Multilabel: 0 or 1 for each output,
#: float32 (batch, outputs) ("several"). Regression: as stored ("number"), or float32 (batch, 1) ("column").
LabelForm = Literal["sparse", "one-hot", "binary", "several", "number", "column"]

#: Default form of each kind of label.
DEFAULT_FORMS: Mapping[str, LabelForm] = {CLASS: "sparse", MULTILABEL: "several", REGRESSION: "number"}


def form_targets(targets: Targets, labels: Sequence[Label], forms: Mapping[str, LabelForm]) -> Targets:
    """Converts targets of `parse_batch` to the forms of their labels, by name."""
    if isinstance(targets, dict):
        return {label.name: form_targets(targets[label.name], [label], forms) for label in labels}
    form = forms.get(labels[0].name)
    if form == "one-hot":
        return tf.one_hot(targets, len(labels[0].outputs), dtype=tf.float32)
    if form in ("binary", "column"):
        return tf.cast(targets, tf.float32)[:, None]
    return tf.cast(targets, tf.float32) if labels[0].kind == MULTILABEL else targets


#: Directory of the preparation next to model.keras; missing if the model takes a dataset's inputs unchanged.
DIRECTORY = "transform"

# Rounding differences between an example alone and in a batch.
_TOLERANCE = 1e-4


def trace(reference: str, dataset: DatasetInfo) -> tf.Module | None:
    """Returns a module whose `prepare` is the graph of a transformation's inputs; None if it keeps them.

    Raises ModelError if it cannot be served: the inputs that it makes depend on labels, random numbers or
    other examples of the batch, or their number changes, or they cannot be saved.
    """
    function = plugins.load(reference, "transform", SettingsError)
    function = getattr(function, "python_function", function)
    probe = _probe_batch(dataset)
    x = tf.nest.map_structure(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), probe)
    y = {
        name: tf.TensorSpec([None, *label.feature.shape], label.feature.dtype)
        for name, label in dataset.labels.items()
    }
    targets: Any = y if len(y) > 1 else next(iter(y.values()))

    def transform_inputs(x: Any, y: Any) -> Any:
        made = function(x, y)
        return made[0] if isinstance(made, tuple) else made

    with plugins.calling(f"transform {reference!r} failed", SettingsError):
        traced = tf.function(transform_inputs).get_concrete_function(x, targets)
    made = tf.nest.flatten(traced.graph.structured_outputs)
    inputs = traced.graph.inputs[: len(tf.nest.flatten(x))]
    if len(made) == len(inputs) and all(map(operator.is_, map(_skip_identities, made), inputs)):
        return None
    _check_graph(reference, traced, len(inputs), len(tf.nest.flatten(targets)))
    module = tf.Module()

    def prepare(x: Any) -> Any:
        count = tf.shape(tf.nest.flatten(x)[0])[0]
        unused = tf.nest.map_structure(lambda part: tf.zeros([count, *part.shape[1:]], part.dtype), targets)
        return transform_inputs(x, unused)

    module.prepare = tf.function(prepare, input_signature=[x])
    module.held = list(_find_trackables(function))  # tables and layers are saved as attributes of the module
    _check_batch_independence(reference, module.prepare, dataset)
    return module


def trace_for_training(reference: str, dataset: DatasetInfo, *, exported: bool) -> tf.Module | None:
    """Returns the module of `trace`, after saving it on trial; None without a transformation.

    Also None, in place of an error, if the model is not to be `exported`.
    """
    try:
        module = trace(reference, dataset) if reference else None
        with tempfile.TemporaryDirectory(prefix="shardline-check-") as directory:
            save(module, Path(directory))
            if module is not None:
                check_saved_model(Path(directory) / DIRECTORY)
        return module
    except ModelError:
        if exported:
            raise
        return None


def save(module: tf.Module | None, directory: Path) -> None:
    """Saves a preparation in a model's directory, replacing an earlier one; raises ModelError as `trace`."""
    target = directory / DIRECTORY
    if target.exists():
        shutil.rmtree(target)
    try:
        if module is not None:
            tf.saved_model.save(module, str(target))
    except (AssertionError, ValueError, TypeError, tf.errors.OpError) as error:
        reason = " ".join(str(error).split())[:200]
        raise _refusal(f"it cannot be saved: {reason}") from error


def load(model_file: Path) -> tf.Module | None:
    """Loads the preparation next to a model file; None if there is none, a ModelError if it is damaged."""
    directory = model_file.with_name(DIRECTORY)
    if not directory.is_dir():
        return None
    try:
        check_saved_model(directory)
        loaded = tf.saved_model.load(str(directory))
        loaded.prepare  # noqa: B018
    except (OSError, ValueError, AttributeError, tf.errors.OpError) as error:
        raise ModelError(
            f"cannot load {directory}, which prepares the model's inputs; train it again"
        ) from error
    return loaded


def _refusal(why: str) -> ModelError:
    return ModelError(
        f"the transform cannot be exported: {why}; do the same in layers of the model, or set "
        "allow_unexportable to train without an export"
    )


def _check_graph(reference: str, traced: Any, inputs: int, targets: int) -> None:
    """Refuses inputs that depend on labels, on random numbers, or on Python code."""
    graph = traced.graph
    labels = {id(tensor.op) for tensor in graph.inputs[inputs : inputs + targets]}
    used = {node.op for body in graph.as_graph_def().library.function for node in body.node_def}
    waiting = [tensor.op for tensor in tf.nest.flatten(graph.structured_outputs) if hasattr(tensor, "op")]
    seen = set[int]()
    while waiting:  # all ancestors of the outputs
        op = waiting.pop()
        if id(op) in labels:
            raise _refusal(f"{reference} makes inputs out of labels, which a client does not have")
        if id(op) not in seen and op.type not in ("Shape", "Size", "Rank"):  # which depend on no value
            waiting += [tensor.op for tensor in op.inputs]
        seen.add(id(op))
        used.add(op.type)
    if drawn := sorted(name for name in used if "Random" in name or name == "Multinomial"):
        raise _refusal(f"{reference} draws random numbers ({', '.join(drawn)}), which belong in augment")
    if called := sorted(name for name in used if "PyFunc" in name):
        raise _refusal(f"{reference} calls Python ({', '.join(called)}), which a server cannot run")


def _skip_identities(tensor: Any) -> Any:
    while getattr(tensor, "op", None) is not None and tensor.op.type == "Identity":
        (tensor,) = tensor.op.inputs
    return tensor


def _check_batch_independence(reference: str, prepare: Any, dataset: DatasetInfo) -> None:
    """Refuses a transformation whose inputs of an example depend on the rest of the batch."""
    rows = _probe_batch(dataset)
    try:
        together = prepare(rows)
        alone = prepare(tf.nest.map_structure(lambda part: part[:1], rows))
    except tf.errors.OpError:
        return  # synthetic values may be invalid; the real data is checked in training
    for batch, single in zip(tf.nest.flatten(together), tf.nest.flatten(alone), strict=True):
        if (batch.shape[0], single.shape[0]) != (3, 1):
            raise _refusal(
                f"{reference} makes {describe_structure(batch)} of 3 examples: their number changes"
            )
        near = functools.partial(np.allclose, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        if not (near if batch.dtype.is_floating else np.array_equal)(batch[:1].numpy(), single.numpy()):
            raise _refusal(f"{reference} makes other inputs of an example in another batch")


def _probe_batch(dataset: DatasetInfo) -> Inputs:
    drawn = np.random.default_rng(0)
    if not dataset.is_table:
        return tf.constant(drawn.integers(0, 256, (3, *dataset.input_shape), np.uint8))
    return make_probe_rows(dataset.inputs, ("1", "2", "3"), (1, 2, 4))


def _find_trackables(function: Any) -> Iterator[Any]:
    """Yields TensorFlow's tables and layers that a function uses, or a function that it calls."""
    waiting, seen = [function], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        item = getattr(item, "python_function", item)
        if isinstance(item, tf.__internal__.tracking.Trackable):
            yield item
        elif isinstance(item, FunctionType):
            names: Mapping[str, Any] = item.__globals__
            waiting += [names[name] for name in item.__code__.co_names if name in names]
            cells = (cell.cell_contents for cell in item.__closure__ or ())
            waiting += [content for content in cells if content is not None]
        elif callable(item) and hasattr(item, "__self__"):
            waiting.append(item.__self__)
