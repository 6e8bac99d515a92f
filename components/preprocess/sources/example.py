"""Examples, the Protocol of a source, and reading of image files.

Examples of a source of one's own are checked one by one, and become columns. Objects of a bucket are each
read in one request, many at a time where their content is needed early.
"""

from __future__ import annotations

import math
import operator
import reprlib
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from shardline.components.preprocess.lazy import np, pa
from shardline.components.preprocess.schema import LARGEST_FLOAT
from shardline.components.storage import ordered_map, read_object, resolve
from shardline.components.text import reason
from shardline.trainer.base import files
from shardline.trainer.base.errors import BadRecordError, SourceError, short
from shardline.trainer.manifest import CLASS, REGRESSION, SPLITS, Feature, Label, Scalar

if TYPE_CHECKING:
    import numpy.typing as npt


# Images of a bucket that are in memory, at most.
_TOGETHER = 256

#: Names that a source's feature cannot have.
OWN_FEATURES = frozenset({"image", "label", "key"})

# Python's types of a feature, and the form that a number must fit.
_TYPES: Mapping[str, type | tuple[type, ...]] = {"int64": int, "float32": (float, int), "string": str}
_FITTING = {"int64": struct.Struct("<q"), "float32": struct.Struct("<f")}

#: Length of a span that is a whole file of any size.
WHOLE_FILE = -1


class Span(NamedTuple):
    """Bytes inside a local file, read only when they are written.

    With the length `WHOLE_FILE`, or a lower one, it is a whole file, and faster to make than a Path. Then the
    length is ~size if a listing has the size, and the offset the generation of an object, 0 for none; the
    file that is read must match both.
    """

    file: str
    offset: int
    length: int


class Example(NamedTuple):
    """One labelled example of a source.

    Attributes:
        key: Name that is unique in the source and stays the same when the source grows: the split and
            the order of the examples follow from it.
        label: Index into the source's `class_names`. Where the source declares `labels`: for a "class" its
            index, for "multilabel" the names that it has, or 0 or 1 for each, for "regression" a number or a
            list of them; for several labels, a dict by their names.
        image: An encoded image as bytes, the path of an image file, a span of a file that holds an encoded
            image, or pixels as a uint8 array of shape (height, width, channels) with 1 or 3 channels, values
            0..255. None where the source has no images (a table). Paths and spans are read only when they
            are written: prefer them.
        split: "train", "validation" or "test" if the source has its own splits, else None.
        features: Other values by name, as the source's `features` declare them; a list for a shape (n,).
    """

    key: str
    label: Any
    image: bytes | Path | Span | npt.NDArray[np.uint8] | None = None
    split: str | None = None
    features: Mapping[str, Scalar | Sequence[Scalar]] = MappingProxyType({})


class BadExample(NamedTuple):
    """An example that cannot be used: a generator cannot continue after an error, so it yields one of these.

    Attributes:
        name: The example's key, or file and row.
        reason: Reason, without the name: the same text for the same kind of fault.
    """

    name: str
    reason: str


class Batch(NamedTuple):
    """Some examples of a source, as columns.

    Attributes:
        keys: As `Example.key`.
        columns: Arrow's arrays by the name of the label or feature, as they are stored: int64, float64 (of 32
            bits when stored), string, or lists of one size of these.
        images: As `Example.image`; empty where no example has one.
        splits: As `Example.split`; empty where no example has one.
        bad: Examples that cannot be used.
        left_out: Number of examples that are left out besides, of no split.
        rounded: Names of columns in which 32 bits make different numbers equal.
    """

    keys: Sequence[str]
    columns: Mapping[str, Any]
    images: Sequence[Any] = ()
    splits: Sequence[str | None] = ()
    bad: Sequence[BadExample] = ()
    left_out: int = 0
    rounded: Sequence[str] = ()


class Source(Protocol):
    """Labelled examples, read once from the first to the last.

    It has `class_names`, the names of at least two classes, into which a label is an index. Instead it may
    have `labels`, a sequence of `trainer.manifest.Label`, for other kinds of labels.

    A source may also have `__len__` (progress then shows how much is left), `features`, a sequence of
    `trainer.manifest.Feature` that declares every `Example.features`, and `fingerprint()`, which returns
    a text that changes whenever the examples do (a version, a time of change): without it, a scheduled run
    cannot know that nothing has changed.
    A source whose keys are positions, which may name other examples tomorrow, sets `has_keys = False`; one
    whose keys are hashes of the content, equal for copies, sets `numbers_copies = True`: the second example
    with the key k then gets k#2.
    """

    def __iter__(self) -> Iterator[Example | BadExample]:
        """Yields every example once, in any order, and a BadExample for each that cannot be used."""


