"""Drift: how often equal data are said to have moved, and from how many examples on real changes are found.

python -m benchmarks.drift [--data DIR]

Each dataset is preprocessed once and read as the profile of a training is. A resample is drawn from its
examples with replacement, so that two resamples are two samples of the same data; of 200 pairs of each size
those are counted in which any feature has moved. For a change, one of each pair has it.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from sklearn.datasets import load_iris

from shardline.components.preprocess.inspect.profile import Profile, measure, read_sample, summarize
from shardline.components.preprocess.run import preprocess
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.text import table
from shardline.components.validate.metrics.drift import compare_profiles

PAIRS = 200
SIZES = (100, 300, 1_000, 2_000)

Examples = Mapping[str, pa.Array]
Change = Callable[[Examples, np.random.Generator], Examples]


def read(directory: Path, settings: PreprocessSettings) -> Examples:
    """Returns the measured examples of a source, all of them in one split, with their labels."""
    manifest = preprocess(settings, directory)
    names = pa.array(manifest.class_names)
    batches = [
        {**measure(columns, manifest), "label": names.take(columns["label"].flatten())}
        for columns in read_sample(directory, manifest, manifest.shards, whole=True)
    ]
    return {name: pa.concat_arrays([batch[name] for batch in batches]) for name in batches[0]}


def resample(examples: Examples, size: int, random: np.random.Generator) -> Examples:
    """Draws examples with replacement."""
    return take(examples, random.integers(0, len(examples["label"]), size))


def take(examples: Examples, rows: npt.NDArray[np.integer]) -> Examples:
    """Returns some of the examples."""
    return {name: values.take(pa.array(rows)) for name, values in examples.items()}


def profile(examples: Examples) -> Profile:
    """Returns the profile of measured examples, with labels counted in them."""
    features = {name: values for name, values in examples.items() if name != "label"}
    return summarize([features], {"label": Counter(examples["label"].to_pylist())})


def share_moved(
    examples: Examples, size: int, change: Change | None = None, feature: str = "", pairs: int = PAIRS
) -> float:
    """Returns the share of pairs of resamples in which a feature, or any, is said to have moved."""
    random, found = np.random.default_rng(size), 0
    for _ in range(pairs):
        before, after = (resample(examples, size, random) for _ in range(2))
        if change:
            after = change(after, random)
        moved = [item.feature for item in compare_profiles(profile(before), profile(after)) if item.moved]
        found += feature in moved if feature else bool(moved)
    return found / pairs


def scaled(feature: str, factor: float) -> Change:
    """Returns a change that multiplies a feature."""
    return lambda examples, _: {**examples, feature: pc.multiply(examples[feature], factor)}


def doubled(label: str) -> Change:
    """Returns a change after which a class is twice as frequent."""

    def change(examples: Examples, random: np.random.Generator) -> Examples:
        weights = np.where(pc.equal(examples["label"], label), 2.0, 1.0)
        return take(examples, random.choice(len(weights), len(weights), p=weights / weights.sum()))

    return change


def datasets(
    data: Path, scratch: Path
) -> dict[str, tuple[PreprocessSettings, dict[str, tuple[str, Change]]]]:
    """Returns the sources by name, with changes by what they are: the feature that they move, and how."""
    iris, loaded = scratch / "iris.csv", load_iris()
    with iris.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*loaded.feature_names, "label"])
        writer.writerows(
            [*row, loaded.target_names[label]] for row, label in zip(loaded.data, loaded.target, strict=True)
        )
    whole = {"split": {"train": 1.0}}
    brighter = ("image brightness", scaled("image brightness", 1.1))
    return {
        "digits": (
            PreprocessSettings(source="digits", **whole),
            {"brightness +10 %": brighter, "a class twice as frequent": ("label", doubled("3"))},
        ),
        "photos": (
            PreprocessSettings(source=f"images:{data}/photos", image_size=64, **whole),
            {"brightness +10 %": brighter, "a class twice as frequent": ("label", doubled("ants"))},
        ),
        "iris": (
            PreprocessSettings(source=f"table:{iris}", **whole),
            {
                "a column +10 %": ("sepal length (cm)", scaled("sepal length (cm)", 1.1)),
                "a class twice as frequent": ("label", doubled("virginica")),
            },
        ),
        "snippets": (
            PreprocessSettings(
                source=f"table:{data}/text/snippets.csv", features={"label": "kind", "key": "id"}, **whole
            ),
            {
                "texts 10 % longer": ("text length", scaled("text length", 1.1)),
                "texts 25 % longer": ("text length", scaled("text length", 1.25)),
                "a class twice as frequent": ("label", doubled("product")),
            },
        ),
    }


def main() -> None:
    """Prints the shares for every dataset and change."""
    parser = argparse.ArgumentParser(description=__doc__)
    given = os.environ.get("SHARDLINE_TEST_DATA")
    parser.add_argument(
        "--data",
        type=Path,
        default=given,
        required=not given,
        help="Directory with photos/ and text/; default: SHARDLINE_TEST_DATA.",
    )
    data = parser.parse_args().data
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, (settings, changes) in datasets(data, Path(scratch)).items():
            examples = read(Path(scratch) / name, settings)
            what = f"{name}, {len(examples['label']):,} examples"
            rows.append((what, "nothing", *(f"{share_moved(examples, size):.1%}" for size in SIZES)))
            for change, (feature, moved) in changes.items():
                shares = (share_moved(examples, size, moved, feature) for size in SIZES)
                rows.append((what, change, *(f"{share:.0%}" for share in shares)))
    print(table(("dataset", "change", *(f"{size:,}" for size in SIZES)), rows))


if __name__ == "__main__":
    main()
