"""Manifest of a dataset directory, and the `DatasetInfo` that a model function gets of it.

A dataset directory holds `{split}-{i:05d}-of-{n:05d}.tfrecord` files of tf.train.Example and one
`manifest.json`, written last. Readers take the files from the manifest, never from a glob. Loads neither
TensorFlow nor Keras.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardline.trainer.base import deserialize, files
from shardline.trainer.base.errors import DatasetError, ModelError, RunError
from shardline.trainer.data.features import (
    SPLIT_TIME_FEATURES,
    Anomaly,
    Feature,
    Label,
    Tally,
    find_constant,
    is_class,
)
from shardline.trainer.data.sharding import stream_count

MANIFEST_FILE = "manifest.json"
KEYS_FILE = "examples.keys"
FORMAT = "shardline.dataset"
FORMAT_VERSION = 3
SPLITS = ("train", "validation", "test")

#: Bytes for each example in the file of keys.
KEY_BYTES = 8


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
                "shardline.trainer.data.examples.describe(DIRECTORY) returns a description that has them"
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
        """Returns why a split, if it exists, cannot evaluate a model, as `features.find_constant` does."""
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
