"""Manifest of a dataset directory: features, labels, splits and shards; and the facts for a model function.

A dataset directory holds `{split}-{i:05d}-of-{n:05d}.tfrecord` files of tf.train.Example and one
`manifest.json`, written last. Readers take the files from the manifest, never from a glob. Preprocessing
(with numbers) and the exported model (with tensors) share `compute_placement`, and so crop and resize an
image alike to the pixel. Loads neither TensorFlow nor Keras.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from shardline.trainer.base import deserialize, files
from shardline.trainer.base.errors import DatasetError, ModelError, RunError
from shardline.trainer.sharding import stream_count

MANIFEST_FILE = "manifest.json"
KEYS_FILE = "examples.keys"
FORMAT = "shardline.dataset"
FORMAT_VERSION = 3
SPLITS = ("train", "validation", "test")

#: Bytes for each example in the file of keys.
KEY_BYTES = 8

#: Column types in settings, and the stored type of each.
COLUMN_TYPES: Mapping[str, str] = {
    "text": "string", "integer": "int64", "number": "float32", "day-first": "time", "month-first": "time"
}  # fmt: skip

#: Kinds of labels: one class; any number of classes; one or several numbers.
CLASS, MULTILABEL, REGRESSION = LABEL_KINDS = ("class", "multilabel", "regression")

#: Name of the only label of a dataset, and of its feature.
LABEL = "label"

#: Features with the value by which a time split ordered the examples -> their units in a second or, for a
#: column of numbers, in 1: microseconds since 1970 in UTC, whole numbers, and millionths.
SPLIT_TIME_FEATURES = {"split_time_us": 1_000_000, "split_number": 1, "split_number_millionths": 1_000_000}

#: Value of a column: int64, float32, or text (stored as UTF-8).
Scalar = int | float | str


@dataclass(frozen=True)
class Feature:
    """One feature of every tf.train.Example.

    Attributes:
        name: Key in the Example: "image", "label", "key".
        dtype: Type of the value after decoding: "uint8", "int64", "string".
        shape: Shape of the value after decoding; (height, width, channels) for an image, () for a scalar. A
            height or width of None differs from example to example.
        encoding: How the bytes are stored: "png" or "jpeg" (both for a mixture: "image"), "raw" (the uint8
            values themselves, row by row), "" for a column.
        resize: How the image was resized to its shape, which serving repeats, always with antialiasing:
            "crop" (shorter side fitted, then centre-cropped), "pad" (longer side fitted, then padded with
            black on both sides), "stretch" (both sides fitted), or "" (stored as the source had it).
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    encoding: str = ""
    resize: str = ""


