"""Evaluation of an exported model: every example of a split, once, as it is stored.

One pass of an exported model over a split: every example once, as it is stored.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn import metrics

from shardline.components.validate.bootstrap import intervals, leads, share_interval
from shardline.components.validate.evaluation import MIN_SLICE, Evaluation, Mistake
from shardline.components.validate.examples import Batch, find_split, read_batches
from shardline.components.validate.metrics import (
    Outcomes,
    calibrate,
    mean_area,
    precision_recall_curves,
    roc_curves,
    score,
    score_classes,
    slice_outcomes,
    worst,
)
from shardline.components.validate.served import (
    Predictions,
    ServedModel,
    batch_difference,
    flips,
    measure_latency,
    peak_memory_mb,
    size_mb,
)
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import DatasetError
from shardline.trainer.progress import advance

MOST_MISTAKES = 24

_SECONDS_BETWEEN_REPORTS = 1.0


def gather(
    model: ServedModel, manifest: Manifest, dataset: Path, split: str, batch_size: int
) -> tuple[Outcomes, tuple[Mistake, ...]]:
    """Returns what a model says of every example, and the wrong predictions that it is surest of.

    Args:
        model: The exported model.
        manifest: Of the dataset.
        dataset: Dataset directory.
        split: Name of the split.
        batch_size: Examples per call.

    Raises:
        DatasetError: When an example cannot be read or served.
    """
    tally = _Tally(manifest.class_names)
    chosen = find_split(manifest, dataset, split)
    for batch in _reported(read_batches(manifest, chosen, dataset, batch_size), chosen.records):
        tally.add(batch, predict(model, batch))
    return tally.outcomes(), tally.mistakes()


def predict(model: ServedModel, batch: Batch) -> Predictions:
    """Predicts a batch: images through the signature for images, rows through the one for examples.

    Raises:
        DatasetError: When one of them cannot be served.
    """
    try:
        if batch.images is None:
            return model.predict_examples(batch.records)
        return model.predict(batch.images)
    except tf.errors.InvalidArgumentError as error:
        # Above the name of the node stands what it met; before it, only where it was built.
        reason = str(error.message).partition("[[")[0].strip().rpartition("\n")[2]
        raise DatasetError(
            f"an example between {batch.keys[0]!r} and {batch.keys[-1]!r} cannot be served: {reason}; "
            "preprocess the data again"
        ) from None


def _reported(batches: Iterator[Batch], total: int) -> Iterator[Batch]:
    seen, reported = 0, time.monotonic()
    for batch in batches:
        yield batch
        seen += len(batch.keys)
        if time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS or seen == total:
            advance("validate", seen, total, "examples")
            reported = time.monotonic()


class _Tally:
    """Gathers truth and predictions, and the worst mistakes among them."""

    def __init__(self, class_names: tuple[str, ...]) -> None:
        self._names = class_names
        self._seen = 0
        self._batches: list[Batch] = []
        self._predictions: list[Predictions] = []
        # A heap: the mistake of which the model was least sure comes first; of equal ones, the later one.
        self._mistakes: list[tuple[float, int, Mistake]] = []

    def add(self, batch: Batch, predictions: Predictions) -> None:
        # The images themselves would not fit in memory.
        self._batches.append(replace(batch, images=None, records=None))
        self._predictions.append(predictions)
        for index in np.flatnonzero(predictions.labels != batch.labels):
            self._keep(batch, predictions, int(index))
        self._seen += len(batch.keys)

    def _keep(self, batch: Batch, predictions: Predictions, index: int) -> None:
        predicted, row = int(predictions.labels[index]), predictions.probabilities[index]
        probability, finite = float(row[predicted]), bool(np.isfinite(row).all())
        sureness, order = (probability if finite else np.inf), -(self._seen + index)
        if len(self._mistakes) == MOST_MISTAKES and (sureness, order) < self._mistakes[0][:2]:
            return
        mistake = Mistake(
            key=batch.keys[index],
            true=self._names[batch.labels[index]],
            predicted=self._names[predicted],
            probability=probability if finite else None,
            image=b"" if batch.images is None else batch.images[index].numpy(),
        )
        heapq.heappush(self._mistakes, (sureness, order, mistake))
        if len(self._mistakes) > MOST_MISTAKES:
            heapq.heappop(self._mistakes)

    def outcomes(self) -> Outcomes:
        return Outcomes(
            class_names=self._names,
            labels=np.concatenate([batch.labels for batch in self._batches]),
            predicted=np.concatenate([item.labels for item in self._predictions]),
            probabilities=np.concatenate([item.probabilities for item in self._predictions]),
            columns={
                name: np.concatenate([batch.columns[name] for batch in self._batches])
                for name in self._batches[0].columns
            },
        )

    def mistakes(self) -> tuple[Mistake, ...]:
        return tuple(mistake for *_, mistake in sorted(self._mistakes, reverse=True))


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
