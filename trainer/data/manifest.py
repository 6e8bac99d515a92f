"""Manifest of a dataset directory: what is in it, and what a model function is told about it.

A dataset directory holds `{split}-{i:05d}-of-{n:05d}.tfrecord` files of tf.train.Example and one
`manifest.json`, written last, which readers trust, never a glob. Loads neither TensorFlow nor Keras.
"""

from __future__ import annotations

import contextlib
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardline.trainer.base import deserialize, files
from shardline.trainer.base.errors import DatasetError, ModelError
from shardline.trainer.data.features import MOMENTS, Anomaly, Feature, Label, Tally, find_constant, is_class

MANIFEST_FILE = "manifest.json"
KEYS_FILE = "examples.keys"
FORMAT = "shardline.dataset"
FORMAT_VERSION = 2
SPLITS = ("train", "validation", "test")

#: Bytes for each example in the file of keys.
KEY_BYTES = 8

#: Compressions of whole shards.
COMPRESSIONS = ("", "gzip")


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
        labels: What each label is in its examples, by the label's name.
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
        straddling: Number of groups of equal examples in more than one split (leakage).
        named: Keys of the first such groups, each as "split: key".
    """

    examples: int = 0
    straddling: int = 0
    named: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class DatasetInfo:
    """What a model function is told about the dataset.

    Attributes:
        input_shape: (height, width, channels) of the decoded uint8 image, values 0..255; () for a table.
        inputs: What the model takes, by name: the image alone, or the columns of a table.
        labels: What a model is to predict, by the names of the labels. Of several the targets are a dict of
            these names, and so are the model's outputs.
        features: All features of an example, by name.
        records: Number of examples by split.
        train: What each label is in the training split, by its name.
        reader: Reads training examples, for `training_examples`; None where only the manifest is known.
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
        """Whether a model takes a dict of columns, and not an image."""
        return not self.input_shape

    def training_examples(
        self, columns: Sequence[str] = (), limit: int | None = 100_000
    ) -> Mapping[str, Any]:
        """Returns examples of the training split, by which a model function may adapt layers.

        They are the same on every replica and in every continuation of a run: the first of the split, in
        whose shards preprocessing has dealt examples at random.

        Args:
            columns: Names of inputs, "image" for images; () for all.
            limit: Number of examples, at most; None for all. They are held in memory.

        Returns:
            A NumPy array of each input, (examples,) or uint8 (examples, height, width, channels), by name.
            Texts are bytes, a missing number is NaN, a missing text is empty.
        """
        if self.reader is None:
            raise ModelError(
                "the examples of the dataset are not at hand, only its manifest; "
                "shardline.trainer.data.split_view.describe(DIRECTORY) gives a description that has them"
            )
        return self.reader(columns, limit)

    @property
    def label(self) -> Label:
        """The only label; a ModelError says that there are several, for models of one output."""
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
        fingerprint: "sha256:..." over content and settings, and nothing else.
        settings: How the source became shards (seed, split, image size, ...).
        labels: What is to be predicted of each example, and how it is stored.
        splits: Splits that have examples, by name.
        compression: Compression of the shards as whole files: "" or "gzip".
        records_in: Examples that the source had: those in the splits and those rejected.
        rejected: Number of examples left out, by reason; rejected.jsonl beside the manifest names them.
        converted: Number of images of which something is converted or left out, when they were stored or when
            they are decoded, by what ("exif orientation", "cmyk", "alpha", "16 bit", "animation", ...).
        keys: File with a hash that each example is known by in other datasets, `KEY_BYTES` for each, in the
            order of the shards; None in datasets of earlier releases, and where the source has no keys.
        anomalies: What does not fit the schema, where there was one and `on_anomaly` is "warn".
    """

    fingerprint: str
    source: str
    settings: Mapping[str, Any]
    labels: tuple[Label, ...]
    features: tuple[Feature, ...]
    splits: Mapping[str, Split]
    compression: str = ""
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

    @property
    def files(self) -> list[Shard]:
        """The shards and the file of keys."""
        return [*self.shards, *([self.keys] if self.keys else [])]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class of the only label, and each index; () for numbers, and for several labels."""
        return self.labels[0].class_names if len(self.labels) == 1 else ()

    @property
    def is_classes(self) -> bool:
        """Whether there is one label, and it is one class of several."""
        return is_class(self.labels)

    @property
    def columns(self) -> tuple[Feature, ...]:
        """The features beside the image, the labels and the key."""
        others = {"image", "key", *(label.name for label in self.labels)}
        return tuple(feature for feature in self.features if feature.name not in others)

    @property
    def group(self) -> str:
        """The column by which examples are kept together in a split, which no model takes; "" for none."""
        return str(self.settings.get("group") or "")

    @property
    def moment(self) -> str:
        """The feature, of `MOMENTS`, with the time by which examples were split; "" where they were not."""
        names = [feature.name for feature in self.features if feature.name in MOMENTS]
        return names[0] if names and self.settings.get("split_by_time") else ""

    @property
    def apart(self) -> frozenset[str]:
        """Columns that only decide the split: no model takes them, and no slice or drift is of them."""
        return frozenset({self.group, self.moment})

    @property
    def image(self) -> Feature:
        """The image feature; a DatasetError when the dataset has none."""
        if "image" not in self.inputs:
            raise DatasetError("the dataset is a table: it has no feature 'image'; use a dataset of images")
        return self.inputs["image"]

    @property
    def inputs(self) -> Mapping[str, Feature]:
        """What a model takes, by name: the image alone, else every column; of neither a DatasetError."""
        if images := {one.name: one for one in self.features if one.name == "image"}:
            return images
        columns = {feature.name: feature for feature in self.columns if feature.name not in self.apart}
        if not columns:
            raise DatasetError("the examples have neither an image nor columns that a model could take")
        return columns

    def find_constant(self, name: str) -> list[str]:
        """Returns why a split, where it is there, cannot judge a model, as `features.find_constant` does."""
        if (split := self.splits.get(name)) is None:
            return []
        trained = self.splits.get("train", split).labels
        found = find_constant(self.labels, split.labels, trained, split.records)
        return [f"the {name} split {reason}" for reason in found]

    def info(self) -> DatasetInfo:
        """Returns what a model function sees; a DatasetError when examples differ in size, or as `inputs`."""
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
    files.write_json(
        directory / MANIFEST_FILE, {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)}
    )


