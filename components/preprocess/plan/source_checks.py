"""Checks of a source: its declarations, each example that it yields, and the labels of all of them."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from shardline.components.preprocess.schema.labels import LARGEST_FLOAT
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.example import BadExample, Example
from shardline.components.preprocess.tfrecord.example import OWN_FEATURES, entries
from shardline.components.text import enumerate_names
from shardline.trainer.base.deserialize import did_you_mean
from shardline.trainer.base.errors import BadRecordError, SourceError, printable
from shardline.trainer.base.progress import report
from shardline.trainer.data.features import (
    CLASS,
    LABEL,
    MULTILABEL,
    REGRESSION,
    Anomaly,
    Feature,
    Label,
    is_class,
)
from shardline.trainer.data.manifest import SPLITS

_SPLIT_NAMES = frozenset({None, *SPLITS})


def check_example(found: Any, classes: int | None) -> Example:
    """Returns a valid example, whose label is one of `classes` classes, or of another kind (None)."""
    if type(found) is not Example:
        if isinstance(found, BadExample):
            raise BadRecordError(found.name, found.reason)
        raise SourceError(
            f"the source yields a {type(found).__name__}, not an Example "
            "(shardline.components.preprocess.sources.example)"
        )
    example: Example = found
    name, label, split = example.key, example.label, example.split
    if type(name) is not str or not name:
        raise SourceError(f"key {name!r} of an example is not a text of at least one character")
    if split not in _SPLIT_NAMES:
        raise SourceError(f"split {split!r} of {name!r} is unknown; known: {', '.join(SPLITS)}, None")
    if classes is None:
        return example
    if type(label) is not int:  # it may be an integer of another kind
        try:
            label = operator.index(label)
        except TypeError:
            raise SourceError(f"label {label!r} of {name!r} is not an integer") from None
        example = example._replace(label=label)
    if not 0 <= label < classes:
        raise SourceError(
            f"label {label} of {name!r} is out of range 0..{classes - 1} of the {classes} classes"
        )
    return example


def check_labels(source: Any) -> tuple[Label, ...]:
    """Returns the labels of a source: those that it declares, else one of its classes."""
    declared = getattr(source, "labels", None)
    labels = tuple(declared) if declared else (Label(LABEL, CLASS, tuple(source.class_names)),)
    for label in labels:
        if not isinstance(label, Label):
            raise SourceError(f"the source's labels hold a {type(label).__name__}; give shardline.Label(...)")
        class_names = label.class_names
        for name in class_names:
            if not isinstance(name, str) or not name.isprintable():
                raise SourceError(f"class name {name!r} is not printable text; rename the class")
        if twice := [name for name, count in Counter(class_names).items() if count > 1]:
            raise SourceError(f"class names are not unique: {enumerate_names(twice)}")
        if label.kind == CLASS and len(class_names) < 2:
            found = f"only {class_names[0]!r}" if class_names else "none"
            raise SourceError(
                f"at least 2 classes are needed, the source has {found}; add examples of another, or name "
                "another label, or the directory in which the classes' folders are"
            )
        if label.fault:
            raise SourceError(f"the source's {label.fault}")
    if len(labels) == 1:
        return (dataclasses.replace(labels[0], name=LABEL),)
    names = [label.name for label in labels]
    for name in names:
        if names.count(name) > 1 or name in OWN_FEATURES or not is_text(name):
            raise SourceError(f"label {name!r} cannot have this name among several labels; rename its column")
    return labels


def check_features(source: Any) -> tuple[Feature, ...]:
    """Returns the features that a source declares."""
    features = tuple(getattr(source, "features", ()))
    for feature in features:
        if not isinstance(feature, Feature):
            raise SourceError(
                f"the source's features hold a {type(feature).__name__}; give shardline.Feature(NAME, TYPE)"
            )
        if not is_text(feature.name):
            raise SourceError(
                f"feature {feature.name!r} has a name that UTF-8 cannot hold; rename its column"
            )
    return features


def is_text(name: Any) -> bool:
    """Whether it is a text without lone surrogates, which UTF-8 cannot hold."""
    return isinstance(name, str) and not any("\ud800" <= char <= "\udfff" for char in name)


def check_stratified(labels: Sequence[Label], existing: Collection[str | None]) -> None:
    """Refuses what cannot be stratified: labels other than one class, and a source with its own splits."""
    if not is_class(labels):
        kinds = ", ".join(f"{label.name} of kind {label.kind}" for label in labels)
        raise SourceError(
            f"stratify needs one label that is a class, the source has {kinds}; leave stratify out, or "
            "predict one class"
        )
    if own := [split for split in SPLITS if split in existing]:
        raise SourceError(
            f"stratify would undo the splits that the source gives its examples ({', '.join(own)}); leave "
            "stratify out"
        )


def check_anomalies(found: Sequence[Anomaly], settings: PreprocessSettings) -> None:
    """Reports each anomaly in a line; raises SourceError if one blocks, unless on_anomaly is "warn"."""
    for anomaly in found:
        report("preprocess", f"anomaly: {anomaly}")
    blocking = [anomaly for anomaly in found if anomaly.blocks]
    if blocking and settings.on_anomaly == "fail":
        named = enumerate_names([f"{anomaly.column} ({anomaly.problem})" for anomaly in blocking])
        raise SourceError(
            f"the source does not fit the schema {settings.schema}: {named} (see the log); correct "
            "the data or the schema, or continue with on_anomaly=warn"
        )


def check_group(group: str, features: Sequence[Feature]) -> str:
    """Returns the feature whose values are groups, "" for none; SourceError if the source lacks it."""
    names = [feature.name for feature in features]
    if group and group not in names:
        raise SourceError(
            f"the source has no feature {group!r} to group by, it has "
            f"{printable(', '.join(names))[:300] or 'none'}"
            f"{did_you_mean(group, names, after='; ')}"
        )
    return group


def example_group(values: Mapping[str, Any], group: str, name: str) -> bytes:
    """Returns the group of an example; BadRecordError if it has none."""
    value = values.get(group)
    if value is None or value == "" or value != value:  # NaN is not itself
        raise BadRecordError(name, f"has no value of {group!r}, by which examples are grouped")
    return str(value).encode("utf-8", "surrogateescape")


class Targets:
    """Checks and serializes the labels of examples, where they are not one class each."""

    def __init__(self, labels: Sequence[Label]) -> None:
        self._labels = labels
        self._class_label = next((label.name for label in labels if label.kind == CLASS), "")
        # The smallest and the largest value so far of each number, and of each class's indicator.
        self._least = {label.name: np.full(len(label.outputs), math.inf) for label in labels}
        self._largest = {label.name: np.full(len(label.outputs), -math.inf) for label in labels}

    def serialize(self, values: Any, name: str) -> tuple[int, bytes]:
        """Returns the index of the first label that is a class, else 0, and the entries of one example."""
        is_multiple = len(self._labels) > 1
        names = {label.name for label in self._labels}
        if is_multiple and (not isinstance(values, Mapping) or values.keys() != names):
            raise BadRecordError(
                name, f"has the labels {_short(values)}, not one for each label of the source"
            )
        stored, class_index = {}, 0
        for label in self._labels:
            value = values[label.name] if is_multiple else values
            stored[label.name] = kept = _store(label, value, name)
            numbers = np.bincount(kept, minlength=len(label.outputs)) if label.kind == CLASS else kept
            for found, choose in ((self._least, np.minimum), (self._largest, np.maximum)):
                choose(found[label.name], numbers, out=found[label.name])
            if label.name == self._class_label:
                class_index = int(kept[0])
        return class_index, entries(stored)

    def check(self, count: int) -> None:
        """Refuses labels that are the same for all `count` examples: a constant cannot be learned."""
        for label in self._labels:
            least, largest = self._least[label.name].tolist(), self._largest[label.name].tolist()
            for output, low, high in zip(label.outputs, least, largest, strict=True):
                if label.kind == REGRESSION and low == high:
                    raise SourceError(
                        f"all {count:,} examples have the value {low:g} of {output!r}; a constant cannot "
                        "be learned; leave it out of label"
                    )
                if label.kind == CLASS and low == 1:
                    raise SourceError(
                        f"all {count:,} examples are of one class of {label.name!r}, {output!r}; add "
                        "examples of another class"
                    )
                if label.kind == MULTILABEL and low == high:
                    raise SourceError(
                        f"{'all' if low else 'none'} of the {count:,} examples have {output!r}; leave it out "
                        "of label, or add other examples"
                    )


def _store(label: Label, value: Any, name: str) -> list[int] | list[float]:
    """Returns the values of a label as they are stored; BadRecordError for an invalid one."""
    outputs, is_list = label.outputs, isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
    if label.kind == CLASS:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise BadRecordError(name, f"label {label.name!r} is {_short(value)}, not the index of a class")
        index = value.__index__()
        if not 0 <= index < len(outputs):
            raise BadRecordError(name, f"label {label.name!r} is out of range 0..{len(outputs) - 1}")
        return [index]
    if label.kind == REGRESSION:
        values = value if is_list else [value]
        if len(values) != len(outputs):
            raise BadRecordError(name, f"has {len(values)} numbers for {len(outputs)}")
        return [_number(number, output, name) for number, output in zip(values, outputs, strict=True)]
    if not is_list and not isinstance(value, set | frozenset):
        raise BadRecordError(name, f"label {label.name!r} is {_short(value)}, not a list of names")
    if all(isinstance(item, str) for item in value):
        if unknown := [item for item in value if item not in outputs]:
            raise BadRecordError(name, f"label {label.name!r} has {unknown[0]!r}, which is none of its names")
        chosen = set(value)
        return [int(output in chosen) for output in outputs]
    if len(value) != len(outputs) or any(item not in (0, 1) for item in value):
        raise BadRecordError(
            name, f"label {label.name!r} is {_short(value)}, not a 0 or 1 for each of its names"
        )
    return list(map(int, value))


def _number(value: Any, output: str, name: str) -> float:
    if isinstance(value, str | bytes | bool) or value is None:
        raise BadRecordError(name, f"{output!r} is {_short(value)}, not a number")
    number = float(np.float32(value)) if abs(float(value)) <= LARGEST_FLOAT else math.inf
    if not math.isfinite(number):
        raise BadRecordError(name, f"{output!r} is {_short(value)}, not a finite number")
    return number


def _short(value: Any) -> str:
    return printable(repr(value))[:60]
