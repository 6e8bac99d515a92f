"""Settings of preprocessing: the source, and how it becomes a dataset."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardline.components.preprocess.schema import labels
from shardline.components.preprocess.time_split import parse_gap
from shardline.trainer.base.deserialize import check_types
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.data.features import CLASS, COLUMN_TYPES, LABEL, Label
from shardline.trainer.data.manifest import SPLITS

#: Sides of a stored image in pixels.
SMALLEST, LARGEST = 4, 4096

#: Integers have 64 bits, also in TensorFlow.
LARGEST_SEED = 2**63 - 1

# More than a million, or a thousand processes, is a typo that would take all memory.
_RANGES = {
    **dict.fromkeys(("seed", "split_salt"), (0, LARGEST_SEED)),
    **dict.fromkeys(("shards", "readers"), (1, 1_000_000)),
    "image_size": (0, 1_000_000),
    "max_pixels": (1, LARGEST_SEED),
    "processes": (0, 1_024),
}


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """The source, and how it becomes shards.

    Attributes:
        source: digits, tfds:NAME, images:DIR, text:DIR, tfrecord:GLOB, table:PATH, bigquery:TABLE or QUERY,
            or pkg.module:Source. In a pipeline, {date} becomes the day for which the run is scheduled,
            {date:%Y/%m} any part of it, and for table and tfrecord {last 28 days} the days up to it.
        data_dir: Directory of prepared TFDS datasets; empty for TFDS's default.
        labels: For images:DIR and text:DIR, a CSV file with columns path and label, or a table with columns
            that `label` names; empty for a folder per class.
        features: For tfrecord, table and bigquery, the source's feature names by Shardline's:
            {"image": "image/encoded"}.
        label: For table, bigquery, tfrecord and `labels`, the target: KIND:COLUMN[,COLUMN], with the kinds
            class, multilabel and regression; several are separated by ;, and [UNIT] may follow a column of
            numbers: "regression:fare [USD]", "class:kind;regression:rating". The kind of a COLUMN alone is
            inferred from its values; empty for a column label, or the one that features name.
        columns: For table, bigquery and `labels` with `label`, types of columns by name, text, integer or
            number, that replace those that a file declares or its values suggest: {"zip": "text"}.
        image_size: Side of the stored square images in pixels, 4..4096; 0 for no resizing.
        resize_mode: crop, pad or stretch.
        encoding: How images are stored: keep, jpeg, png or raw. keep stores encoded bytes unchanged; with
            image_size, JPEG stays JPEG and everything else becomes PNG.
        split: Share of the examples by split, where the source has no splits; {} for 0.8 train,
            0.1 validation, 0.1 test.
        stratify: Whether every split has the same share of each class of the only label, as closely as whole
            examples allow, where the source has no splits.
        key: path, or content to keep exact duplicates in one split.
        group: Feature, such as a patient, by which examples are grouped: all with the same value are in one
            split; empty for none.
        split_by_time: For table, bigquery and tfrecord, a column of times: training comes before validation,
            that before test; empty for none.
        split_gap: Length of the gap before validation and before test, whose rows are left out, such as 7d,
            36h or 90m, or a number where the column holds numbers.
        split_salt: Number, from 0, that determines the split together with the keys.
        seed: Seed of the weights, the shuffling and the order of the examples, from 0; not of the split.
        readers: Input workers that will read the dataset; shards per split are a multiple of it.
        shards: About how many shards the training split gets.
        processes: Number of writing processes; 0 for one per core. It has no effect on the bytes.
        on_bad_record: fail, or skip to leave bad examples out.
        max_bad_fraction: With skip, the share of bad examples above which the run fails, 0..1.
        schema: A file in the form of a Frictionless Table Schema, against which columns and labels are
            checked; empty for none.
        on_anomaly: fail, or warn to continue with a source that does not fit the schema.
        max_pixels: An image with more pixels is refused (decompression bombs).
        check_images: How thoroughly an image that is stored unchanged is checked: header; structure, the
            whole file and the pixels of one JPEG in 64; or decode, all pixels.

    Raises:
        SettingsError: A value is of the wrong type or out of range.
    """

    source: str
    data_dir: str = ""
    labels: str = ""
    features: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    image_size: int = 0
    resize_mode: Literal["crop", "pad", "stretch"] = "crop"
    encoding: Literal["keep", "jpeg", "png", "raw"] = "keep"
    split: Mapping[str, float] = field(default_factory=dict)
    stratify: bool = False
    key: Literal["path", "content"] = "path"
    group: str = ""
    split_by_time: str = ""
    split_gap: str = ""
    split_salt: int = 0
    seed: int = 0
    readers: int = 1
    shards: int = 8
    processes: int = 0
    on_bad_record: Literal["fail", "skip"] = "fail"
    max_bad_fraction: float = 0.01
    schema: str = ""
    on_anomaly: Literal["fail", "warn"] = "fail"
    max_pixels: int = 100_000_000
    check_images: Literal["header", "structure", "decode"] = "structure"

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "split", self.split or {"train": 0.8, "validation": 0.1, "test": 0.1})
        for name, (least, most) in _RANGES.items():
            if (number := getattr(self, name)) < least:
                raise SettingsError(f"{name} must be at least {least}, not {number}")
            if number > most:
                raise SettingsError(f"{name} must be at most {most:,}, not {number:,}")
        if self.image_size and not SMALLEST <= self.image_size <= LARGEST:
            raise SettingsError(
                f"image_size must be {SMALLEST}..{LARGEST} pixels, or 0 to keep their sizes, "
                f"not {self.image_size}"
            )
        if not 0 <= self.max_bad_fraction <= 1:
            raise SettingsError(f"max_bad_fraction must be 0..1, not {self.max_bad_fraction}")
        if set(self.split) - set(SPLITS) or "train" not in self.split:
            raise SettingsError(
                f"split must give shares of {', '.join(SPLITS)}, train among them, got {dict(self.split)}"
            )
        if min(self.split.values()) <= 0 or not math.isclose(sum(self.split.values()), 1.0):
            raise SettingsError(f"shares of split must be above 0 and add up to 1, got {dict(self.split)}")
        labels.parse(self.label)
        for column, kind in self.columns.items():
            if kind not in COLUMN_TYPES:
                raise SettingsError(
                    f"columns has the unknown type {kind!r} for {column!r}; "
                    f"there are {', '.join(COLUMN_TYPES)}"
                )
        parse_gap(self.split_gap)
        if self.split_gap and not self.split_by_time:
            raise SettingsError("split_gap belongs to split_by_time; name its column, or leave the gap out")
        rules = [name for name in ("stratify", "group", "split_by_time") if getattr(self, name)]
        if len(rules) > 1:
            raise SettingsError(f"{rules[0]} and {rules[1]} cannot both decide the split; leave one out")

    @property
    def codec(self) -> dict[str, Any]:
        """Arguments of the image codec."""
        names = ("image_size", "resize_mode", "encoding", "max_pixels")
        return {"check": self.check_images} | {name: getattr(self, name) for name in names}

    @property
    def known_labels(self) -> tuple[Label, ...]:
        """The labels, with their columns as outputs, where the settings alone say their kinds; else ()."""
        form, wanted = self.source.partition(":")[0], labels.parse(self.label)
        if not wanted and (self.source == "digits" or form in ("tfds", "images", "text")):
            return (Label(LABEL, CLASS, ()),)
        if not all(each.kind for each in wanted):
            return ()
        is_one = len(wanted) == 1
        return tuple(Label(LABEL if is_one else it.columns[0], it.kind, it.columns) for it in wanted)

    @property
    def label_column(self) -> str:
        """Column of the only label, where the settings name one; else ""."""
        wanted = labels.parse(self.label)
        columns = wanted[0].columns if len(wanted) == 1 else ()
        return columns[0] if len(columns) == 1 else self.features.get("label", "")
