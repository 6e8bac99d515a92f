"""Transforms of examples: augmentation, a user's transformation of batches, class weights, form of labels.

An augmentation changes training examples at random, the same on any cluster; a transformation makes of a
batch what a model takes. What it does to inputs is traced once, before training, as a graph that is saved
beside a model and served, and needs none of the user's code afterwards.
"""

from __future__ import annotations

import contextlib
import difflib
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

from shardline.trainer.base import files, plugins
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.data.decode import Inputs, Targets, made_up
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import DatasetInfo, Manifest
from shardline.trainer.keras_compat.operations import check_saved_model

#: (x, y) of a batch, y as `parse_batch` gives targets -> x, (x, y) or (x, y, sample_weight), where each may
#: be a dict or a tuple of tensors.
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

    def words(item: Any) -> str:
        if not hasattr(item, "dtype"):
            return type(item).__name__
        shape = tf.TensorShape(item.shape)
        return f"{item.dtype.name} {'of any shape' if shape.rank is None else tuple(shape)}"

    return str(tf.nest.map_structure(words, structure)).replace("'", "")


#: (x, y, seed) -> (x, y) of one example: x uint8 (height, width, channels), or for a table a dict of scalars;
#: y the target of one example, of one class a scalar int64; seed int64 (2,), for TensorFlow's stateless
#: random functions.
Augmentation = Callable[[Any, Targets, tf.Tensor], tuple[Any, Targets]]


def load_augmentation(reference: str, dataset: DatasetInfo) -> Augmentation:
    """Returns the augmentation that `pkg.module:function` names, tried by tracing it on an example."""
    function = _load(reference, "augmentation")
    columns = {name: tf.TensorSpec(feature.shape, feature.dtype) for name, feature in dataset.inputs.items()}
    x = columns if dataset.is_table else tf.TensorSpec(dataset.input_shape, tf.uint8)
    y = {name: tf.TensorSpec(one.feature.shape, one.feature.dtype) for name, one in dataset.labels.items()}
    wanted = (x, y if len(y) > 1 else next(iter(y.values())))
    with plugins.calling(f"augmentation {reference!r} failed on an example (x, y, seed)", SettingsError):
        found = function.get_concrete_function(*wanted, tf.TensorSpec((2,), tf.int64)).structured_outputs
    same = False
    with contextlib.suppress(ValueError, TypeError):
        tf.nest.assert_same_structure(found, wanted, check_types=False)
        pairs = zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True)
        same = all(a.dtype == b.dtype and a.shape.is_compatible_with(b.shape) for a, b in pairs)
    if not same:
        raise SettingsError(
            f"augmentation {reference!r} returned {describe_structure(found)}; it must return (x, y) "
            f"as it got them, {describe_structure(wanted)}"
        )
    checked: Augmentation = function
    return checked


def _load(reference: str, kind: str) -> Any:
    """Returns the tf.function of a user's function: AutoGraph converts it, and not what calls it."""
    function = plugins.load(reference, kind, SettingsError)
    if not callable(function):
        raise SettingsError(f"{kind} {reference!r} is not a function but {type(function).__name__}")
    return tf.function(function)


BALANCED = "balanced"


