"""A finished dataset as Kubeflow artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer import progress
from shardline.trainer.data.manifest import Manifest

if TYPE_CHECKING:
    from kfp import dsl

_TOPIC = "preprocess"


def preprocess_artifact(dataset: dsl.Dataset, metrics: dsl.Metrics, card: dsl.HTML, **settings: Any) -> None:
    """Writes a source into a Dataset artifact, and its metrics and card.

    Args:
        dataset: Its directory becomes the dataset.
        metrics: As in `describe`.
        card: As in `describe`.
        settings: The values of a `PreprocessSettings`; an empty `split` means the default.

    Raises:
        SystemExit: With the error's exit code, after its one line was reported.
    """
    from shardline.components.preprocess.run import preprocess

    with progress.errors_end_the_process(_TOPIC):
        # A task that is tried again finds what the first try has left, a whole dataset perhaps.
        manifest = preprocess(make_settings(settings), Path(dataset.path), overwrite=True)
        describe(manifest, dataset, metrics, card)


def plan_artifact(dataset: dsl.Dataset, tasks: int, **settings: Any) -> list[int]:
    """Plans a dataset in the directory of an artifact and returns the numbers of the tasks that write it.

    Raises:
        SystemExit: With the error's exit code, after its one line was reported.
    """
    from shardline.components.preprocess.run import plan_dataset

    with progress.errors_end_the_process(_TOPIC):
        shards = plan_dataset(make_settings(settings), Path(dataset.path), overwrite=True)
        return list(range(max(1, min(tasks, len(shards)))))


def write_artifact(dataset: dsl.Dataset, task: int, tasks: int) -> None:
    """Writes one task's shards into the directory of an artifact that was planned.

    Raises:
        SystemExit: With the error's exit code, after its one line was reported.
    """
    from shardline.components.preprocess.run import write_shards

    with progress.errors_end_the_process(_TOPIC):
        write_shards(Path(dataset.path), task, tasks)


def finish_artifact(planned: dsl.Dataset, dataset: dsl.Dataset, metrics: dsl.Metrics, card: dsl.HTML) -> None:
    """Makes a dataset of the written shards; `dataset` becomes another name of the directory `planned`.

    Raises:
        SystemExit: With the error's exit code, after its one line was reported.
    """
    from shardline.components.preprocess.run import finish

    with progress.errors_end_the_process(_TOPIC):
        manifest = finish(Path(planned.path))
        dataset.uri = planned.uri
        describe(manifest, dataset, metrics, card)


def describe(manifest: Manifest, dataset: dsl.Dataset, metrics: dsl.Metrics, card: dsl.HTML) -> None:
    """Records what is in a dataset.

    Args:
        manifest: Its manifest.
        dataset: Its metadata gets `fingerprint`, `classes` and the records of each split
            (`train_records`, ...).
        metrics: Gets the records of each split, `rejected` and `duplicates`.
        card: Gets the dataset card.
    """
    from shardline.components.preprocess.inspect.card import render_card
    from shardline.trainer import files

    records = {f"{name}_records": split.records for name, split in manifest.splits.items()}
    dataset.metadata.update(fingerprint=manifest.fingerprint, classes=len(manifest.class_names), **records)
    counts = records | {
        "rejected": sum(manifest.rejected.values()),
        "duplicates": manifest.duplicates.examples,
    }
    for name, value in counts.items():
        metrics.log_metric(name, value)
    Path(card.path).parent.mkdir(parents=True, exist_ok=True)
    files.write_text(Path(card.path), render_card(Path(dataset.path), manifest))


def make_settings(values: dict[str, Any]) -> PreprocessSettings:
    """Returns the settings that a component's parameters give.

    Raises:
        SettingsError: They are not valid.
    """
    return PreprocessSettings(**{name: value for name, value in values.items() if name != "split" or value})
