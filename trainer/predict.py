"""`python -m shardline.trainer.predict`: a trained model's answers for a split, over all local devices."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.trainer import files, progress, tensorflow_internals
from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.data import manifest as manifests
from shardline.trainer.errors import DatasetError, ModelError
from shardline.trainer.settings import TrainSettings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def predict(
    model: Path,
    dataset: Path,
    split: str = "test",
    *,
    batch_size: int = 32,
    cpu_devices: int = 0,
    model_function: str = "",
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Runs a model.keras over a split, `batch_size` examples per device and step over all local devices.

    The CPU is divided into `cpu_devices` logical ones; 0 leaves it whole. `model_function` is as for
    `saving.load_model`. Returns labels, int64 (examples,), and the probability of each class, float32
    (examples, classes), in the order of the shards. A model that gives NaN is a ModelError.
    """
    tensorflow_internals.import_tensorflow()
    import numpy as np
    import tensorflow as tf

    from shardline.trainer.cluster import strategy as strategies
    from shardline.trainer.data import faults
    from shardline.trainer.data.pipeline import Feed
    from shardline.trainer.data.sharding import EpochPlan
    from shardline.trainer.models.head import to_probabilities
    from shardline.trainer.saving import load_model, read_recorded_head

    manifest = manifests.load(dataset)
    if split not in manifest.splits:
        raise DatasetError(f"the dataset has no {split} split, only {sorted(manifest.splits)}")
    settings = TrainSettings(dataset=str(dataset), model=str(model), cpu_devices=cpu_devices)
    strategy = strategies.create(settings, Cluster())
    with strategy.scope():
        loaded = load_model(model, function=model_function)
    # Keras shares each batch out over the replicas.
    plan = EpochPlan(manifest.splits[split].records, 1, batch_size * strategy.num_replicas_in_sync)
    batches = Feed(dataset, manifest, split, plan).worker_dataset(1, 0, range(1))
    try:
        outputs = loaded.predict(batches.map(lambda x, y: x), steps=plan.steps, verbose=0)
        labels = np.concatenate(list(batches.map(lambda x, y: y).as_numpy_iterator()))
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise faults.explain(error, dataset, manifest) or error from error
    # Of a training that has not written down what the outputs are, they are taken as they come.
    probabilities = to_probabilities(outputs, read_recorded_head(model) or "probabilities").numpy()
    unknown = int((~np.isfinite(probabilities)).any(axis=1).sum())
    if unknown:
        raise ModelError(
            f"{model} gives {unknown:,} of {len(labels):,} examples of the {split} split probabilities that "
            "are not finite numbers (NaN): its weights are not, or its inputs overflow; train it again"
        )
    return labels, probabilities


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m shardline.trainer.predict", description=__doc__)
    parser.add_argument("model", type=Path, help="model.keras")
    parser.add_argument("dataset", type=Path, help="dataset directory")
    parser.add_argument("output", type=Path, help="CSV file: label, predicted label, probability by class")
    parser.add_argument("--split", default="test")
    parser.add_argument("--batch-size", type=int, default=32, help="examples per device and step")
    parser.add_argument("--cpu-devices", type=int, default=0, help="logical devices to divide the CPU into")
    parser.add_argument(
        "--model-function",
        default="",
        metavar="PKG.MODULE:NAME",
        help="by which the model was built: its module is imported for the classes that it registers",
    )
    options = parser.parse_args(arguments)
    with progress.errors_end_the_process("predict"):
        given = {name: value for name, value in vars(options).items() if name != "output"}
        labels, outputs = predict(**given)
        names = manifests.load(options.dataset).class_names
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["label", "predicted", *names])
        for label, row in zip(labels, outputs, strict=True):
            writer.writerow([names[label], names[row.argmax()], *(f"{value:.6g}" for value in row)])
        files.write_text(options.output, text.getvalue())
        right = float((outputs.argmax(axis=1) == labels).mean())
        progress.say("predict", f"{len(labels):,} examples, {right:.4f} of them right: {options.output}")


if __name__ == "__main__":
    main()
