"""Examples of a source of one's own, checked one by one, as columns.

An image in memory is copied as soon as the source yields it, since the source may reuse that memory.
"""

from __future__ import annotations

import math
import operator
import reprlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardline.components.preprocess.example import OWN_FEATURES
from shardline.components.preprocess.images.codec import encode_pixels
from shardline.components.preprocess.plan.records import SOURCE_SPLITS
from shardline.components.preprocess.schema.targets import LARGEST_FLOAT
from shardline.components.preprocess.sources.example import BadExample, Batch, Example, Span
from shardline.trainer.base.errors import BadRecordError, SourceError, short
from shardline.trainer.manifest import CLASS, REGRESSION, SPLITS, Feature, Label

# Python's types of a feature, and the form that a number must fit.
_TYPES: Mapping[str, type | tuple[type, ...]] = {"int64": int, "float32": (float, int), "string": str}
_FITTING = {"int64": struct.Struct("<q"), "float32": struct.Struct("<f")}


class ExampleColumns:
    """Collects Examples as a `Batch`; `held` are the bytes of their images and texts, about."""

    def __init__(self, labels: Sequence[Label], features: Sequence[Feature]) -> None:
        own = OWN_FEATURES | {label.name for label in labels}
        for feature in features:
            is_wrong = len(feature.shape) > 1 or not all(feature.shape) or not feature.name.isprintable()
            if feature.name in own or feature.dtype not in _TYPES or is_wrong:
                raise SourceError(
                    f"the source declares a feature {feature.name!r} of {feature.dtype} {feature.shape}; "
                    f"expected {', '.join(_TYPES)} of shape () or (n,), "
                    f"and a printable name other than {', '.join(sorted(own))}"
                )
        self._labels, self._features = labels, features
        self._names = {feature.name for feature in features}
        self._clear()

    def _clear(self) -> None:
        self._keys, self._images, self._splits = list[str](), list[Any](), list[str | None]()
        self._values: dict[str, list[Any]] = {
            name: [] for name in (*(label.name for label in self._labels), *sorted(self._names))
        }
        self.held = 0

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, found: Any) -> None:
        """Adds an Example; BadRecordError if it cannot be used, SourceError if it is none."""
        example = _check_example(found)
        values = self._targets(example)
        if self._names or example.features:
            values |= self._checked(example)
        image = example.image
        if image.__class__ is not Span:
            image = _kept(image, example.key)
            self.held += len(image) if isinstance(image, bytes) else 0
        for name, value in values.items():
            self._values[name].append(value)
            self.held += len(value) if isinstance(value, bytes) else 8
        self._keys.append(example.key)
        self._images.append(image)
        self._splits.append(example.split)

    def flush(self) -> Batch:
        """Returns the examples that were added, and forgets them."""
        columns = {label.name: _array(label.feature, self._values[label.name]) for label in self._labels}
        columns |= {feature.name: _array(feature, self._values[feature.name]) for feature in self._features}
        images = self._images if any(image is not None for image in self._images) else ()
        splits = self._splits if any(self._splits) else ()
        batch = Batch(self._keys, columns, images, splits)
        self._clear()
        return batch

    def _targets(self, example: Example) -> dict[str, Any]:
        label, labels = example.label, self._labels
        if len(labels) == 1:
            return {labels[0].name: _store(labels[0], label, example.key)}
        if not isinstance(label, Mapping) or label.keys() != {of.name for of in labels}:
            raise BadRecordError(
                example.key, f"has the labels {short(label)}, not one for each label of the source"
            )
        return {of.name: _store(of, label[of.name], example.key) for of in labels}

    def _checked(self, example: Example) -> dict[str, Any]:
        """Returns the values of features; BadRecordError if they are not those declared."""
        features, name = example.features, example.key
        if features.keys() != self._names:
            raise BadRecordError(
                name, f"has the features {sorted(features)}, the source declares {sorted(self._names)}"
            )
        return {feature.name: _checked(feature, features[feature.name], name) for feature in self._features}


