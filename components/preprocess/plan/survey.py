"""Survey: the only pass over a source, which checks and records each example, and locates its image.

Checked are the source's declarations, each example that it yields, and the labels of all of them. Examples
that cannot be used end the run or, with on_bad_record="skip", are left out and named in a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import operator
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from shardline.components.preprocess.example import OWN_FEATURES, FeatureEntries, entries
from shardline.components.preprocess.plan import records
from shardline.components.preprocess.plan.image_locations import ImageLocator
from shardline.components.preprocess.plan.plan import Plan, Survey
from shardline.components.preprocess.plan.records import HEAD, SOURCE_SPLITS, Records, SplitCodes, digests
from shardline.components.preprocess.schema.anomalies import SchemaCheck
from shardline.components.preprocess.schema.labels import LARGEST_FLOAT, check_malformed_values
from shardline.components.preprocess.schema.schema import read as read_schema
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.example import BadExample, Example, Source, Span, prefetched
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.text import enumerate_names
from shardline.trainer.base import plugins
from shardline.trainer.base.deserialize import did_you_mean
from shardline.trainer.base.errors import BadRecordError, SourceError, printable
from shardline.trainer.base.progress import Meter, report
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
    if split not in SOURCE_SPLITS:
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


#: Examples that are checked together, at most; progress is reported once for so many.
_TICK = 512

# Bytes of images that are held until they are hashed, about.
_HELD_BYTES = 4 << 20

# Types of images that are not in memory.
_FILE_IMAGES = frozenset({Span, NoneType, type(Path())})


class Rejected:
    """Bad examples: with the policy "fail" an error; with "skip" named in a file and counted in `reasons`."""

    def __init__(self, policy: str) -> None:
        self._policy, self._lines = policy, list[str]()
        self.reasons = Counter[str]()

    def add(self, error: BadRecordError) -> None:
        """Leaves an example out; under the policy "fail", raises its error."""
        if self._policy == "fail":
            skip = "leave such examples out: --on-bad-record skip (on_bad_record in a pipeline)"
            raise BadRecordError(error.name, f"{error.reason}; correct it, or {skip}")
        self.reasons[error.reason] += 1
        self._lines.append(json.dumps({"file": error.name, "reason": error.reason}) + "\n")

    def write(self, path: Path) -> None:
        """Writes the names, sorted: the order of a stream of rows differs from run to run."""
        if self._lines:
            path.write_text("".join(sorted(self._lines)))

    def check(self, records_in: int, largest_fraction: float) -> None:
        """Raises SourceError if too many were left out, with the most frequent reason and an example."""
        total = self.reasons.total()
        if total <= largest_fraction * records_in:
            return
        reason, count = self.reasons.most_common(1)[0]
        name = next(found["file"] for found in map(json.loads, self._lines) if found["reason"] == reason)
        raise SourceError(
            f"{total:,} of {records_in:,} examples cannot be used, more than max_bad_fraction "
            f"{largest_fraction:g} allows; {count:,} of them: {reason} ({name!r})"
        )


def survey(settings: PreprocessSettings, work: WorkDirectory, rejected: Rejected) -> Survey:
    """Reads the source once; images that are files, or in files, only position their content is the key.

    Raises SourceError for a source without examples or with fewer than two classes, and for invalid examples.
    """
    surveyed, schema = time.time_ns(), read_schema(settings.schema) if settings.schema else None
    source = open_source(settings, schema)
    with plugins.calling("the source failed", SourceError):
        labels, features = check_labels(source), check_features(source)
        length = operator.length_hint(source, 0)
    if settings.stratify:
        check_stratified(labels, ())
    by_content = settings.key == "content"
    prefetch = by_content or settings.on_bad_record == "skip"
    numbers_copies = bool(getattr(source, "numbers_copies", False))
    check = None
    if schema:
        integer_texts = getattr(source, "integer_texts", ())
        check = SchemaCheck(schema, features, labels, settings.label_column, integer_texts)
    with (
        contextlib.closing(ImageLocator(work.spool)) as images,
        work.keys.open("wb") if by_content and not numbers_copies else contextlib.nullcontext() as keys,
    ):
        buckets = records.Buckets(work.buckets)
        has_keys = by_content or getattr(source, "has_keys", True)  # a position may be another's tomorrow
        builder = _RecordBuilder(settings, labels, features, images, buckets, keys, rejected, check, has_keys)
        meter = Meter("read", length)
        for columns in builder.columns(_examples(source, prefetch=prefetch)):
            builder.add(columns)
            meter.advance(len(columns.keys))
    check_malformed_values(getattr(source, "malformed", ()), settings.group)
    builder.check()
    plan = Plan(
        settings=settings,
        labels=labels,
        features=features,
        places=tuple(images.locations),
        surveyed=surveyed,
        records_in=int(builder.counts.sum()) + rejected.reasons.total(),
        schema=schema.digest if schema else "",
        anomalies=check.anomalies() if check else (),
    )
    return Survey(plan, buckets, builder.counts.tolist(), frozenset(builder.existing), numbers_copies)


def _stored_columns(
    labels: Sequence[Label], features: Sequence[Feature], targets: Sequence[Any], values: Sequence[Any]
) -> dict[str, Any]:
    """Returns rows as columns, until sources yield columns themselves."""
    import pyarrow as pa

    rows = {feature: [row[feature.name] for row in values] for feature in features}
    for label in labels:
        own = [row[label.name] if len(labels) > 1 else row for row in targets]
        rows[label.feature] = [
            stored if label.feature.shape else stored[0] for stored in (_store(label, one, "") for one in own)
        ]
    columns = {}
    for feature, column in rows.items():
        if feature.dtype == "string":
            array = pa.array([text for row in column for text in (row if feature.shape else [row])])
        else:
            array = pa.array(np.asarray(column, np.int64 if feature.dtype == "int64" else np.float64).ravel())
        width = math.prod(side or 0 for side in feature.shape)
        columns[feature.name] = pa.FixedSizeListArray.from_arrays(array, width) if feature.shape else array
    return columns


class _SurveyColumns(NamedTuple):
    """Facts about some examples, as columns.

    Positions of images are as in `ImagePosition`. `extras` are other features, `identities` what is hashed.
    """

    keys: Sequence[bytes]
    labels: Sequence[int]
    splits: Sequence[str | None]
    locations: Sequence[int]
    offsets: Sequence[int]
    lengths: Sequence[int]
    paths: Sequence[bytes]
    checksums: Sequence[int]
    extras: Sequence[bytes]
    identities: Sequence[bytes]
    groups: Sequence[bytes]


@dataclass
class _RecordBuilder:
    """Builds records of the examples of a source, and counts them.

    Images in memory are copied as soon as the source yields them, since it may reuse that memory; others are
    read by the hundred.

    Attributes:
        existing: Splits that the source assigns, None among them for examples without one.
        counts: Number of examples by split code.
    """

    settings: PreprocessSettings
    labels: Sequence[Label]
    features: Sequence[Feature]
    images: ImageLocator
    buckets: records.Buckets
    keys: BinaryIO | None
    rejected: Rejected
    schema: SchemaCheck | None
    has_keys: bool

    def __post_init__(self) -> None:
        self._group = check_group(self.settings.group, self.features)
        self._entries = FeatureEntries(self.features, self.labels)
        # Labels other than one class, which are stored as features are.
        self._targets = None if is_class(self.labels) else Targets(self.labels)
        self._classes = len(self.labels[0].outputs) if is_class(self.labels) else None
        self._by_content = self.settings.key == "content"
        self._seen = np.zeros(max(len(label.outputs) for label in self.labels), bool)
        self._groups = set[bytes]()  # up to two of them, or a few more
        self._codes = SplitCodes(self.settings.split)
        self._unchecked: list[tuple[Any, ...]] = []  # waiting for the check of the schema
        self.counts = np.zeros(self._codes.count, np.int64)
        self.existing = set[str | None]()

    def columns(self, examples: Iterator[Example | BadExample]) -> Iterator[_SurveyColumns]:
        """Yields the examples that can be used."""
        found: list[tuple[Any, ...]] = []
        together, held = 1, 0
        while batch := list(islice(examples, together)):
            kinds = {type(getattr(example, "image", None)) for example in batch}
            together = 1 if self._by_content or not kinds <= _FILE_IMAGES else _TICK
            for example in batch:
                try:
                    found.append(self._row(example))
                    held += len(found[-1][-2])
                except BadRecordError as error:
                    self.rejected.add(error)
            if len(found) >= _TICK or held > _HELD_BYTES:
                yield self._transposed(found)
                found, held = [], 0
        if found:
            yield self._transposed(found)

    def _row(self, example: Any) -> tuple[Any, ...]:
        name, target, image, split, values = check_example(example, self._classes)
        label, targets = self._targets.serialize(target, name) if self._targets else (target, b"")
        self.existing.add(split)
        try:
            key = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise SourceError(f"key {name!r} of an example cannot be encoded as UTF-8") from None
        position = self.images.locate(image, name)
        extra = targets + (self._entries.serialize(values, name) if self.features or values else b"")
        identity = self.images.content(position, key) + extra if self._by_content else key
        group = example_group(values, self._group, name) if self._group else b""
        if self.schema:
            self._unchecked.append((name, target, values))
        return (key, label, split, *position, extra, identity, group)

    def _transposed(self, found: Sequence[tuple[Any, ...]]) -> _SurveyColumns:
        if self.schema:
            keys, targets, values = zip(*self._unchecked, strict=True)
            self.schema.add(keys, _stored_columns(self.labels, self.features, targets, values))
            self._unchecked = []
        return _SurveyColumns(*zip(*found, strict=True))

    def add(self, columns: _SurveyColumns) -> None:
        """Adds the records of some examples."""
        heads = np.zeros(len(columns.keys), HEAD)
        for name in ("label", "location", "offset", "length", "checksum"):
            heads[name] = getattr(columns, f"{name}s")
        seed, salt = self.settings.seed, self.settings.split_salt
        found = {number: digests(columns.identities, number) for number in {0, seed, salt}}
        heads["order"], heads["order_low"] = found[seed]
        points = digests(columns.groups, salt)[1] if self._group else found[salt][1]
        heads["code"] = self._codes.codes(points, columns.splits)
        heads["key_hash"] = found[0][1] if self.has_keys else 0
        self._groups.update(columns.groups if self._group and len(self._groups) < 2 else ())
        if self.keys:  # equal keys are not found by the digests
            self.keys.write(digests(columns.keys, 0)[1].tobytes())
        texts = columns.keys
        heads["keys"] = list(map(len, columns.keys))
        for name, values in (("paths", columns.paths), ("features", columns.extras)):
            if any(values):
                heads[name] = list(map(len, values))
                texts = list(map(operator.add, texts, values))
        self._seen[heads["label"]] = True
        self.counts += np.bincount(heads["code"], minlength=len(self.counts))
        self.buckets.append(Records(heads, texts))

    def check(self) -> None:
        """Refuses examples that together make no dataset."""
        count = int(self.counts.sum())
        if not count + self.rejected.reasons.total():
            raise SourceError("the source is empty: it has no example")
        if len(self._groups) == 1:
            raise SourceError(
                f"all {count:,} examples are of one group of {self._group!r}: no split can be made of it"
            )
        if self._targets:
            self._targets.check(count)
        elif self._seen.sum() == 1:
            name = self.labels[0].outputs[int(self._seen.argmax())]
            raise SourceError(f"all {count:,} examples are of one class, {name!r}; add examples of another")
        if self.settings.stratify:
            check_stratified(self.labels, self.existing)


def _examples(source: Source, *, prefetch: bool) -> Iterator[Example | BadExample]:
    """Yields the examples; an exception of a user's own source becomes one line with its location.

    `prefetch`: whether remote images are read here, since they will be needed more than once.
    """
    with plugins.calling("the source failed", SourceError):
        yield from prefetched(source) if prefetch else source