@dataclass(frozen=True)
class Label:
    """What is to be predicted of every example.

    Attributes:
        name: Name of its feature: "label" if it is the only one, else also the name of the model's output.
        kind: "class", one of `outputs`, stored as its index, int64 (); "multilabel", any of `outputs`, stored
            as 0 or 1 for each, int64 (outputs,); "regression", a number for each of `outputs`, stored as
            float32 () for one, (outputs,) for several.
        outputs: Names of the classes, or of the numbers.
        units: Unit of each number, "" if unknown; () for classes.
    """

    name: str
    kind: str
    outputs: tuple[str, ...]
    units: tuple[str, ...] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; () for numbers."""
        return () if self.kind == REGRESSION else self.outputs

    @property
    def feature(self) -> Feature:
        """Feature in which it is stored."""
        single = self.kind == CLASS or (self.kind == REGRESSION and len(self.outputs) == 1)
        dtype = "float32" if self.kind == REGRESSION else "int64"
        return Feature(self.name, dtype, () if single else (len(self.outputs),))

    @property
    def fault(self) -> str:
        """What is invalid about it; "" if nothing is."""
        count = len(self.outputs)
        if self.kind not in LABEL_KINDS:
            return f"label {self.name!r} is of the unknown kind {self.kind!r}"
        if count < (2 if self.kind == CLASS else 1) or len(set(self.outputs)) != count:
            return f"label {self.name!r} has too few classes or numbers, or two of one name"
        if len(self.units) not in (0, len(self.outputs)) or (self.units and self.kind != REGRESSION):
            return f"label {self.name!r} has {len(self.units)} units"
        return ""


def is_class(labels: Sequence[Label]) -> bool:
    """Returns whether there is one label, of kind class."""
    return [label.kind for label in labels] == [CLASS]


@dataclass(frozen=True)
class Spread:
    """Values of a number over some examples: smallest, largest, mean, and standard deviation of all."""

    least: float
    largest: float
    mean: float
    deviation: float


@dataclass(frozen=True)
class Tally:
    """Statistics of a label over the examples of a split.

    Attributes:
        counts: Examples of each class, or with each output of a multilabel; () for numbers.
        spreads: Values of each number; () for classes.
    """

    counts: tuple[int, ...] = ()
    spreads: tuple[Spread, ...] = ()

    @classmethod
    def merge(cls, parts: Sequence[tuple[int, Tally]]) -> Tally:
        """Returns the statistics over parts of a dataset, each with its number of examples, from 1."""
        numbers = zip(*(tally.spreads for _, tally in parts), strict=True)
        records = [count for count, _ in parts]
        return cls(
            tuple(map(sum, zip(*(tally.counts for _, tally in parts), strict=True))),
            tuple(_merge_spreads(list(zip(records, spreads, strict=True))) for spreads in numbers),
        )


def _merge_spreads(parts: Sequence[tuple[int, Spread]]) -> Spread:
    total = sum(count for count, _ in parts)
    mean = math.fsum(count * part.mean for count, part in parts) / total
    squares = math.fsum(count * (part.deviation**2 + (part.mean - mean) ** 2) for count, part in parts)
    least, largest = min(part.least for _, part in parts), max(part.largest for _, part in parts)
    return Spread(least, largest, mean, math.sqrt(squares / total))


def find_constant(
    labels: Sequence[Label], tallies: Mapping[str, Tally], trained: Mapping[str, Tally], records: int
) -> Iterator[str]:
    """Yields why a split of `records` examples cannot evaluate a model, for each label that does not vary.

    Fewer than two of the classes of training occur in it, or all examples have the same labels or numbers: a
    model with a constant prediction would be right on all of them.
    """
    for label in labels:
        tally, before = tallies[label.name], trained[label.name]
        of = f" of label {label.name!r}" if len(labels) > 1 else ""
        counts = zip(label.class_names, tally.counts, before.counts, strict=True)
        known = [name for name, now, then in counts if now and then] if label.kind == CLASS else []
        same = all(spread.least == spread.largest for spread in tally.spreads)
        if label.kind == CLASS and len(known) < 2:
            yield f"has no class{of}{f' but {known[0]!r}' if known else ''} that training has"
        elif label.kind != CLASS and same and set(tally.counts) <= {0, records}:
            yield f"has the same {'numbers' if tally.spreads else 'labels'}{of} in all examples"


@dataclass(frozen=True)
class Anomaly:
    """Mismatch of a source and its schema.

    Attributes:
        column: Name of a feature or label.
        problem: "type", "required", "missing values", "missing column", "new column", or the violated
            constraint by its name in Table Schema.
        expected: Description of what was expected.
        examples: Number of examples that have something else; 0 for a column as a whole.
        of: Number of examples that were checked.
        key: Key of the first such example.
        value: Beginning of its value, as Python writes it; "" if it has none.
    """

    column: str
    problem: str
    expected: str
    examples: int = 0
    of: int = 0
    key: str = ""
    value: str = ""

    @property
    def blocks(self) -> bool:
        """Whether it ends a run with `on_anomaly` "fail"; a new column does not."""
        return self.problem != "new column"

    def __str__(self) -> str:
        """Returns it as one line."""
        if not self.examples:
            return f"column {self.column!r}: {self.expected}"
        verb = "has" if self.examples == 1 else "have"
        found, value = ("something else", f" with {self.value}") if self.value else ("none", "")
        return (
            f"column {self.column!r}: expected {self.expected}; {self.examples:,} of {self.of:,} examples "
            f"{verb} {found}, first {self.key!r}{value}"
        )


#: Factors by which JPEG decoders can shrink an image while they decode it.
REDUCTIONS = (2, 4, 8)


class Placement(NamedTuple):
    """Used part of an image and its position in the target, in pixels: ints, or int32 tensors.

    Attributes:
        top, left, height, width: Used part of the image: multiples of `reduction`.
        reduction: Factor, 1, 2, 4 or 8, by which the part may be shrunk before it is resized.
        fitted_height, fitted_width: Size to which the part is resized.
        pad_top, pad_left: Rows and columns of black before it in the target.
    """

    top: Any
    left: Any
    height: Any
    width: Any
    reduction: Any
    fitted_height: Any
    fitted_width: Any
    pad_top: Any
    pad_left: Any


def compute_placement(
    height: Any,
    width: Any,
    target: tuple[int, int],
    mode: str,
    *,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> Placement:
    """Computes how an image is fitted into a target.

    The used part is centred. Its sides and corner are rounded down to multiples of the reduction, so that a
    JPEG can be shrunk while it is decoded. Modes are "crop" (the target is covered), "pad" (the whole image
    fits into it) and "stretch". Height and width of the image are ints, or scalar int32 tensors, with the
    `minimum` and `maximum` of two such numbers.
    """
    used, fitted = [height, width], list(target)
    if mode == "crop":
        used[0] = minimum(height, maximum(1, width * target[0] // target[1]))
        used[1] = minimum(width, maximum(1, height * target[1] // target[0]))
    elif mode == "pad":  # rounded to the nearest
        fitted[0] = minimum(target[0], maximum(1, (2 * height * target[1] + width) // (2 * width)))
        fitted[1] = minimum(target[1], maximum(1, (2 * width * target[0] + height) // (2 * height)))
    # At least 1.5 times the target is left, enough for the reduction not to be visible.
    ratio = minimum(2 * used[0] // (3 * fitted[0]), 2 * used[1] // (3 * fitted[1]))
    reduction = 1
    for step in REDUCTIONS:  # doubled with each of them that the ratio reaches
        reduction += minimum(1, ratio // step) * (step // 2)
    used = [side // reduction * reduction for side in used]
    return Placement(
        top=(height - used[0]) // 2 // reduction * reduction,
        left=(width - used[1]) // 2 // reduction * reduction,
        height=used[0],
        width=used[1],
        reduction=reduction,
        fitted_height=fitted[0],
        fitted_width=fitted[1],
        pad_top=(target[0] - fitted[0]) // 2,
        pad_left=(target[1] - fitted[1]) // 2,
    )


@dataclass(frozen=True)
class Shard:
    """One TFRecord file of a split: name, examples, size in bytes, and checksum in eight hex digits."""

    file: str
    records: int
    bytes: int
    crc32c: str


@dataclass(frozen=True)
class Split:
    """One split of a dataset.

    Attributes:
        shards: Shards in order. They differ by at most one record, the longer ones first.
        labels: Statistics of each label, by its name.
    """

    shards: tuple[Shard, ...]
    labels: Mapping[str, Tally]

    @property
    def records(self) -> int:
        """Number of examples in the split."""
        return sum(shard.records for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Size of the split's shards."""
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class Duplicates:
    """Examples whose stored content is the same to the byte.

    Attributes:
        examples: Number of examples that repeat an earlier one.
        straddling: Number of groups of equal examples in more than one split (leakage); 0 if `by_chance`.
        named: Keys of the first such groups, each as "split: key".
        by_chance: Whether chance makes rows of this table equal, as no column has many values.
    """

    examples: int = 0
    straddling: int = 0
    named: tuple[tuple[str, ...], ...] = ()
    by_chance: bool = False


