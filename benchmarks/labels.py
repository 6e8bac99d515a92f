"""Labels: real data of every kind from a file to a judged export, beside plain Keras and scikit-learn.

python -m benchmarks.labels [--data DIR] [--seeds N] [--only NAME,NAME]

Each dataset is preprocessed once. For each seed Shardline trains a built-in model, exports it and judges the
export, with nothing set but the model and its epochs; Keras' own `fit` trains the same model function on the
same examples for as long; and scikit-learn's usual choice is fitted to them. All are scored on the same test
examples, the first by its report, the others by scikit-learn.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.datasets
from PIL import Image
from sklearn import metrics
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from shardline.components.preprocess.run import preprocess
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.text import table
from shardline.trainer.manifest import Manifest

#: Of the photos: side of a crop in pixels, and crops of each photo.
CROP, CROPS = 96, 25
BATCH = 32

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One dataset: its source, the model and its epochs, and what is usual in scikit-learn."""

    source: Callable[[Path, Path], str]
    settings: Mapping[str, Any]
    model: str
    epochs: int
    peers: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)


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
    random, rows, measured = np.random.default_rng(0), [], []
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
            rows.append((name, photo.stem))
            measured.append((grey.mean(), green - (red + blue) / 2, detail))
    # Half of the crops have each of the labels.
    above = np.array(measured) > np.median(measured, axis=0)
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "photo", "bright", "green", "detailed"])
        writer.writerows([*row, *map(int, flags)] for row, flags in zip(rows, above, strict=True))
    return f"images:{folder}"


def _forest(seed: int) -> Any:
    return RandomForestClassifier(300, random_state=seed)


def _linear(_: int) -> Any:
    return make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13)))


def _words(last: Any) -> Any:
    return make_pipeline(TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True), last)


_TEXT = {"key": "id", "text": "text"}


def _snippets(data: Path, _: Path) -> str:
    return f"table:{data}/text/snippets.csv"


TASKS = {
    "diabetes": Task(
        from_sklearn("diabetes"), {"label": "regression:target"}, "mlp", 30,
        {"ridge": _linear, "forest": lambda seed: RandomForestRegressor(300, random_state=seed)},
    ),
    "wine": Task(from_sklearn("wine"), {"label": "class:target"}, "mlp", 30, {"forest": _forest}),
    "breast cancer": Task(
        from_sklearn("breast_cancer"), {"label": "class:target"}, "mlp", 30, {"forest": _forest}
    ),
    "snippets, kind": Task(
        _snippets, {"label": "class:kind", "features": _TEXT}, "text", 5,
        {"tf-idf, logistic": lambda seed: _words(LogisticRegression(C=10, max_iter=1000))},
    ),
    "snippets, sentiment": Task(
        _snippets, {"label": "regression:sentiment", "features": _TEXT}, "text", 5,
        {"tf-idf, ridge": lambda seed: _words(Ridge(1.0))},
    ),
    "snippets, both": Task(
        _snippets, {"label": "class:kind;regression:sentiment", "features": _TEXT}, "text", 5
    ),
    "photos": Task(crops, {"label": "multilabel:bright,green,detailed", "group": "photo"}, "mnist_cnn", 15),
}  # fmt: skip


def read(directory: Path, manifest: Manifest, split: str) -> tuple[Arrays, Arrays]:
    """Returns the inputs and the targets of a split, as NumPy arrays by name."""
    import tensorflow as tf

    from shardline.trainer.data.examples import parse_batch

    paths = [str(directory / shard.file) for shard in manifest.splits[split].shards]
    records = tf.constant([record.numpy() for record in tf.data.TFRecordDataset(paths)])
    x, y = parse_batch(records, manifest.inputs, manifest.labels)
    x = {name: one.numpy() for name, one in x.items()} if isinstance(x, dict) else {"image": x.numpy()}
    y = y if isinstance(y, dict) else {manifest.labels[0].name: y}
    return x, {name: one.numpy() for name, one in y.items()}


def measure(manifest: Manifest, truth: Arrays, said: Arrays) -> dict[str, float]:
    """Returns the metric that counts first of each label, from classes, labels or numbers."""
    found = {}
    for label in manifest.labels:
        prefix = f"{label.name}." if len(manifest.labels) > 1 else ""
        true, given = truth[label.name], np.asarray(said[label.name])
        if label.kind == "class":
            found[f"{prefix}accuracy"] = metrics.accuracy_score(true, given)
        elif label.kind == "multilabel":
            found[f"{prefix}macro_f1"] = metrics.f1_score(true, given, average="macro")
        else:
            found[f"{prefix}rmse"] = metrics.root_mean_squared_error(true, given.reshape(true.shape))
    return {name: float(value) for name, value in found.items()}


