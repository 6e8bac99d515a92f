"""Labels: real data of every kind from a file to a judged export, beside plain Keras and scikit-learn.

python -m benchmarks.labels [--data DIR] [--seeds N] [--only NAME,NAME]

Each dataset is preprocessed once. For each seed Shardline trains its built-in model, exports it and judges
the export; Keras' own `fit` trains the same model function for the same epochs; and scikit-learn's usual
choice is fitted to the same training examples. All are scored on the same test examples, the last two by
scikit-learn.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.datasets
from PIL import Image

#: Of the photos: sides of a crop in pixels, and crops of each photo.
CROP, CROPS = 96, 25

Columns = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One dataset: where it comes from, the built-in model, and what scikit-learn's usual choice is.

    Attributes:
        settings: Settings of preprocessing beside the source.
        arguments: Settings of training.
        peers: By label, a name and what is fitted to the training examples.
    """

    source: Callable[[Path, Path], str]
    settings: Mapping[str, Any]
    model: str
    peers: Mapping[str, tuple[str, Callable[[], Any]]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


def from_sklearn(name: str) -> Callable[[Path, Path], str]:
    """Returns what writes one of scikit-learn's datasets as a CSV file."""

    def write(data: Path, scratch: Path) -> str:
        loaded, path = getattr(sklearn.datasets, f"load_{name}")(), scratch / f"{name}.csv"
        targets = loaded.target if name == "diabetes" else loaded.target_names[loaded.target]
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*loaded.feature_names, "target"])
            writer.writerows([*row, target] for row, target in zip(loaded.data, targets, strict=True))
        return f"table:{path}"

    return write


def crops(data: Path, scratch: Path) -> str:
    """Writes crops of real photos, labelled by what their pixels are, and returns the source."""
    random, rows = np.random.default_rng(0), []
    folder = scratch / "crops"
    folder.mkdir()
    for photo in sorted((data / "photos").glob("*/*.jpg")):
        picture = Image.open(photo).convert("RGB")
        for number in range(CROPS):
            left, top = (int(random.integers(0, max(1, side - CROP))) for side in picture.size)
            crop = picture.crop((left, top, left + CROP, top + CROP))
            name = f"{photo.stem}-{number}.png"
            crop.save(folder / name)
            pixels = np.asarray(crop, np.float32) / 255
            red, green, blue = pixels.mean(axis=(0, 1))
            grey = pixels.mean(axis=2)
            detail = np.abs(np.diff(grey, axis=0)).mean() + np.abs(np.diff(grey, axis=1)).mean()
            rows.append(
                [name, photo.stem, int(grey.mean() > 0.5), int(green > max(red, blue)), int(detail > 0.06)]
            )
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "photo", "bright", "green", "detailed"])
        writer.writerows(rows)
    return f"images:{folder}"
