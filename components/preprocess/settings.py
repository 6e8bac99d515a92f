"""Settings of preprocessing: the source, and how it becomes a dataset."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from shardline.components.preprocess.schema import parse_labels
from shardline.components.preprocess.time_split import parse_gap
from shardline.components.storage import resolve
from shardline.trainer.base.deserialize import Count, Natural, Rule, Within, check_types
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.manifest import CLASS, COLUMN_TYPES, LABEL, SPLITS, Label

#: Sides of a stored image in pixels.
SMALLEST, LARGEST = 4, 4096

_COLUMN = Rule(f"one of {', '.join(COLUMN_TYPES)}", COLUMN_TYPES.__contains__)
# More than a million, or a thousand processes, is a typo that would take all memory.
_MOST_SHARDS, _MOST_PROCESSES = Within(1, 1_000_000), Within(0, 1_024)


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """The source, and how it becomes shards; each annotation is its help text.

    Raises:
        SettingsError: A value is of the wrong type or out of range.
    """

    source: Annotated[str, "digits, FORM:PLACE, or pkg.module:Source."]
    data_dir: Annotated[str, 'Directory of prepared TFDS datasets; "" for TFDS\'s default.'] = ""
    labels: Annotated[
        str, "Labels of images:DIR or text:DIR: a file with the columns path and label, or those of --label."
    ] = ""
    features: Annotated[Mapping[str, str], 'Names in the source: {"image": "image/encoded"}.'] = field(
        default_factory=dict
    )
    label: Annotated[str, "Column to predict: regression:fare, class:species, multilabel:tags."] = ""
    columns: Annotated[
        Mapping[str, Annotated[str, _COLUMN]],
        "Types of columns: text, integer, number, or of dates day-first, month-first.",
    ] = field(default_factory=dict)
    image_size: Annotated[int, "Side of stored images in pixels; 0 keeps them."] = 0
    resize_mode: Annotated[Literal["crop", "pad", "stretch"], "How an image becomes square."] = "crop"
    encoding: Annotated[Literal["keep", "jpeg", "png", "raw"], "Encoding of stored images."] = "keep"
    split: Annotated[Mapping[str, float], "Shares of the splits; {} for 0.8, 0.1 and 0.1."] = field(
        default_factory=dict
    )
    stratify: Annotated[bool, "Give each class its share of every split."] = False
    key: Annotated[Literal["path", "content"], "Key of an example; equal keys stay in one split."] = "path"
    group: Annotated[str, "Feature whose equal values stay in one split."] = ""
    split_by_time: Annotated[str, "Time column; training precedes validation, validation precedes test."] = ""
    split_gap: Annotated[str, "Time left out between splits: 7d, 36h, 90m, or a number."] = ""
    split_salt: Annotated[Natural, "Number that determines the split together with the keys."] = 0
    seed: Annotated[Natural, "Seed of the order of examples."] = 0
    readers: Annotated[int, _MOST_SHARDS, "Input workers; the number of shards is a multiple of it."] = 1
    shards: Annotated[int, _MOST_SHARDS, "Approximate number of training shards."] = 8
    processes: Annotated[int, _MOST_PROCESSES, "Writing processes; 0 for one per core."] = 0
    on_bad_record: Annotated[Literal["fail", "skip"], "Stop at an unusable example, or skip it."] = "fail"
    max_bad_fraction: Annotated[
        float, Within(0, 1), "Share of skipped examples above which a run fails, 0..1."
    ] = 0.01
    schema: Annotated[str, "Table Schema (JSON) that columns and labels must fit."] = ""
    on_anomaly: Annotated[Literal["fail", "warn"], "Stop at what does not fit the schema, or go on."] = "fail"
    max_pixels: Annotated[Count, "Pixels above which an image is refused."] = 100_000_000
    check_images: Annotated[
        Literal["header", "structure", "decode"], "What is checked of images that are stored unchanged."
    ] = "structure"

    def __post_init__(self) -> None:
        check_types(self)
        for name, text in vars(self).items():
            if isinstance(text, str) and text.encode(errors="ignore").decode() != text:
                raise SettingsError(f"{name} is {text!r}, which is not UTF-8; rename the file or directory")
        object.__setattr__(self, "split", self.split or {"train": 0.8, "validation": 0.1, "test": 0.1})
        if self.image_size and not SMALLEST <= self.image_size <= LARGEST:
            raise SettingsError(
                f"image_size must be {SMALLEST}..{LARGEST} pixels, or 0 to keep their sizes, "
                f"not {self.image_size}"
            )
        if set(self.split) - set(SPLITS) or "train" not in self.split:
            raise SettingsError(
                f"split must give shares of {', '.join(SPLITS)}, train among them, got {dict(self.split)}"
            )
        if min(self.split.values()) <= 0 or not math.isclose(sum(self.split.values()), 1.0):
            raise SettingsError(f"shares of split must be above 0 and add up to 1, got {dict(self.split)}")
        parse_labels(self.label)
        parse_gap(self.split_gap)
        if self.split_gap and not self.split_by_time:
            raise SettingsError("split_gap belongs to split_by_time; name its column, or leave the gap out")
        rules = [name for name in ("stratify", "group", "split_by_time") if getattr(self, name)]
        if len(rules) > 1:
            raise SettingsError(f"{rules[0]} and {rules[1]} cannot both decide the split; leave one out")

    def would_read(self, path: str) -> bool:
        """Returns whether a file of this absolute path would be part of the source."""
        form, _, rest = self.source.partition(":")
        place = resolve(rest)
        if form in ("images", "text") and not self.labels:
            return Path(path).is_relative_to(os.path.realpath(place))
        pattern = os.path.abspath(place)
        matches = fnmatch.fnmatch(path, pattern) if "**" in pattern else Path(path).match(pattern)
        return form == "tfrecord" and matches

    def recorded(self, schema: str) -> dict[str, object]:
        """Returns the settings that determine the bytes, and the digest of the schema that was checked."""
        names = (
            "split", "stratify", "split_by_time", "split_gap", "split_salt", "seed", "key", "group",
            "image_size", "resize_mode", "encoding", "readers", "shards",
        )  # fmt: skip
        values = asdict(self)
        checked = {"schema": schema, "on_anomaly": self.on_anomaly} if schema else {}
        columns = {"columns": values["columns"]} if self.columns else {}
        return {name: values[name] for name in names} | columns | checked

    @property
    def codec(self) -> dict[str, Any]:
        """Arguments of the image codec."""
        names = ("image_size", "resize_mode", "encoding", "max_pixels")
        return {"check": self.check_images} | {name: getattr(self, name) for name in names}

    @property
    def known_labels(self) -> tuple[Label, ...]:
        """The labels, with their columns as outputs, where the settings alone say their kinds; else ()."""
        form, wanted = self.source.partition(":")[0], parse_labels(self.label)
        if not wanted and (self.source == "digits" or form in ("tfds", "images", "text")):
            return (Label(LABEL, CLASS, ()),)
        if not all(each.kind for each in wanted):
            return ()
        is_one = len(wanted) == 1
        return tuple(Label(LABEL if is_one else it.columns[0], it.kind, it.columns) for it in wanted)

    @property
    def label_column(self) -> str:
        """Column of the only label, where the settings name one; else ""."""
        wanted = parse_labels(self.label)
        columns = wanted[0].columns if len(wanted) == 1 else ()
        return columns[0] if len(columns) == 1 else self.features.get("label", "")