@dataclass(frozen=True)
class DatasetInfo:
    """Facts about a dataset, passed to a model function.

    Attributes:
        input_shape: (height, width, channels) of the decoded uint8 image, values 0..255; () for a table.
        inputs: Inputs of the model, by name: the image alone, or the columns of a table.
        labels: Labels to predict, by name. If there are several, targets and outputs of the model are dicts
            of these names.
        features: All features of an example, by name.
        records: Number of examples by split.
        train: Statistics of each label in the training split, by its name.
        reader: Reads training examples, for `training_examples`; None if only the manifest is known.
    """

    input_shape: tuple[int, ...]
    labels: Mapping[str, Label]
    features: Mapping[str, Feature]
    records: Mapping[str, int]
    inputs: Mapping[str, Feature]
    train: Mapping[str, Tally] = field(default_factory=dict)
    reader: Callable[[Sequence[str], int | None], Mapping[str, Any]] | None = None

    @property
    def is_table(self) -> bool:
        """Whether a model takes a dict of columns, not an image."""
        return not self.input_shape

    def training_examples(
        self, columns: Sequence[str] = (), limit: int | None = 100_000
    ) -> Mapping[str, Any]:
        """Returns examples of the training split, for example to adapt layers.

        They are the same on every replica and in every resumed run: the first of the split, which
        preprocessing has shuffled.

        Args:
            columns: Names of inputs, "image" for images; () for all.
            limit: Number of examples, at most; None for all. They are held in memory.

        Returns:
            A NumPy array of each input, (examples,) or uint8 (examples, height, width, channels), by name.
            Texts are bytes, a missing number is NaN, a missing text is empty.
        """
        if self.reader is None:
            raise ModelError(
                "only the manifest of the dataset is known, not its examples; "
                "shardline.trainer.data.describe_dataset(DIRECTORY) returns a description that has them"
            )
        return self.reader(columns, limit)

    @property
    def label(self) -> Label:
        """The only label; a ModelError if there are several."""
        if len(self.labels) != 1:
            raise ModelError(
                f"the dataset has {len(self.labels)} labels, {', '.join(self.labels)}, and this model has "
                "one output; take a model with an output for each, such as mlp, or preprocess one label alone"
            )
        return next(iter(self.labels.values()))

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class of the only label; () for numbers."""
        return self.label.class_names

    @property
    def num_classes(self) -> int:
        """Number of classes of the only label, whose indices are 0..num_classes-1; 0 for numbers."""
        return len(self.class_names)


@dataclass(frozen=True)
class Manifest:
    """Everything known about a dataset directory.

    Attributes:
        fingerprint: "sha256:..." over content and settings alone.
        source: The source as it was named.
        settings: Settings of the preprocessing (seed, split, image size, ...).
        labels: Labels to predict.
        features: All features of an example.
        splits: Splits that have examples, by name.
        records_in: Number of examples of the source: those in the splits and those rejected.
        rejected: Number of examples left out, by reason; rejected.jsonl next to the manifest lists them.
        converted: Number of images that were converted when they were stored, or are when they are decoded,
            by reason ("exif orientation", "cmyk", "alpha", "16 bit", "animation", ...).
        duplicates: Examples with equal content.
        keys: File with a hash of each example's key, `KEY_BYTES` long, in the order of the shards; None if
            the source has no keys.
        anomalies: Mismatches with the schema, if there is one and `on_anomaly` is "warn".
    """

    fingerprint: str
    source: str
    settings: Mapping[str, Any]
    labels: tuple[Label, ...]
    features: tuple[Feature, ...]
    splits: Mapping[str, Split]
    records_in: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    converted: Mapping[str, int] = field(default_factory=dict)
    duplicates: Duplicates = Duplicates()
    keys: Shard | None = None
    anomalies: tuple[Anomaly, ...] = ()

    @property
    def records(self) -> int:
        """Number of examples in all splits."""
        return sum(split.records for split in self.splits.values())

    @property
    def shards(self) -> list[Shard]:
        """The shards of all splits, in order."""
        return [shard for split in self.splits.values() for shard in split.shards]

    def streams(self, split: str) -> int:
        """Returns the number of streams in which a split's shards are read."""
        readers = self.settings.get("readers")
        return stream_count(len(self.splits[split].shards), readers if isinstance(readers, int) else 1)

    @property
    def files(self) -> list[Shard]:
        """The shards and the file of keys."""
        return [*self.shards, *([self.keys] if self.keys else [])]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class of the only label, by index; () for numbers, and for several labels."""
        return self.labels[0].class_names if len(self.labels) == 1 else ()

    @property
    def has_copies(self) -> bool:
        """Whether equal examples are copies of one, rather than independent rows of a table of few values."""
        return not self.duplicates.by_chance or self.settings.get("key") == "content"

    @property
    def is_classes(self) -> bool:
        """Whether there is one label, of kind class."""
        return is_class(self.labels)

    @property
    def columns(self) -> tuple[Feature, ...]:
        """All features except the image, the labels and the key."""
        others = {"image", "key", *(label.name for label in self.labels)}
        return tuple(feature for feature in self.features if feature.name not in others)

    @property
    def group(self) -> str:
        """The column whose equal values are kept in one split, no input of a model; "" for none."""
        return str(self.settings.get("group") or "")

    @cached_property
    def time_feature(self) -> str:
        """The feature of `SPLIT_TIME_FEATURES` by which examples were split; "" without a time split."""
        names = [feature.name for feature in self.features if feature.name in SPLIT_TIME_FEATURES]
        return names[0] if names and self.settings.get("split_by_time") else ""

    @property
    def split_column(self) -> str:
        """The column of the source whose groups, or times, decide the split; "" without one."""
        return self.group or str(self.settings.get("split_by_time") or "")

    @cached_property
    def split_columns(self) -> frozenset[str]:
        """Columns that only decide the split: excluded from inputs, slices and drift."""
        return frozenset({self.group, self.time_feature})

    @property
    def image(self) -> Feature:
        """The image feature; a DatasetError if there is none."""
        if "image" not in self.inputs:
            raise DatasetError("the dataset is a table: it has no feature 'image'; use a dataset of images")
        return self.inputs["image"]

    @cached_property
    def inputs(self) -> Mapping[str, Feature]:
        """Inputs of a model, by name: the image alone, else all columns; a DatasetError without either."""
        if images := {feature.name: feature for feature in self.features if feature.name == "image"}:
            return images
        columns = {
            feature.name: feature for feature in self.columns if feature.name not in self.split_columns
        }
        if not columns:
            raise DatasetError("the examples have neither an image nor columns that a model could take")
        return columns

    def find_constant(self, name: str) -> list[str]:
        """Returns why a split, if it exists, cannot evaluate a model, as `find_constant` does."""
        if (split := self.splits.get(name)) is None:
            return []
        trained = self.splits.get("train", split).labels
        reasons = find_constant(self.labels, split.labels, trained, split.records)
        return [f"the {name} split {reason}" for reason in reasons]

    def info(self) -> DatasetInfo:
        """Returns the facts for a model function; a DatasetError if images differ in size, or as `inputs`."""
        inputs = self.inputs
        shape = tuple(size for size in inputs["image"].shape if size is not None) if "image" in inputs else ()
        if "image" in inputs and len(shape) != 3:
            raise DatasetError("the images differ in size and cannot be batched; preprocess with image_size")
        for name, feature in inputs.items():
            if None in feature.shape:
                raise DatasetError(
                    f"column {name!r} has values of shape {feature.shape}, and a model takes one value of "
                    "each column, or a vector of one length"
                )
        return DatasetInfo(
            input_shape=shape,
            inputs=inputs,
            labels={label.name: label for label in self.labels},
            features={feature.name: feature for feature in self.features},
            records={name: split.records for name, split in self.splits.items()},
            train=self.splits["train"].labels if "train" in self.splits else {},
        )


def save(manifest: Manifest, directory: Path) -> None:
    """Writes manifest.json atomically; it must be the last file written into the directory."""
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)}
    files.write_json(directory / MANIFEST_FILE, content | {"digest": _digest(content)})


def _digest(content: Mapping[str, Any]) -> str:
    """Returns the hash of all that a manifest says, in any order."""
    text = json.dumps({key: content[key] for key in content if key != "digest"}, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def load(directory: Path) -> Manifest:
    """Reads a dataset directory's manifest.

    Raises DatasetError if it is missing, damaged, changed since it was written, of another format, or names a
    shard outside the directory.
    """
    path, again = directory / MANIFEST_FILE, "preprocess the data again"
    try:
        content = files.read_json(path, DatasetError)
    except DatasetError as error:
        if isinstance(error.__context__, FileNotFoundError):
            raise DatasetError(
                f"no {MANIFEST_FILE} in {directory}: not a dataset, or one whose preprocessing did not "
                "finish; write one with 'shardline preprocess SOURCE OUT'"
            ) from None
        raise DatasetError(f"{error}; {again}") from None
    if content.get("format") != FORMAT:
        raise DatasetError(f"{path} is not a Shardline manifest (no format {FORMAT!r})")
    if (version := content.get("format_version")) != FORMAT_VERSION:
        versions = f"format_version {reprlib.repr(version)}, this release reads {FORMAT_VERSION}"
        raise DatasetError(f"{path} has {versions}; {again}")
    if content.get("digest") != _digest(content):
        raise DatasetError(f"{path} was changed after it was written, by its digest; {again}")
    manifest = deserialize.restore(Manifest, content, str(path), DatasetError, again)
    for name in (shard.file for shard in manifest.files):
        if name != Path(name).name or name in ("", "..") or "\0" in name:
            raise DatasetError(f"{path} names a shard outside the directory: {name!r}; {again}")
    return manifest


def load_whole(directory: Path) -> Manifest:
    """Reads a manifest and checks its files; raises as `load` and `check_files` do."""
    manifest = load(directory)
    check_files(directory, manifest.files)
    return manifest


def check_files(directory: Path, shards: Iterable[Shard]) -> None:
    """Checks existence and size of a dataset's files; a DatasetError names the first that is wrong."""
    with contextlib.suppress(OSError):
        os.listdir(directory)  # gets all sizes of a mounted bucket at once, instead of a request for each
    for shard in shards:
        path = directory / shard.file
        try:
            size = path.stat().st_size
        except OSError as error:
            if files.cannot_read_now(error):
                raise RunError(f"cannot read {path}: {error.strerror}") from None
            raise DatasetError(f"cannot read {path}: {error.strerror}; preprocess the data again") from None
        if size != shard.bytes:
            raise DatasetError(
                f"{path} has {size:,} bytes, the manifest says {shard.bytes:,}: the dataset is damaged; "
                "preprocess the data again"
            )