def class_weights(setting: str, manifest: Manifest) -> tuple[float, ...]:
    """Returns a weight for each class, in the order of the manifest's class names; () for none ("").

    "balanced" is records / (classes x examples of the class) in the training split, so that each class counts
    as much as any other; of a JSON object of class names and weights a class that it leaves out has weight 1.
    """
    if not setting:
        return ()
    if not manifest.is_classes:
        kinds = ", ".join(f"{label.name}, {label.kind}" for label in manifest.labels)
        raise SettingsError(
            f"class_weights are for one label of kind class, the dataset has {kinds}; leave them out, or "
            "weigh in the model's loss"
        )
    if setting == BALANCED:
        (counts,) = (tally.counts for tally in manifest.splits["train"].labels.values())
        # The weight of a class without examples weighs nothing, whatever it is.
        return tuple(sum(counts) / (len(counts) * count) if count else 0.0 for count in counts)
    weights = None
    with contextlib.suppress(SettingsError):
        weights = files.parse_json(setting, "it", SettingsError)
    if not isinstance(weights, dict):
        raise SettingsError(
            f"class_weights takes {BALANCED} or a JSON object of class names and weights such as "
            f'{{"cat": 2.0}}, got {setting[:80]!r}'
        )
    names = manifest.class_names
    for name, weight in weights.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=8, cutoff=0.0)
            raise SettingsError(f"class_weights: the dataset has no class {name!r}, it has {', '.join(near)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise SettingsError(f"class_weights: {name!r} must be a number of at least 0, got {weight!r}")
    return tuple(float(weights.get(name, 1.0)) for name in names)


#: Form of a label in a batch. Of a class its number, int64 (batch,); one-hot, float32 (batch, classes); or
#: for two classes 0 or 1, float32 (batch, 1). Of several labels 0 or 1 for each, float32 (batch, outputs). Of
#: numbers as they are stored, or for a model whose output is so, one number as float32 (batch, 1).
LabelForm = Literal["sparse", "one-hot", "binary", "several", "number", "column"]

#: By the kind of a label, its form where nothing asks for another one.
USUAL_FORMS: Mapping[str, LabelForm] = {CLASS: "sparse", MULTILABEL: "several", REGRESSION: "number"}


def form_targets(targets: Targets, labels: Sequence[Label], forms: Mapping[str, LabelForm]) -> Targets:
    """Returns targets as `parse_batch` gives them in the forms of their labels, by name."""
    if isinstance(targets, dict):
        return {one.name: form_targets(targets[one.name], [one], forms) for one in labels}
    form = forms.get(labels[0].name)
    if form == "one-hot":
        return tf.one_hot(targets, len(labels[0].outputs), dtype=tf.float32)
    if form in ("binary", "column"):
        return tf.cast(targets, tf.float32)[:, None]
    return tf.cast(targets, tf.float32) if labels[0].kind == MULTILABEL else targets


#: Directory beside model.keras; there is none where a model takes a dataset's inputs as they are.
DIRECTORY = "transform"

# A computation in another order of one example alone and of one in a batch.
_TOLERANCE = 1e-4


def trace(reference: str, dataset: DatasetInfo) -> tf.Module | None:
    """Returns the graph of what a transformation does to inputs, `prepare`; None where it does nothing.

    Args:
        reference: The function, pkg.module:name.
        dataset: The dataset whose batches it takes.

    Raises:
        ModelError: When it cannot be served: the inputs that it makes follow from labels or chance, or from
            other examples of the batch; or their number changes, or they cannot be saved.
    """
    function = plugins.load(reference, "transform", SettingsError)
    function = getattr(function, "python_function", function)
    x = tf.nest.map_structure(lambda one: tf.TensorSpec([None, *one.shape[1:]], one.dtype), _rows(dataset))
    y = {
        name: tf.TensorSpec([None, *label.feature.shape], label.feature.dtype)
        for name, label in dataset.labels.items()
    }
    targets: Any = y if len(y) > 1 else next(iter(y.values()))

    def inputs_of(x: Any, y: Any) -> Any:
        made = function(x, y)
        return made[0] if isinstance(made, tuple) else made

    with plugins.calling(f"transform {reference!r} failed", SettingsError):
        traced = tf.function(inputs_of).get_concrete_function(x, targets)
    made = tf.nest.flatten(traced.graph.structured_outputs)
    given = traced.graph.inputs[: len(tf.nest.flatten(x))]
    if len(made) == len(given) and all(map(operator.is_, map(_origin, made), given)):
        return None
    _check_graph(reference, traced, len(given), len(tf.nest.flatten(targets)))
    module = tf.Module()

    def prepare(x: Any) -> Any:
        count = tf.shape(tf.nest.flatten(x)[0])[0]
        made = tf.nest.map_structure(lambda one: tf.zeros([count, *one.shape[1:]], one.dtype), targets)
        return inputs_of(x, made)

    module.prepare = tf.function(prepare, input_signature=[x])
    module.held = list(_held(function))  # tables and layers are saved by those who hold them
    _check_rows(reference, module.prepare, dataset)
    return module


def of_training(reference: str, dataset: DatasetInfo, *, exported: bool) -> tf.Module | None:
    """Returns what `trace` does, saved for trial; None without a transformation.

    Where a model that is not to be `exported` could not be served for this, it is None too.
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
    """Saves a preparation beside a model, in the place of an earlier one; raises ModelError as `trace`."""
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
    """Returns what prepares the inputs of a model, saved beside its file; None where nothing does.

    Raises ModelError when it is damaged.
    """
    directory = model_file.with_name(DIRECTORY)
    if not directory.is_dir():
        return None
    try:
        check_saved_model(directory)
        loaded = tf.saved_model.load(str(directory))
        loaded.prepare  # noqa: B018
    except (OSError, ValueError, AttributeError, tf.errors.OpError) as error:
        raise ModelError(
            f"cannot load {directory}, which makes the model's inputs; train it again"
        ) from error
    return loaded


def _refusal(why: str) -> ModelError:
    return ModelError(
        f"what the transform makes cannot be put into the export: {why}; make it of layers of the model, or, "
        "to train all the same, without an export, set allow_unexportable"
    )


def _check_graph(reference: str, traced: Any, inputs: int, targets: int) -> None:
    """Refuses inputs that follow from labels, from chance, or from code that is not TensorFlow's."""
    graph = traced.graph
    labels = {id(one.op) for one in graph.inputs[inputs : inputs + targets]}
    used = {node.op for one in graph.as_graph_def().library.function for node in one.node_def}
    waiting = [one.op for one in tf.nest.flatten(graph.structured_outputs) if hasattr(one, "op")]
    seen = set[int]()
    while waiting:  # all operations that outputs follow from
        op = waiting.pop()
        if id(op) in labels:
            raise _refusal(f"{reference} makes inputs out of labels, which a client does not have")
        if id(op) not in seen and op.type not in ("Shape", "Size", "Rank"):  # which follow from no value
            waiting += [one.op for one in op.inputs]
        seen.add(id(op))
        used.add(op.type)
    if drawn := sorted(name for name in used if "Random" in name or name == "Multinomial"):
        raise _refusal(f"{reference} draws at random ({', '.join(drawn)}), which belongs into augment")
    if called := sorted(name for name in used if "PyFunc" in name):
        raise _refusal(f"{reference} calls Python ({', '.join(called)}), which a server cannot run")


def _origin(tensor: Any) -> Any:
    """Returns the tensor of which one is a copy."""
    while getattr(tensor, "op", None) is not None and tensor.op.type == "Identity":
        (tensor,) = tensor.op.inputs
    return tensor


def _check_rows(reference: str, prepare: Any, dataset: DatasetInfo) -> None:
    """Refuses a transformation of which an example comes out otherwise alone than in a batch."""
    rows = _rows(dataset)
    try:
        together = prepare(rows)
        alone = prepare(tf.nest.map_structure(lambda one: one[:1], rows))
    except tf.errors.OpError:
        return  # made-up values need not be possible ones; the data themselves tell
    for one, other in zip(tf.nest.flatten(together), tf.nest.flatten(alone), strict=True):
        if (one.shape[0], other.shape[0]) != (3, 1):
            raise _refusal(f"{reference} makes {describe_structure(one)} of 3 examples: their number changes")
        first, single = one[:1].numpy(), other.numpy()
        near = functools.partial(np.allclose, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        if not (near if one.dtype.is_floating else np.array_equal)(first, single):
            raise _refusal(f"{reference} makes of an example something else in another batch")


def _rows(dataset: DatasetInfo) -> Inputs:
    """Returns three made-up examples."""
    drawn = np.random.default_rng(0)
    if not dataset.is_table:
        return tf.constant(drawn.integers(0, 256, (3, *dataset.input_shape), np.uint8))
    return made_up(dataset.inputs, ("1", "2", "3"), (1, 2, 4))


def _held(function: Any) -> Iterator[Any]:
    """Yields what a function, and those of its module that it calls, hold of TensorFlow: tables, layers."""
    waiting, seen = [function], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one = getattr(one, "python_function", one)
        if isinstance(one, tf.__internal__.tracking.Trackable):
            yield one
        elif isinstance(one, FunctionType):
            names: Mapping[str, Any] = one.__globals__
            waiting += [names[name] for name in one.__code__.co_names if name in names]
            waiting += [
                cell.cell_contents for cell in one.__closure__ or () if cell.cell_contents is not None
            ]
        elif callable(one) and hasattr(one, "__self__"):
            waiting.append(one.__self__)