def load(directory: Path) -> Manifest:
    """Reads a dataset directory's manifest.

    Raises:
        DatasetError: When it is missing, damaged, of another format, or names a shard outside the directory.
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
        words = f"format_version {reprlib.repr(version)}, this release reads {FORMAT_VERSION}"
        raise DatasetError(f"{path} has {words}; {again}")
    manifest = deserialize.restore(Manifest, content, str(path), DatasetError, again)
    for fault in _faults(manifest):
        raise DatasetError(f"{path} is damaged: {fault}; {again}")
    return manifest


def load_whole(directory: Path) -> Manifest:
    """Reads a manifest whose files are all there in their size; raises as `load` and `check_files` do."""
    manifest = load(directory)
    check_files(directory, manifest.files)
    return manifest


def check_files(directory: Path, named: Iterable[Shard]) -> None:
    """Checks that files of a dataset are there in their size; a DatasetError names the first that is not."""
    with contextlib.suppress(OSError):
        os.listdir(directory)  # of a mounted bucket: then the sizes of all are known, each else a request
    for shard in named:
        path = directory / shard.file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DatasetError(f"cannot read {path}: {error.strerror}; preprocess the data again") from None
        if size != shard.bytes:
            raise DatasetError(
                f"{path} has {size:,} bytes, the manifest says {shard.bytes:,}: the dataset is damaged; "
                "preprocess the data again"
            )


def _faults(manifest: Manifest) -> Iterator[str]:
    """Yields what cannot be true of any dataset; `dataset verify` looks at what contradicts the shards."""
    for shard in manifest.files:
        if shard.file != Path(shard.file).name or shard.file in ("", "..") or "\0" in shard.file:
            yield f"it names a shard outside the directory: {shard.file!r}"
    numbers = [manifest.records_in, manifest.duplicates.examples, manifest.duplicates.straddling]
    numbers += [*manifest.rejected.values(), *manifest.converted.values()]
    numbers += [number for shard in manifest.files for number in (shard.records, shard.bytes)]
    if min(numbers) < 0:
        yield f"it has a negative number, {min(numbers):,}"
    if not manifest.labels or not manifest.splits or not all(s.shards for s in manifest.splits.values()):
        yield "it has no label, no split, or a split without a shard"
    yield from filter(None, (label.fault for label in manifest.labels))
    for name, split in manifest.splits.items():
        if split.labels.keys() != {label.name for label in manifest.labels}:
            yield f"its {name} split has other labels than the dataset"
            continue
        for label in manifest.labels:
            yield from split.labels[label.name].faults(label)
    if manifest.keys and manifest.keys.bytes != KEY_BYTES * manifest.records:
        yield f"its file of keys has {manifest.keys.bytes:,} bytes for {manifest.records:,} examples"
    if manifest.compression not in COMPRESSIONS:
        yield f"it has an unknown compression {manifest.compression!r}"
    names = [feature.name for feature in manifest.features]
    if len(set(names)) != len(names) or not all(one.feature in manifest.features for one in manifest.labels):
        yield "it has no feature for one of its labels, or two of one name"
    for feature in manifest.features:
        if not feature.is_possible:
            yield f"a feature cannot be as {feature}"
