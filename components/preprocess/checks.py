"""Checks of a source: of what it says of itself, of what it yields, and of all of it together."""

from __future__ import annotations

import dataclasses
import difflib
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.components.preprocess.example import OWN_FEATURES
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import BadExample, Example
from shardline.trainer.data.features import CLASS, LABEL, Anomaly, Feature, Label, is_class
from shardline.trainer.data.manifest import SPLITS
from shardline.trainer.errors import BadRecordError, SourceError, printable
from shardline.trainer.progress import say

SPLIT_NAMES = frozenset({None, *SPLITS})

# Anomalies that an error names in a word; the log tells all.
_NAMED = 20


def checked(found: Any, classes: int | None) -> Example:
    """Returns an example that is one, of one of the classes; raises SourceError or BadRecordError.

    Where the number of classes is None, the label is something else, and is not looked at.
    """
    if type(found) is not Example:
        raise _bad_example(found)
    example: Example = found
    name, label, split = example.key, example.label, example.split
    if type(name) is not str or not name or split not in SPLIT_NAMES:
        _check(name, split)
    if classes is None:
        return example
    if type(label) is not int:
        label = _index(label, name)
        example = example._replace(label=label)
    if not 0 <= label < classes:
        raise _out_of_range(label, classes, name)
    return example


def _bad_example(example: object) -> BadRecordError:
    if isinstance(example, BadExample):
        return BadRecordError(example.name, example.reason)
    raise SourceError(
        f"the source yields a {type(example).__name__}, not an Example "
        "(shardline.components.preprocess.sources)"
    )


def _check(name: Any, split: Any) -> None:
    if type(name) is not str or not name:
        raise SourceError(f"key {name!r} of an example is not a text of at least one character")
    if split not in SPLIT_NAMES:
        raise SourceError(f"split {split!r} of {name!r} is unknown; known: {', '.join(SPLITS)}, None")


def _index(label: Any, name: str) -> int:
    """Returns a label that may be an integer of another kind."""
    try:
        return operator.index(label)
    except TypeError:
        raise SourceError(f"label {label!r} of {name!r} is not an integer") from None


def _out_of_range(label: int, classes: int, name: str) -> SourceError:
    return SourceError(f"label {label} of {name!r} is out of range 0..{classes - 1} of the {classes} classes")


def check_labels(source: Any) -> tuple[Label, ...]:
    """Returns the labels of a source: those that it declares, else one of its classes."""
    declared = getattr(source, "labels", None)
    labels = tuple(declared) if declared else (Label(LABEL, CLASS, tuple(source.class_names)),)
    for label in labels:
        if not isinstance(label, Label):
            raise SourceError(f"the source's labels hold a {type(label).__name__}; give shardline.Label(...)")
        _check_names(label)
    if len(labels) == 1:
        return (dataclasses.replace(labels[0], name=LABEL),)
    names = [label.name for label in labels]
    for name in names:
        if names.count(name) > 1 or name in OWN_FEATURES or not is_text(name):
            raise SourceError(f"label {name!r} cannot be called so beside others; rename its column")
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
    """Whether it is a text without half characters, which UTF-8 cannot hold."""
    return isinstance(name, str) and not any("\ud800" <= char <= "\udfff" for char in name)


def _check_names(label: Label) -> None:
    class_names = label.class_names
    for name in class_names:
        if not isinstance(name, str) or not name.isprintable():
            raise SourceError(f"class name {name!r} is not printable text; rename the class")
    if len(set(class_names)) != len(class_names):
        raise SourceError(f"class names are not unique: {', '.join(class_names)}")
    if label.kind == CLASS and len(class_names) < 2:
        there = f"only {class_names[0]!r}" if class_names else "none"
        raise SourceError(f"at least 2 classes are needed, the source has {there}")
    if label.fault:
        raise SourceError(f"the source's {label.fault}")


def check_classes(count: int, seen: npt.NDArray[np.bool_], class_names: Sequence[str]) -> None:
    """Refuses examples of one class alone."""
    if seen.sum() == 1:
        raise SourceError(
            f"all {count:,} examples are of one class, {class_names[int(seen.argmax())]!r}; bring a second"
        )


def check_stratified(labels: Sequence[Label], existing: Collection[str | None]) -> None:
    """Refuses what cannot be stratified: labels that are not one class, and splits of the source's own."""
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
    """Says what does not fit the schema, each in a line, and refuses it unless on_anomaly is "warn"."""
    for anomaly in found:
        say("preprocess", f"anomaly: {anomaly}")
    blocking = [anomaly for anomaly in found if anomaly.blocks]
    if blocking and settings.on_anomaly == "fail":
        named = ", ".join(f"{one.column} ({one.problem})" for one in blocking[:_NAMED])
        more = f" and {len(blocking) - _NAMED} more" if len(blocking) > _NAMED else ""
        raise SourceError(
            f"the source does not fit the schema {settings.schema}: {named}{more}, each told above; correct "
            "the data or the schema, or go on with on_anomaly=warn"
        )


def check_group(group: str, features: Sequence[Feature]) -> str:
    """Returns the feature whose values are groups, "" for none; one that is not there is a SourceError."""
    names = [feature.name for feature in features]
    if group and group not in names:
        near = difflib.get_close_matches(group, names, n=1)
        raise SourceError(
            f"the source has no feature {group!r} to group by, it has "
            f"{printable(', '.join(names))[:300] or 'none'}"
            f"{f'; did you mean {near[0]!r}?' if near else ''}"
        )
    return group


def group_of(values: Mapping[str, Any], group: str, name: str) -> bytes:
    """Returns the group of an example; a BadRecordError says that it has none."""
    value = values.get(group)
    if value is None or value == "" or value != value:  # NaN is not itself
        raise BadRecordError(name, f"has no value of {group!r}, by which examples are grouped")
    return str(value).encode("utf-8", "surrogateescape")
