"""How good the first model of `shardline new --data` is, against scikit-learn's linear models.

pip install --no-deps statsmodels vega_datasets  # for their tables
python -m benchmarks.first_project --seeds 5

Parameters and model are those of the project, with batches of 32, as of its two replicas. A seed is another
split (of a table that is split by time the same one) and other weights. LogisticRegression or Ridge get the
same training rows, standardized, words as indicators.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
from dataclasses import fields
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import keras
import numpy as np
import sklearn.datasets
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import shardline
from shardline.pipelines import project as projects
from shardline.pipelines.parameters import read_parameters
from shardline.pipelines.project.data import inspect_data
from shardline.trainer import manifest
from shardline.trainer.base import plugins
from shardline.trainer.data import examples

#: Tables, by name: a loader of scikit-learn, or a file of a package, and the column to predict.
TABLES: dict[str, tuple[Any, str]] = {
    "cancer": (sklearn.datasets.load_breast_cancer, "class"),
    "seattle": ("vega_datasets/_data/seattle-weather.csv", "weather"),
    "fair": ("statsmodels/datasets/fair/fair.csv", "affairs"),
    "diabetes": (sklearn.datasets.load_diabetes, "progression"),
    "digits": (sklearn.datasets.load_digits, "class"),
}
_KNOWN = {field.name for field in fields(shardline.PreprocessSettings)}


def write_project(name: str, directory: Path) -> dict[str, Any]:
    """Writes a table as a CSV file and its project, and returns the project's parameters."""
    source, label = TABLES[name]
    table, project = directory / f"{name}.csv", directory / f"first_{name}"
    if isinstance(source, str):
        package = distribution(source.partition("/")[0])
        table.write_bytes(Path(str(package.locate_file(source))).read_bytes())
    else:
        data = source()
        targets = [f"class {y}" for y in data.target] if label == "class" else data.target
        with table.open("w", newline="") as file:
            csv.writer(file).writerow([*data.feature_names, label])
            csv.writer(file).writerows([*x, y] for x, y in zip(data.data.tolist(), targets, strict=True))
    projects.write_project(
        project, "table", project.name, "shardline", inspect_data(str(table), label, "table")
    )
    sys.path.insert(0, str(project))
    return dict(read_parameters(project / "params.toml"))


def score(predicted: Any, targets: Any) -> float:
    """Returns the accuracy of classes, or the RMSE of numbers."""
    if targets.dtype.kind == "i":
        return float(np.mean(predicted == targets))
    return float(np.sqrt(np.mean((np.ravel(predicted) - targets) ** 2)))


def train_linear(train: tuple[Any, Any], test: tuple[Any, Any]) -> float:
    """Returns the score of scikit-learn's linear model."""
    rows: list[list[Any]] = [[], []]
    for column, values in train[0].items():
        is_text = values.dtype == "string"
        encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False) if is_text else StandardScaler()
        encoder.fit(values.numpy()[:, None])
        for part, (inputs, _) in zip(rows, (train, test), strict=True):
            part.append(np.nan_to_num(encoder.transform(inputs[column].numpy()[:, None])))
    model = LogisticRegression(max_iter=5000) if train[1].dtype.kind == "i" else Ridge()
    return score(model.fit(np.hstack(rows[0]), train[1]).predict(np.hstack(rows[1])), test[1])


def read(dataset: Path, split: str) -> tuple[Any, Any]:
    """Returns the inputs and the targets of a split."""
    found = manifest.load(dataset)
    inputs, targets = examples.load_examples(
        [str(dataset / shard.file) for shard in found.splits[split].shards], found
    )
    return inputs, np.ravel(np.asarray(targets))


def measure(given: dict[str, Any], out: Path, seed: int) -> tuple[float, float, int]:
    """Returns the scores of the project's model and of the linear one, and the epochs of the former."""
    settings = {name: given[name] for name in given.keys() & _KNOWN} | {"split_salt": seed, "seed": seed}
    shardline.preprocess(shardline.PreprocessSettings(**settings), out)
    info, build_model = examples.describe_dataset(out), plugins.load(given["model"], "model")
    stopping = keras.callbacks.EarlyStopping("val_loss", 0, given["early_stopping_patience"])
    stopping.restore_best_weights = True
    options = {"batch_size": 32, "epochs": given["epochs"], "callbacks": [stopping], "seed": seed}
    trained = shardline.fit(lambda: build_model(info), out, validation_data=out, verbose=0, **options)
    train, test = (read(out, name) for name in ("train", "test"))
    predicted = trained.model.predict(test[0], batch_size=256, verbose=0)
    ours = score(predicted.argmax(axis=-1) if info.class_names else predicted, test[1])
    return ours, train_linear(train, test), len(trained.epoch)


def main() -> None:
    """Prints a row for each table: medians and ranges."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds, directory = parser.parse_args().seeds, Path(tempfile.mkdtemp())
    for name in TABLES:
        given = write_project(name, directory)
        runs = [measure(given, directory / f"{name}-{seed}", seed) for seed in range(seeds)]
        ahead = [ours - linear for ours, linear, _ in runs]
        columns = (*zip(*runs, strict=True), ahead)
        cells = [f"{statistics.median(v):.4g} ({min(v):.4g} to {max(v):.4g})" for v in columns]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
