"""How a source becomes a dataset: one frozen, checked value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardline.trainer.data.manifest import SPLITS
from shardline.trainer.errors import SettingsError

ENCODINGS = ("keep", "jpeg", "png", "raw")
RESIZE_MODES = ("crop", "pad", "stretch")
COMPRESSIONS = ("none", "gzip")
BAD_RECORD_POLICIES = ("fail", "skip")
KEYS = ("path", "content")

#: Sides of a stored image in pixels.
SMALLEST, LARGEST = 4, 4096


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """How a source becomes shards.

    Attributes:
        source: The source string (see `shardline.components.preprocess.sources.open_source`).
        data_dir: Directory with prepared TensorFlow Datasets; "" for their default directory.
        labels: For images:DIR, a CSV file with the columns path and label; "" for a folder per class.
        features: For tfrecord:GLOB, names of the source's features by ours: {"image": "image/encoded"}.
        image_size: Side of the stored square images in pixels, 4..4096; 0 stores images as they are.
        resize_mode: With image_size, one of `RESIZE_MODES`.
        encoding: "keep" passes encoded bytes through (with image_size: JPEG stays JPEG, everything else
            becomes PNG), else what every image is stored as.
        split: Share of the examples by split, for examples that have no split of their own.
        key: "path": an example is known by its name; "content": by its bytes, so that exact duplicates fall
            into the same split.
        seed: Salt of the hashes that choose the split and the order of the examples.
        readers: Input workers that will read the dataset; shards per split are a multiple of it.
        shards: About how many shards the training split gets; smaller splits get fewer. 0 follows from
            shard_size.
        shard_size: About how large a shard is, in MiB; used where shards is 0.
        compression: Of whole shards, one of `COMPRESSIONS`.
        processes: How many processes write. It has no effect on the bytes.
        on_bad_record: "fail" stops at the first example that cannot be used, "skip" leaves it out.
        max_bad_fraction: With "skip", the share of bad examples above which the run fails, 0..1.
        max_pixels: An image with more pixels is refused (decompression bombs).

    Raises:
        SettingsError: A value is of the wrong type or out of range.
    """

    source: str
    data_dir: str = ""
    labels: str = ""
    features: Mapping[str, str] = field(default_factory=dict)
    image_size: int = 0
    resize_mode: str = "crop"
    encoding: str = "keep"
    split: Mapping[str, float] = field(default_factory=lambda: {"train": 0.8, "validation": 0.1, "test": 0.1})
    key: str = "path"
    seed: int = 0
    readers: int = 1
    shards: int = 8
    shard_size: int = 128
    compression: str = "none"
    processes: int = 1
    on_bad_record: str = "fail"
    max_bad_fraction: float = 0.01
    max_pixels: int = 100_000_000

    def __post_init__(self) -> None:
        _check_text(self, "source", "data_dir", "labels")
        _check_whole(self, 0, "seed", "shards", "image_size")
        _check_whole(self, 1, "readers", "shard_size", "processes", "max_pixels")
        _check_choice(self, "resize_mode", RESIZE_MODES)
        _check_choice(self, "encoding", ENCODINGS)
        _check_choice(self, "compression", COMPRESSIONS)
        _check_choice(self, "on_bad_record", BAD_RECORD_POLICIES)
        _check_choice(self, "key", KEYS)
        if self.image_size and not SMALLEST <= self.image_size <= LARGEST:
            raise SettingsError(
                f"image_size must be {SMALLEST}..{LARGEST} pixels, or 0 to keep the images as they are, "
                f"not {self.image_size}"
            )
        if not 0 <= self.max_bad_fraction <= 1:
            raise SettingsError(f"max_bad_fraction must be 0..1, not {self.max_bad_fraction}")
        _check_split(self.split)


def _check_text(settings: PreprocessSettings, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(settings, name), str):
            raise SettingsError(f"{name} must be text, not {getattr(settings, name)!r}")


def _check_whole(settings: PreprocessSettings, least: int, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if type(value) is not int:
            raise SettingsError(f"{name} must be a whole number, not {value!r}")
        if value < least:
            raise SettingsError(f"{name} must be at least {least}, not {value}")


def _check_choice(settings: PreprocessSettings, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(settings, name)
    if value not in choices:
        raise SettingsError(f"unknown {name} {value!r}; there are {', '.join(choices)}")


def _check_split(split: Mapping[str, float]) -> None:
    unknown = sorted(set(split) - set(SPLITS))
    if unknown or "train" not in split:
        raise SettingsError(
            f"split must give shares of {', '.join(SPLITS)}, train among them, got {dict(split)}"
        )
    if any(share <= 0 for share in split.values()) or not math.isclose(sum(split.values()), 1.0):
        raise SettingsError(f"shares of split must be above 0 and add up to 1, got {dict(split)}")
