"""Transforms of examples: augmentation, a user's transformation of batches, class weights, form of labels.

An augmentation changes training examples at random, the same on any cluster; a transformation makes of a
batch what a model takes; class weights say how much the examples of each class count in the loss; labels
have the form that loss and metrics take.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from shardline.trainer import files, plugins
from shardline.trainer.data.decode import Inputs, Targets
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import DatasetInfo, Manifest
from shardline.trainer.errors import SettingsError

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
    try:
        traced = function.get_concrete_function(*wanted, tf.TensorSpec((2,), tf.int64))
    except (Exception, SystemExit) as error:  # a user's code runs here and may raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split())  # names file and line of user code itself
        raise SettingsError(
            f"augmentation {reference!r} failed on an example (x, y, seed): {text}"
        ) from error
    found = traced.structured_outputs
    if not _agree(found, wanted):
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


def augment_batch(
    augmentation: Augmentation, x: Inputs, y: Targets, seeds: tf.Tensor
) -> tuple[Inputs, Targets]:
    """Applies an augmentation to each example of a batch, with its seeds, int64 (batch, 2)."""
    signature = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), (x, y))
    x, y = tf.map_fn(lambda one: augmentation(*one), (x, y, seeds), fn_output_signature=signature)
    return x, y


def _agree(found: Any, wanted: Any) -> bool:
    try:
        tf.nest.assert_same_structure(found, wanted, check_types=False)
    except (ValueError, TypeError):
        return False
    pairs = zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True)
    return all(a.dtype == b.dtype and a.shape.is_compatible_with(b.shape) for a, b in pairs)


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
        counts = manifest.splits["train"].class_counts
        # The weight of a class without examples weighs nothing, whatever it is.
        return tuple(sum(counts) / (len(counts) * count) if count else 0.0 for count in counts)
    try:
        weights = files.parse_json(setting, "it", SettingsError)
    except SettingsError:
        weights = None
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
        return {one.name: _form(targets[one.name], one, forms.get(one.name)) for one in labels}
    return _form(targets, labels[0], forms.get(labels[0].name))


def _form(target: tf.Tensor, label: Label, form: LabelForm | None) -> tf.Tensor:
    if form == "one-hot":
        return tf.one_hot(target, len(label.outputs), dtype=tf.float32)
    if form in ("binary", "column"):
        return tf.cast(target, tf.float32)[:, None]
    return tf.cast(target, tf.float32) if label.kind == MULTILABEL else target
