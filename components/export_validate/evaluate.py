"""Evaluation of an exported model: every example of a split, once, as it is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import tensorflow as tf
from sklearn import metrics

from shardline.components.export_validate.bootstrap import intervals, leads, share_interval
from shardline.components.export_validate.calibration import calibrate
from shardline.components.export_validate.curves import precision_recall_curves, roc_curves, worst
from shardline.components.export_validate.evaluation import MIN_SLICE, Evaluation
from shardline.components.export_validate.examples import find_split, read_batches
from shardline.components.export_validate.gathering import gather
from shardline.components.export_validate.latency import measure_latency, peak_memory_mb, size_mb
from shardline.components.export_validate.outcomes import Outcomes
from shardline.components.export_validate.scores import mean_area, score, score_classes
from shardline.components.export_validate.served import ServedModel
from shardline.components.export_validate.slices import slice_outcomes
from shardline.components.export_validate.stability import batch_difference, flips
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import Manifest

_REQUESTS = 32


@dataclass(frozen=True)
class Measured:
    """An evaluation, and the single predictions that it is made from."""

    evaluation: Evaluation
    outcomes: Outcomes


def evaluate(
    saved_model: Path, dataset: Path, split: str = "test", *, batch_size: int = 64, min_slice: int = MIN_SLICE
) -> Evaluation:
    """Returns the evaluation of `measure`; arguments and errors are the same."""
    return measure(saved_model, dataset, split, batch_size=batch_size, min_slice=min_slice).evaluation


def compare(challenger: Measured, champion: Measured) -> Evaluation:
    """Returns the challenger's evaluation with that of the champion on the same examples."""
    ours, theirs = challenger.outcomes, champion.outcomes
    metrics_of_theirs = dict(champion.evaluation.metrics)
    # The process has had both models in memory by then.
    del metrics_of_theirs["peak_memory_mb"]
    return replace(
        challenger.evaluation,
        champion=replace(champion.evaluation, mistakes=(), metrics=metrics_of_theirs),
        leads=leads(ours.labels, ours.predicted, theirs.predicted, ours.class_names),
    )


def measure(
    saved_model: Path, dataset: Path, split: str = "test", *, batch_size: int = 64, min_slice: int = MIN_SLICE
) -> Measured:
    """Evaluates an exported model on a split of a dataset.

    Every example goes once through the model's own signature: images as files through
    `serving_default`, rows of a table through `serving_example`.

    Args:
        saved_model: Directory of the SavedModel.
        dataset: Dataset directory.
        split: Name of the split.
        batch_size: Examples per call.
        min_slice: Smallest slice that a rule may be judged on.

    Raises:
        ModelError: When there is no SavedModel with the signatures that Shardline exports.
        DatasetError: When the dataset or the split cannot be used.
    """
    manifest = manifests.load(dataset)
    find_split(manifest, dataset, split)
    model = ServedModel(saved_model, len(manifest.class_names))
    outcomes, mistakes = gather(model, manifest, dataset, split, batch_size)
    labels, predicted, names = outcomes.labels, outcomes.predicted, outcomes.class_names
    bins = calibrate(outcomes)
    roc, precision_recall = roc_curves(outcomes), precision_recall_curves(outcomes)
    measured = score(outcomes, bins)
    if roc:
        measured |= {"roc_auc": mean_area(roc), "pr_auc": mean_area(precision_recall)}
    found = dict(intervals(labels, predicted, names))
    if "top5_accuracy" in measured:
        found["top5_accuracy"] = share_interval(round(measured["top5_accuracy"] * len(labels)), len(labels))
    measured |= _cost(model, manifest, dataset, split) | {"size_mb": size_mb(saved_model)}
    evaluation = Evaluation(
        fingerprint=manifest.fingerprint,
        split=split,
        examples=len(labels),
        accuracy=measured["accuracy"],
        log_loss=measured.get("log_loss"),
        non_finite=int((~outcomes.finite).sum()),
        class_names=names,
        classes=score_classes(outcomes),
        confusion=tuple(
            tuple(row)
            for row in metrics.confusion_matrix(labels, predicted, labels=list(range(len(names)))).tolist()
        ),
        mistakes=mistakes,
        metrics=measured,
        intervals=found,
        slices=slice_outcomes(outcomes, min_slice),
        calibration=bins,
        roc=worst(roc),
        precision_recall=worst(precision_recall),
    )
    return Measured(evaluation, outcomes)


def _cost(model: ServedModel, manifest: Manifest, dataset: Path, split: str) -> dict[str, float]:
    """Returns what the model costs and how stable it is, on the first examples."""
    batch = next(read_batches(manifest, manifest.splits[split], dataset, _REQUESTS))
    is_table = batch.images is None
    serve = model.predict_examples if is_table else model.predict
    requests: tf.Tensor = batch.records if is_table else batch.images
    return {
        **measure_latency(serve, requests),
        "batch_difference": batch_difference(serve, requests),
        **({} if is_table else flips(model.predict, requests)),
        "peak_memory_mb": peak_memory_mb(),
    }