def ours(task: Task, dataset: Path, out: Path, seed: int) -> dict[str, float]:
    """Trains, exports and judges by Shardline's own programs; returns what the report says."""
    from shardline.components.validate.metrics import MAIN
    from shardline.components.validate.rules import Gate
    from shardline.components.validate.validation import validate

    command = [sys.executable, "-m", "shardline.trainer.task", "--dataset", dataset, "--model", task.model]
    command += ["--model-dir", out / "model", "--epochs", task.epochs, "--seed", seed]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    whole = validate(out / "model/model.keras", dataset, out / "exported", gate=Gate()).evaluation
    parts = {f"{part.label}." if whole.parts else "": MAIN[part.kind] for part in whole.each}
    return {f"{prefix}{name}": whole.metrics[f"{prefix}{name}"] for prefix, name in parts.items()}


def keras_fit(task: Task, dataset: Path, manifest: Manifest, seed: int) -> dict[str, float]:
    """Trains the same model function by Keras' `fit`; returns the same metrics."""
    import keras
    import tensorflow as tf

    from shardline.trainer.loop.build import build

    def inputs(x: Arrays) -> Any:
        return (
            x["image"] if manifest.inputs.keys() == {"image"} else {name: x[name] for name in manifest.inputs}
        )

    keras.utils.set_random_seed(seed + 1)
    (x, y), (test_x, test_y) = (read(dataset, manifest, split) for split in ("train", "test"))
    model = build(task.model, _info(dataset, manifest), {})
    single = len(manifest.labels) == 1
    targets = {name: one.astype(np.float32) if one.ndim == 2 else one for name, one in y.items()}
    targets = {
        name: one[:, None] if one.dtype == np.float32 and one.ndim == 1 else one
        for name, one in targets.items()
    }
    batches = tf.data.Dataset.from_tensor_slices(
        (inputs(x), targets if not single else next(iter(targets.values())))
    )
    model.fit(batches.shuffle(len(next(iter(x.values()))), seed).batch(BATCH), epochs=task.epochs, verbose=0)
    answers = model.predict(tf.data.Dataset.from_tensor_slices(inputs(test_x)).batch(BATCH), verbose=0)
    answers = {manifest.labels[0].name: answers} if single else answers
    kinds = {label.name: label.kind for label in manifest.labels}
    said = {
        name: one.argmax(axis=1)
        if kinds[name] == "class"
        else one > 0.5
        if kinds[name] == "multilabel"
        else one
        for name, one in answers.items()
    }
    return measure(manifest, test_y, said)


def _info(dataset: Path, manifest: Manifest) -> Any:
    from shardline.trainer.data import examples

    return examples.describe_dataset(dataset)


def peer(choice: Any, dataset: Path, manifest: Manifest) -> dict[str, float]:
    """Fits scikit-learn's choice to the training split; returns the same metrics."""
    (x, y), (test_x, test_y) = (read(dataset, manifest, split) for split in ("train", "test"))

    def columns(inputs: Arrays) -> Any:
        if "text" in inputs:
            return [text.decode() for text in inputs["text"]]
        return np.stack(list(inputs.values()), axis=1)

    (name,) = y
    choice.fit(columns(x), y[name])
    return measure(manifest, test_y, {name: choice.predict(columns(test_x))})


def main() -> None:
    """Prints a line for each dataset and contender: median and spread over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    given = os.environ.get("SHARDLINE_TEST_DATA")
    parser.add_argument("--data", type=Path, default=given, required=not given)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(TASKS).replace(", ", "; "))
    options = parser.parse_args()
    chosen = [name.strip().replace("; ", ", ") for name in options.only.split(",")]
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as named:
        scratch = Path(named)
        for name in chosen:
            task, dataset = TASKS[name], scratch / name.replace(" ", "-")
            manifest = preprocess(
                PreprocessSettings(source=task.source(options.data, scratch), **_of(task, scratch)), dataset
            )
            found: dict[str, list[dict[str, float]]] = {}
            for seed in range(options.seeds):
                out = scratch / f"{dataset.name}-{seed}"
                found.setdefault("Shardline, export judged", []).append(ours(task, dataset, out, seed))
                found.setdefault("Keras fit", []).append(keras_fit(task, dataset, manifest, seed))
                for title, make in task.peers.items():
                    found.setdefault(title, []).append(peer(make(seed), dataset, manifest))
            for contender, results in found.items():
                for metric in results[0]:
                    values = [result[metric] for result in results]
                    spread = f"{min(values):.4g}-{max(values):.4g}"
                    rows.append((name, contender, metric, f"{statistics.median(values):.4g}", spread))
    print(table(("dataset", "contender", "metric", "median", "spread"), rows, align="lllrr"))


def _of(task: Task, scratch: Path) -> dict[str, Any]:
    more = {"labels": str(scratch / "crops/labels.csv")} if task.source is crops else {}
    return {**task.settings, **more}


if __name__ == "__main__":
    main()