def _checked(feature: Feature, value: Any, name: str) -> Any:
    if feature.shape:
        if not isinstance(value, list) or len(value) != feature.shape[0]:
            raise BadRecordError(
                name, f"feature {feature.name!r} is {reprlib.repr(value)}, not a list of {feature.shape[0]}"
            )
        return [_checked(Feature(feature.name, feature.dtype), item, name) for item in value]
    try:  # a number that fits its type, a text without lone surrogates
        fits = isinstance(value, _TYPES[feature.dtype]) and not isinstance(value, bool)
        if isinstance(value, str) and fits:
            return value.encode("utf-8", "surrogateescape")
        _FITTING[feature.dtype].pack(value)
    except (KeyError, OverflowError, struct.error, UnicodeEncodeError):
        fits = False
    if not fits:
        raise BadRecordError(name, f"feature {feature.name!r} is {value!r}, not {feature.dtype}")
    return float(value) if feature.dtype == "float32" else value


def _array(feature: Feature, values: Sequence[Any]) -> Any:
    import pyarrow as pa

    kinds = {"int64": pa.int64(), "float32": pa.float64(), "string": pa.binary()}
    kind = kinds[feature.dtype]
    return pa.array(values, pa.list_(kind, feature.shape[0]) if feature.shape else kind)


def _kept(image: Any, name: str) -> Any:
    """Returns an image in memory as bytes of its own, any other unchanged."""
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    return encode_pixels(image, name) if hasattr(image, "dtype") else image


def _check_example(found: Any) -> Example:
    """Returns an example with a key and a split that it may have."""
    if type(found) is not Example:
        if isinstance(found, BadExample):
            raise BadRecordError(found.name, found.reason)
        raise SourceError(
            f"the source yields a {type(found).__name__}, not an Example "
            "(shardline.components.preprocess.sources.example)"
        )
    if type(found.key) is not str or not found.key:
        raise SourceError(f"key {found.key!r} of an example is not a text of at least one character")
    if found.split not in SOURCE_SPLITS:
        raise SourceError(
            f"split {found.split!r} of {found.key!r} is unknown; known: {', '.join(SPLITS)}, None"
        )
    return found


def _store(label: Label, value: Any, name: str) -> Any:
    """Returns the value of a label as it is stored; BadRecordError for an invalid one."""
    outputs = label.outputs
    if label.kind == CLASS:
        if type(value) is not int and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise BadRecordError(name, f"label {label.name!r} is {short(value)}, not the index of a class")
        index = operator.index(value)
        if not 0 <= index < len(outputs):
            raise BadRecordError(name, f"label {label.name!r} is {index}, out of range 0..{len(outputs) - 1}")
        return index
    is_list = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
    if label.kind == REGRESSION:
        values = value if is_list else [value]
        if len(values) != len(outputs):
            raise BadRecordError(name, f"has {len(values)} numbers for {len(outputs)}")
        numbers = [_number(number, output, name) for number, output in zip(values, outputs, strict=True)]
        return numbers if label.feature.shape else numbers[0]
    if not is_list and not isinstance(value, set | frozenset):
        raise BadRecordError(name, f"label {label.name!r} is {short(value)}, not a list of names")
    if all(isinstance(item, str) for item in value):
        if unknown := [item for item in value if item not in outputs]:
            raise BadRecordError(name, f"label {label.name!r} has {unknown[0]!r}, which is none of its names")
        chosen = set(value)
        return [int(output in chosen) for output in outputs]
    if len(value) != len(outputs) or any(item not in (0, 1) for item in value):
        raise BadRecordError(
            name, f"label {label.name!r} is {short(value)}, not a 0 or 1 for each of its names"
        )
    return list(map(int, value))


def _number(value: Any, output: str, name: str) -> float:
    if isinstance(value, str | bytes | bool) or value is None:
        raise BadRecordError(name, f"{output!r} is {short(value)}, not a number")
    number = float(np.float32(value)) if abs(float(value)) <= LARGEST_FLOAT else math.inf
    if not math.isfinite(number):
        raise BadRecordError(name, f"{output!r} is {short(value)}, not a finite number")
    return number
