"""Datasets as Kubeflow artifacts: what each preprocessing task does with those that it is given.

A mistake ends the task after one line that says which, with the error's exit code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer import files, plugins, progress
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.records import read

if TYPE_CHECKING:
    from kfp import dsl

_TOPIC = "preprocess"


def preprocess_artifact(
    data: Mapping[str, Any], processes: int, dataset: dsl.Dataset, metrics: dsl.Metrics, card: dsl.HTML
) -> None:
    """Writes a source into a Dataset artifact, and its metrics and card."""
    from shardline.components.preprocess.run import preprocess

    with progress.errors_end_the_process(_TOPIC):
        # A task that is tried again finds what the first try has left, a whole dataset perhaps.
        manifest = preprocess(_settings(data, processes), Path(dataset.path), overwrite=True)
        _describe(manifest, dataset, metrics, card)


def plan_artifact(data: Mapping[str, Any], processes: int, dataset: dsl.Dataset, tasks: int) -> list[int]:
    """Plans a dataset in the directory of an artifact and returns the numbers of the tasks that write it."""
    from shardline.components.preprocess.run import plan_dataset

    with progress.errors_end_the_process(_TOPIC):
        plan = plan_dataset(_settings(data, processes), Path(dataset.path), overwrite=True)
        return list(range(plan.useful_tasks(tasks)))


def write_artifact(dataset: dsl.Dataset, task: int, tasks: int) -> None:
    """Writes one task's shards into the directory of an artifact that was planned."""
    from shardline.components.preprocess.run import write_shards

    with progress.errors_end_the_process(_TOPIC):
        write_shards(Path(dataset.path), task, tasks)


def finish_artifact(planned: dsl.Dataset, dataset: dsl.Dataset, metrics: dsl.Metrics, card: dsl.HTML) -> None:
    """Makes a dataset of the written shards; `dataset` becomes another name of the directory `planned`."""
    from shardline.components.preprocess.run import finish

    with progress.errors_end_the_process(_TOPIC):
        manifest = finish(Path(planned.path))
        dataset.uri = planned.uri
        _describe(manifest, dataset, metrics, card)


def _settings(data: Mapping[str, Any], processes: int) -> PreprocessSettings:
    return replace(read(PreprocessSettings, data, "data"), processes=processes)


def _in_words(manifest: Manifest) -> str:
    """Returns the labels in a few words, for a page that shows metadata."""
    kinds = [f"{label.kind} of {len(label.outputs):,}" for label in manifest.labels]
    return ", ".join(kinds)


def _describe(manifest: Manifest, dataset: dsl.Dataset, metrics: dsl.Metrics, card: dsl.HTML) -> None:
    """Records what is in a dataset, in its metadata, in the metrics and on its card."""
    from shardline.components.html import page_path
    from shardline.components.preprocess.inspect.card import render_card

    records = {f"{name}_records": split.records for name, split in manifest.splits.items()}
    dataset.metadata.update(fingerprint=manifest.fingerprint, labels=_in_words(manifest), **records)
    left_out = {"rejected": sum(manifest.rejected.values()), "duplicates": manifest.duplicates.examples}
    if "schema" in manifest.settings:
        left_out["anomalies"] = len(manifest.anomalies)
    for name, value in {**records, **left_out}.items():
        metrics.log_metric(name, value)
    try:
        page = render_card(Path(dataset.path), manifest)
    except Exception as failure:  # the dataset is there, and its card only shows it
        progress.say(_TOPIC, f"no card of the dataset: {plugins.describe(failure)}")
        page = "<!doctype html><title>No card</title><p>The card could not be drawn; the log says why."
    path = page_path(card)
    files.write_text(path, page)
    progress.fact("dataset card", str(path))