def read_remote(path: str, key: str, size: int = 0, generation: int = 0) -> bytes:
    """Returns the content of an image file in a bucket, named `key` in messages.

    `size` in bytes and `generation` are those that a listing has found; 0 for unknown.

    Raises:
        BadRecordError: It cannot be read.
        SourceError: It has changed since it was surveyed, or the bucket does not answer.
    """
    try:
        data = read_object(path, size, generation)
    except FileNotFoundError:
        if generation:
            raise changed_error(key, "was replaced or removed") from None
        raise BadRecordError(key, "there is no such file (any more)") from None
    except SourceError:
        raise
    except Exception as error:
        raise BadRecordError(key, f"cannot be read ({reason(error)})") from None
    if size and len(data) != size:
        raise changed_error(key, "changed")
    return data


def examples(batches: Iterable[Batch], labels: Sequence[Label]) -> Iterator[Example | BadExample]:
    """Yields the examples of batches one by one; the labels are as they are stored."""
    for batch in batches:
        yield from batch.bad
        for index, key in enumerate(batch.keys):
            values = {name: column[index].as_py() for name, column in batch.columns.items()}
            image, split = (of[index] if of else None for of in (batch.images, batch.splits))
            targets = {label.name: values.pop(label.name) for label in labels}
            target = targets if len(targets) > 1 else targets[labels[0].name]
            yield Example(key, target, image, split, values)  # type: ignore[arg-type]


def select(batch: Batch, kept: Sequence[int]) -> Batch:
    """Returns the examples of a batch that have these numbers."""

    def chosen(values: Sequence[Any]) -> Sequence[Any]:
        return [values[number] for number in kept] if values else ()

    numbers = pa.array(kept, pa.int64())
    columns = {name: values.take(numbers) for name, values in batch.columns.items()}
    return batch._replace(
        keys=chosen(batch.keys), columns=columns, images=chosen(batch.images), splits=chosen(batch.splits)
    )


def without(batch: Batch, bad: Collection[int]) -> Batch:
    """Returns the examples of a batch that have none of these numbers."""
    return select(batch, [number for number in range(len(batch.keys)) if number not in bad]) if bad else batch


def prefetched(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yields batches, with image files of a bucket replaced by their content.

    Files that are needed twice are then read once. The first image of a batch decides for all of them.
    """
    for batch in batches:
        if not batch.images or not _remote_path(batch.images[0]):
            yield batch
            continue
        yield Batch([], {}, bad=batch.bad, left_out=batch.left_out, rounded=batch.rounded)
        for first in range(0, len(batch.keys), _TOGETHER):
            numbers = range(first, min(first + _TOGETHER, len(batch.keys)))
            yield _with_content(select(batch, numbers)._replace(bad=(), left_out=0))


def _with_content(batch: Batch) -> Batch:
    images, bad = list[Any](), dict[int, BadExample]()
    pairs = zip(batch.images, batch.keys, strict=True)
    for number, found in enumerate(ordered_map(_read_image, pairs, size=_image_size)):
        if isinstance(found, BadRecordError):
            bad[number] = BadExample(found.name, found.reason)
        elif isinstance(found, Exception):
            raise found
        images.append(found)
    return without(batch._replace(images=images), bad)._replace(bad=[*bad.values()])


def _image_size(image: Any) -> int:
    return len(image) if isinstance(image, bytes) else 0


def _read_image(image_and_key: tuple[Any, str]) -> Any:
    image, key = image_and_key
    if not (path := _remote_path(image)):
        return image
    size, generation = (~image.length, image.offset) if isinstance(image, Span) else (0, 0)
    return read_remote(path, key, size, generation)


def _remote_path(image: Any) -> str:
    """Returns the path of an image if that is a file in a bucket, else ""."""
    path = image.file if isinstance(image, Span) and image.length <= WHOLE_FILE else image
    return files.bucket_uri(resolve(str(path))) if isinstance(path, str | Path) else ""


def changed_error(name: str, how: str) -> SourceError:
    """Returns the error of a source that changed between the survey and the writing."""
    return SourceError(f"{name!r} {how} while it was read; run again when nothing writes to the source")


class ExampleColumns:
    """Collects Examples as a `Batch`; `held` are the bytes of their images and texts, about.

    An image in memory is copied as soon as it is added, since the source may reuse that memory.
    """

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
    kinds = {"int64": pa.int64(), "float32": pa.float64(), "string": pa.binary()}
    kind = kinds[feature.dtype]
    return pa.array(values, pa.list_(kind, feature.shape[0]) if feature.shape else kind)


def _kept(image: Any, name: str) -> Any:
    """Returns an image in memory as bytes of its own, any other unchanged."""
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    if not hasattr(image, "dtype"):
        return image
    from shardline.components.preprocess.images import encode_pixels

    return encode_pixels(image, name)


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
    if found.split not in (None, *SPLITS):
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
