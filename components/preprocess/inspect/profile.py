"""Profile: the distribution of the values of a split, small enough to be stored with a model.

`shardline.components.validate.metrics.drift` compares later data with it, without the original data.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardline.components.preprocess.inspect import KINDS, Values, first_records, image_kind
from shardline.trainer.base import files
from shardline.trainer.base.errors import DatasetError, SourceError
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Feature
from shardline.trainer.data.manifest import Manifest

#: Most examples that are read, and their bytes.
RECORDS, _BYTES = 2_000, 256 << 20

# Of more numbers so many quantiles are kept, which give a share to within 0.2 %.
_QUANTILES = 500
_LONGEST_VALUE = 100
_SIDE = 64
_MOST = 1 << 53


@dataclass(frozen=True)
class Numbers:
    """Numbers in ascending order, or quantiles of them; non-finite ones last, as None."""

    examples: int
    values: tuple[float | None, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.values) <= self.examples <= _MOST:
            raise ValueError(f"{len(self.values):,} values of {self.examples:,} examples")


@dataclass(frozen=True)
class Categories:
    """Number of examples by value."""

    examples: int
    counts: Mapping[str, int]

    def __post_init__(self) -> None:
        if not 0 < sum(self.counts.values()) == self.examples <= _MOST or min(self.counts.values()) < 0:
            raise ValueError(f"counts that are not of {self.examples:,} examples")


@dataclass(frozen=True)
class Profile:
    """Distribution of every feature of a split, by its name.

    An image has the features "image brightness" (mean of its pixels, 0 to 255), "image height" and "image
    width"; text has its "length" in characters, and its values unless nearly all of them differ. Each of
    several numbers in one label, and each label of a multilabel one, is a feature of its own.
    """

    fingerprint: str
    split: str
    numbers: Mapping[str, Numbers]
    categories: Mapping[str, Categories]

    def write(self, path: Path) -> None:
        """Writes profile.json."""
        files.write_json(path, {"format": "shardline.profile", "format_version": 1, **asdict(self)})


def make_profile(directory: Path, manifest: Manifest, split: str = "train") -> Profile:
    """Profiles a split of a dataset: labels from the manifest, other features from up to 2,000 examples.

    Raises DatasetError if there is no such split, or a shard cannot be read.
    """
    if (found := manifest.splits.get(split)) is None:
        raise DatasetError(
            f"the dataset {directory} has no {split} split; its splits: {', '.join(manifest.splits)}"
        )
    records = first_records(directory, manifest, found.shards, records=RECORDS, max_bytes=_BYTES)
    labels: dict[str, Mapping[str, int]] = {}
    for label in manifest.labels:
        counts = dict(zip(label.outputs, found.labels[label.name].counts, strict=False))
        if label.kind == CLASS:
            labels[label.name] = counts
        elif label.kind == MULTILABEL:
            for output, count in counts.items():
                labels[f"{label.name} {output}"] = {"yes": count, "no": found.records - count}
    return summarize([measure(values, manifest) for values in records], labels, manifest.fingerprint, split)


def measure(values: Values, manifest: Manifest) -> dict[str, float | str]:
    """Returns the features of one example for a profile, except labels that are classes.

    Raises DatasetError if it does not match the manifest.
    """
    measured: dict[str, float | str] = {}
    labels = {label.name: label for label in manifest.labels}
    for feature in manifest.features:
        label = labels.get(feature.name)
        if feature.name in {"key"} | manifest.split_columns or (label and label.kind != REGRESSION):
            continue
        if feature.shape and not feature.encoding and not label:
            continue
        kind, found = values.get(feature.name, ("", ()))
        if kind != KINDS[feature.dtype] or len(found) != (len(label.outputs) if label else 1):
            raise DatasetError(
                f"a record does not have one {feature.dtype} as {feature.name!r}; "
                "'shardline dataset verify DIRECTORY' lists all damage"
            )
        value = found[0]
        if label and len(found) > 1:
            measured |= {
                f"{label.name} {output}": float(number)
                for output, number in zip(label.outputs, found, strict=True)
            }
        elif feature.encoding:
            with contextlib.suppress(SourceError):  # `dataset verify` names what cannot be decoded
                measured |= _measure_image(value, feature)
        elif isinstance(value, bytes):
            text = value.decode("utf-8", "replace")
            measured |= {feature.name: text[:_LONGEST_VALUE], f"{feature.name} length": float(len(text))}
        else:
            measured[feature.name] = float(value)
    return measured


def summarize(
    examples: Sequence[Mapping[str, float | str]],
    labels: Mapping[str, Mapping[str, int]],
    fingerprint: str = "",
    split: str = "train",
) -> Profile:
    """Returns the profile of measured examples, with the number of examples by label and class."""
    columns: dict[str, list[Any]] = defaultdict(list)
    for example in examples:
        for name, value in example.items():
            columns[name].append(value)
    texts = {name: Counter(values) for name, values in columns.items() if isinstance(values[0], str)}
    categories = {
        name: Categories(sum(counts.values()), dict(counts))
        for name, counts in labels.items()
        if any(counts.values())
    }
    for name, counts in texts.items():
        if len(counts) <= counts.total() / 2:
            categories[name] = Categories(counts.total(), dict(counts.most_common()))
    numbers = {name: _numbers(values) for name, values in columns.items() if name not in texts}
    return Profile(fingerprint, split, numbers, categories)


def _numbers(values: Sequence[float]) -> Numbers:
    ordered = sorted(value if math.isfinite(value) else math.inf for value in values)
    if len(ordered) > _QUANTILES:
        indices = (np.arange(_QUANTILES) + 0.5) * len(ordered) / _QUANTILES
        ordered = [ordered[int(index)] for index in indices]
    return Numbers(
        len(values), tuple(float(f"{value:.9g}") if math.isfinite(value) else None for value in ordered)
    )


def _measure_image(encoded: bytes, feature: Feature) -> dict[str, float]:
    height, width, *_ = image_kind(encoded, feature)
    if feature.encoding == "raw":
        pixels = np.frombuffer(encoded, np.uint8)
    else:
        from PIL import Image

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # its size was accepted
                image = Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG"))
            image.draft("L", (_SIDE, _SIDE))  # a large JPEG is decoded at a fraction of its size
            pixels = np.asarray(image.convert("L"))
        except Exception as failure:  # Pillow's decoders raise OSError, SyntaxError, ValueError and more
            raise SourceError(f"cannot be decoded: {type(failure).__name__}") from None
    found = {"brightness": float(pixels.mean()), "height": float(height), "width": float(width)}
    return {f"{feature.name} {what}": value for what, value in found.items()}
