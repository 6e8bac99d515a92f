"""`python -m shardline.trainer.predict`: a trained model's answers for a split, over all local devices."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.trainer import files, progress, tensorflow_internals
from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.features import CLASS, LABEL, Label
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
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[np.float32]]]:
    """Runs a model.keras over a split, `batch_size` examples per device and step over all local devices.

    The CPU is divided into `cpu_devices` logical ones; 0 leaves it whole. `model_function` is as for
    `saving.load_model`. Returns by label its values, as they are stored, and what the model says of it,
    float32 (examples, outputs): the probability of each class, of each of several labels, or numbers; both in
    the order of the shards. A model that gives NaN is a ModelError.
    """
    tensorflow_internals.import_tensorflow()
    import numpy as np
    import tensorflow as tf

    from shardline.trainer.cluster import strategy as strategies
    from shardline.trainer.data import transforms, view
    from shardline.trainer.data.pipeline import Feed
    from shardline.trainer.data.sharding import EpochPlan
    from shardline.trainer.models.head import output_order, read_heads, to_answers
    from shardline.trainer.saving import load_model, read_recorded_heads

    manifest = manifests.load(dataset)
    if split not in manifest.splits:
        raise DatasetError(f"the dataset has no {split} split, only {sorted(manifest.splits)}")
    settings = TrainSettings(dataset=str(dataset), model=str(model), cpu_devices=cpu_devices)
    strategy = strategies.create(settings, Cluster())
    with strategy.scope():
        loaded = load_model(model, function=model_function)
    prepared = transforms.load(model)
    # Keras shares each batch out over the replicas.
    plan = EpochPlan(manifest.splits[split].records, 1, batch_size * strategy.num_replicas_in_sync)
    batches = Feed(dataset, manifest, split, plan).worker_dataset(1, 0, range(1))
    try:
        inputs = batches.map(lambda x, y: prepared.prepare(x) if prepared else x)
        outputs = loaded.predict(inputs, steps=plan.steps, verbose=0)
        targets = list(batches.map(lambda x, y: y).as_numpy_iterator())
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise view.explain(error, dataset, manifest) or error from error
    info = manifest.info()
    recorded = read_recorded_heads(model)
    # Of a training that has not written down what the outputs are, they are read off the model.
    heads = (
        recorded
        if recorded and recorded.keys() == info.labels.keys()
        else read_heads(loaded, info, prepare=prepared and prepared.prepare)
    )
    order = output_order(loaded, manifest.labels)
    answers = {name: one.numpy() for name, one in to_answers(outputs, heads, manifest.labels, order).items()}
    _check_finite(answers, model, split)
    several = len(info.labels) > 1
    labels = {
        name: np.concatenate([one[name] if several else one for one in targets]) for name in info.labels
    }
    return labels, answers


def _check_finite(answers: Mapping[str, npt.NDArray[np.float32]], model: Path, split: str) -> None:
    import numpy as np

    for name, answer in answers.items():
        if unknown := int((~np.isfinite(answer)).any(axis=1).sum()):
            raise ModelError(
                f"{model} gives {unknown:,} of {len(answer):,} examples of the {split} split an answer for "
                f"{name} that is not finite (NaN): its weights are not, or its inputs overflow; train it "
                "again"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m shardline.trainer.predict", description=__doc__)
    parser.add_argument("model", type=Path, help="model.keras")
    parser.add_argument("dataset", type=Path, help="dataset directory")
    parser.add_argument(
        "output",
        type=Path,
        help="CSV file: label, predicted label, probability by class; or true and predicted values",
    )
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
        labels, answers = predict(**given)
        manifest = manifests.load(options.dataset)
        tables = [_columns(label, labels[label.name], answers[label.name]) for label in manifest.labels]
        text = io.StringIO()
        writer = csv.writer(text)
        prefixes = [f"{label.name} " if len(tables) > 1 else "" for label in manifest.labels]
        titles = [
            f"{prefix}{title}" for prefix, (head, _) in zip(prefixes, tables, strict=True) for title in head
        ]
        writer.writerow(titles)
        for rows in zip(*(rows for _, rows in tables), strict=True):
            writer.writerow([cell for row in rows for cell in row])
        files.write_text(options.output, text.getvalue())
        count = len(next(iter(labels.values())))
        progress.say("predict", f"{count:,} examples: {options.output}")
        if manifest.is_classes:
            right = float((answers[LABEL].argmax(axis=1) == labels[LABEL]).mean())
            progress.say("predict", f"{right:.4f} of them right")


def _columns(label: Label, true: Any, said: Any) -> tuple[list[str], list[list[str]]]:
    """Returns the titles of a label's columns, and their cells for each example."""
    names = label.outputs
    shown = [[f"{value:.6g}" for value in row] for row in said]
    if label.kind == CLASS:
        pairs = zip(true, said, shown, strict=True)
        return ["label", "predicted", *names], [[names[t], names[row.argmax()], *s] for t, row, s in pairs]
    truths = [[f"{value:.6g}" for value in row] for row in true.reshape(len(true), -1)]
    titles = [f"{name}{suffix}" for suffix in ("", " predicted") for name in names]
    return titles, [[*t, *s] for t, s in zip(truths, shown, strict=True)]


if __name__ == "__main__":
    main()
