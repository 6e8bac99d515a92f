"""Exported models: one that answers, and what validation leaves of one that is ready to be published."""

from __future__ import annotations

import json
from pathlib import Path

from shardline.components import model_store
from shardline.components.model_store.champions import VERSION_FILE, Version, current, publish
from shardline.trainer.base.files import TEMPORARY

#: The metrics of each of them.
METRICS = {"accuracy": 0.9, "log_loss": 0.25}


def write_export(
    directory: Path,
    *,
    blessed: bool = True,
    weights: bytes = b"weights",
    judged_against: str = "",
    **metrics: float,
) -> Path:
    """Writes a validated model as validation leaves it, without a real one in it."""
    saved_model = directory / model_store.SAVED_MODEL
    (saved_model / "variables").mkdir(parents=True)
    (saved_model / "saved_model.pb").write_bytes(b"graph")
    (saved_model / "variables" / "variables.index").write_bytes(weights)
    (directory / model_store.EXPORT_FILE).write_text(json.dumps({"fingerprint": "sha256:abc"}))
    verdict = {"blessed": blessed, "reason": "accuracy 0.9 is below 0.95", "champion": judged_against}
    (directory / model_store.BLESSING_FILE).write_text(json.dumps({**verdict, "metrics": metrics or METRICS}))
    return directory


def export_small_model(directory: Path) -> Path:
    """Exports a real model with random weights, with its golden examples."""
    import keras

    from shardline.components.validate.export.export import export_model, take_samples
    from tests.helpers.datasets import CLASS_NAMES, write_dataset

    shape = (12, 12, 3)
    dataset, out = directory / "dataset", directory / "exported"
    dataset.mkdir()
    manifest = write_dataset(dataset, shape=shape, records={"train": 12, "test": 20})
    keras.utils.set_random_seed(7)
    layers = [keras.Input(shape, dtype="uint8"), keras.layers.Flatten(), keras.layers.Rescaling(1 / 255)]
    model = keras.Sequential([*layers, keras.layers.Dense(len(CLASS_NAMES), "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    export_model(model, manifest, out, samples=take_samples(manifest, dataset))
    return out


def judge_again(exported: Path, champion: Path | str, **metrics: float) -> Path:
    """Evaluates a validated model against the present champion, with some metrics."""
    blessing = exported / model_store.BLESSING_FILE
    present = current(champion)
    verdict = {**json.loads(blessing.read_text()), "champion": present.version if present else ""}
    blessing.write_text(json.dumps({**verdict, "metrics": {**verdict["metrics"], **metrics}}))
    return exported


def publish_next(exported: Path, champion: Path | str, *, run: str = "", **metrics: float) -> Version:
    """Publishes a validated model that was evaluated against the present champion."""
    return publish(judge_again(exported, champion, **metrics), champion, run=run)


def contents(directory: Path) -> dict[str, bytes]:
    """Returns the files of a published version, but for its record and what a killed process has left."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != VERSION_FILE and not path.name.startswith(TEMPORARY)
    }
