"""Preprocessing components: one task for all of it, or one that plans, many that write, one that finishes.

The planning task's Dataset artifact is a directory that all tasks see. KFP embeds the source of each function
only, so each imports what it calls. An error ends the task after one line that names it.
"""

from pathlib import Path
from typing import Any

from kfp import dsl

from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer.base import files, plugins, progress
from shardline.trainer.base.deserialize import read_options
from shardline.trainer.base.errors import SettingsError
from shardline.trainer.manifest import Manifest

_TOPIC = "preprocess"


def preprocess(
    dataset: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    card: dsl.Output[dsl.HTML],
    source: str,
    label: str = "",
    image_size: int = 0,
    seed: int = 0,
    readers: int = 1,
    options: dict[str, Any] = {},
    fingerprint: str = "",
) -> None:
    """Turns a source of labelled examples into balanced TFRecord shards and a manifest.

    Args:
        dataset: Dataset directory; its metadata gets the fingerprint, the kinds of the labels and
            the records of each split.
        metrics: Records of each split, rejected examples and duplicates.
        card: The dataset card, a page to look at.
        source: digits, tfds:NAME, images:DIR, text:DIR, tfrecord:GLOB, table:PATH, bigquery:TABLE or QUERY,
            or pkg.module:Source.
        label: Target in a table, KIND:COLUMN of kind class, multilabel or regression; "" for column label.
        image_size: Side of the stored square images in pixels, 4..4096; 0 for no resizing.
        seed: Seed of the order of the examples, from 0; not of the split.
        readers: Replicas that will train; shards per split are a multiple of it.
        options: Other fields of `components.preprocess.settings.PreprocessSettings`, {"encoding": "jpeg"}.
        fingerprint: Not read. KFP's cache compares inputs, and other data can have the same source.
    """
    arguments = dict(locals())
    from shardline.components.preprocess.component import preprocess_artifact

    preprocess_artifact(**arguments)


def plan_shards(
    planned: dsl.Output[dsl.Dataset],
    tasks: int,
    source: str,
    label: str = "",
    image_size: int = 0,
    seed: int = 0,
    readers: int = 1,
    options: dict[str, Any] = {},
) -> list[str]:
    """Surveys a source and plans its shards; the parameters from `source` on are those of `preprocess`.

    Args:
        planned: Directory in which the dataset is built.
        tasks: Most parts, each of which one task writes.

    Returns:
        The parts: "0/3", "1/3" and "2/3", each the first input of a task that writes it.
    """
    arguments = dict(locals())
    from shardline.components.preprocess.component import plan_artifact

    return plan_artifact(**arguments)


def write_shards(planned: dsl.Input[dsl.Dataset], part: str) -> None:
    """Writes the shards of one part, the same bytes each time it is started.

    Args:
        planned: Output of `plan_shards`.
        part: Number of the part, from 0, and the number of parts: 2/16.
    """
    from shardline.components.preprocess.component import write_artifact

    write_artifact(planned, part)


def finish_dataset(
    planned: dsl.Input[dsl.Dataset],
    dataset: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    card: dsl.Output[dsl.HTML],
) -> None:
    """Writes the manifest when all shards are complete.

    Args:
        planned: Output of `plan_shards`.
        dataset: The same directory, now a dataset; its metadata gets the fingerprint, the kinds of the
            labels and the records of each split.
        metrics: Records of each split, rejected examples and duplicates.
        card: The dataset card, a page to look at.
    """
    from shardline.components.preprocess.component import finish_artifact

    finish_artifact(planned, dataset, metrics, card)


def preprocess_artifact(dataset: dsl.Dataset, metrics: dsl.Metrics, card: dsl.HTML, **settings: Any) -> None:
    """Writes a source as a Dataset artifact, with its metrics and card."""
    from shardline.components.preprocess.run import preprocess

    with progress.exit_on_error(_TOPIC):
        # A retried task may find a complete dataset.
        data = read_options(PreprocessSettings, settings, "options")
        manifest = preprocess(data, Path(dataset.path), overwrite=True)
        _describe(manifest, dataset, metrics, card)


def plan_artifact(planned: dsl.Dataset, tasks: int, **settings: Any) -> list[str]:
    """Plans a dataset in the directory of an artifact and returns its parts, at most `tasks`."""
    from shardline.components.preprocess.run import plan_dataset

    with progress.exit_on_error(_TOPIC):
        data = read_options(PreprocessSettings, settings, "options")
        parts = plan_dataset(data, Path(planned.path), overwrite=True).useful_parts(tasks)
        return [f"{part}/{parts}" for part in range(parts)]


def write_artifact(dataset: dsl.Dataset, part: str) -> None:
    """Writes the shards of one part into the directory of a planned artifact."""
    from shardline.components.preprocess.run import write_shards

    with progress.exit_on_error(_TOPIC):
        number, _, parts = part.partition("/")
        if not (number.isdecimal() and parts.isdecimal()):
            raise SettingsError(f"part must be an output of plan_shards, such as 0/3, got {part!r}")
        write_shards(Path(dataset.path), int(number), int(parts))


def finish_artifact(planned: dsl.Dataset, dataset: dsl.Dataset, metrics: dsl.Metrics, card: dsl.HTML) -> None:
    """Makes a dataset of the written shards; `dataset` becomes another name of the directory `planned`."""
    from shardline.components.preprocess.run import finish

    with progress.exit_on_error(_TOPIC):
        manifest = finish(Path(planned.path))
        dataset.uri = planned.uri
        _describe(manifest, dataset, metrics, card)


def _describe(manifest: Manifest, dataset: dsl.Dataset, metrics: dsl.Metrics, card: dsl.HTML) -> None:
    from shardline.components.html import page_path
    from shardline.components.preprocess.inspect import render_card

    records = {f"{name}_records": split.records for name, split in manifest.splits.items()}
    labels = ", ".join(f"{label.kind} of {len(label.outputs):,}" for label in manifest.labels)
    dataset.metadata.update(fingerprint=manifest.fingerprint, labels=labels, **records)
    left_out = {"rejected": sum(manifest.rejected.values()), "duplicates": manifest.duplicates.examples}
    if "schema" in manifest.settings:
        left_out["anomalies"] = len(manifest.anomalies)
    for name, value in {**records, **left_out}.items():
        metrics.log_metric(name, value)
    try:
        page = render_card(Path(dataset.path), manifest)
    except Exception as failure:  # the dataset is complete without its card
        progress.report(_TOPIC, f"no card of the dataset: {plugins.describe(failure)}")
        page = "<!doctype html><title>No card</title><p>The card could not be drawn; the log says why."
    path = page_path(card)
    files.write_text(path, page)
    progress.fact("dataset card", str(path))
