"""Evaluation of an exported model: one pass over a split, every example once, as it is stored.

Images go as files through the signature `serving_default`, rows of a table through `serving_example`.
Examples come straight from the shards that the manifest names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from sklearn.metrics import confusion_matrix

from shardline.components.validate import metrics
from shardline.components.validate.answers import Predictions
from shardline.components.validate.evaluation import (
    COUNTED,
    MIN_SLICE,
    QUALITY,
    Baseline,
    Evaluation,
    Mistake,
)
from shardline.components.validate.metrics import Outcomes
from shardline.components.validate.served import REQUESTS, ServedModel, measure_costs
from shardline.trainer.data.decode import encode_stored
from shardline.trainer.data.features import LABEL
from shardline.trainer.data.manifest import Manifest, Split, check_files
from shardline.trainer.errors import DatasetError
from shardline.trainer.progress import advance

#: Wrong predictions that are kept as examples.
MOST_MISTAKES = 24

_SECONDS_BETWEEN_REPORTS = 1.0

# All others are what the model costs, or of the export.
_FROM_OUTCOMES = {metric.name for metric in QUALITY}

# TensorFlow's type of a stored feature, where it is neither text nor an image.
_STORED = {"int64": tf.int64, "float32": tf.float32}

_Ranked = tuple[float, int, Mistake]


@dataclass(frozen=True)
class Batch:
    """Some examples, as they are stored.

    Attributes:
        images: Encoded images, a string tensor of shape [n]; raw pixels become a PNG. None for a table.
        labels: int64 [n].
        records: Serialized tf.train.Example, a string tensor of shape [n].
        columns: Every further feature of one value, by name, each [n]; text as str.
    """

    images: tf.Tensor | None
    labels: npt.NDArray[np.int64]
    keys: tuple[str, ...]
    records: tf.Tensor
    columns: Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Examples:
    """The examples of one split of the dataset in `directory`.

    Raises DatasetError when the split is missing or empty, or a shard is missing or has another size than
    the manifest says.
    """

    directory: Path
    manifest: Manifest
    name: str = "test"

    def __post_init__(self) -> None:
        split = self.manifest.splits.get(self.name)
        if split is None or split.records == 0:
            raise DatasetError(
                f"the dataset {self.directory} has no examples in its {self.name} split, there is nothing to "
                f"evaluate on; its splits: {', '.join(self.manifest.splits) or 'none'}"
            )
        check_files(self.directory, split.shards)

    @property
    def split(self) -> Split:
        """The split in the manifest."""
        return self.manifest.splits[self.name]

    def batches(self, size: int) -> Iterator[Batch]:
        """Yields every example once, in the order of the shards.

        Raises DatasetError when a shard is damaged, or a label or the number of examples does not fit the
        manifest.
        """
        paths = [str(self.directory / shard.file) for shard in self.split.shards]
        records = tf.data.TFRecordDataset(paths, compression_type=self.manifest.compression.upper())
        batches = records.batch(size).map(lambda some: (some, _parse(some, self.manifest))).prefetch(2)
        seen = 0
        try:
            for serialized, parsed in batches:
                batch = Batch(
                    images=parsed.pop("image", None),
                    labels=parsed.pop("label").numpy(),
                    keys=tuple(_text(parsed.pop("key").numpy()).tolist()),
                    records=serialized,
                    columns={name: _text(column.numpy()) for name, column in parsed.items()},
                )
                _check_labels(batch, len(self.manifest.class_names))
                seen += len(batch.keys)
                yield batch
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
            reason = str(error.message).strip().partition("\n")[0]
            raise DatasetError(
                f"a shard in {self.directory} is damaged after {seen:,} examples: {reason}; "
                "preprocess the data again"
            ) from None
        if seen != self.split.records:
            raise DatasetError(
                f"the shards in {self.directory} hold {seen:,} examples, the manifest says "
                f"{self.split.records:,}; preprocess the data again"
            )


@dataclass(frozen=True)
class Measured:
    """An evaluation, the single predictions that it is made from, and the smallest slice that is judged."""

    evaluation: Evaluation
    outcomes: Outcomes
    min_slice: int = MIN_SLICE

    def only(self, chosen: npt.NDArray[np.bool_]) -> Measured:
        """Returns the same of some of the examples; what the model costs was measured on all."""
        outcomes = self.outcomes.only(chosen)
        fields = _summarize(outcomes, self.min_slice, self.evaluation.metrics)
        evaluation = replace(self.evaluation, mistakes=(), baseline=None, **fields)
        return Measured(evaluation, outcomes, self.min_slice).counted()

    def with_metrics(self, notes: Mapping[str, str] | None = None, /, **measured: float) -> Measured:
        """Returns this with more metrics, and with `notes` on them by their names."""
        metrics_of_all = {**self.evaluation.metrics, **measured}
        notes = {**self.evaluation.notes, **(notes or {})}
        return replace(self, evaluation=replace(self.evaluation, metrics=metrics_of_all, notes=notes))

    def counted(self) -> Measured:
        """Returns this with what is counted of the examples as metrics."""
        return self.with_metrics(
            examples=self.evaluation.examples,
            non_finite=self.evaluation.non_finite,
            never_predicted=len(self.evaluation.blind_to),
        )


def measure(
    saved_model: Path, examples: Examples, *, batch_size: int = 64, min_slice: int = MIN_SLICE
) -> Measured:
    """Evaluates an exported model on a split of a dataset; `batch_size` is the number of examples per call.

    Raises ModelError when the SavedModel is missing or lacks a signature that Shardline exports, DatasetError
    when an example cannot be read or served.
    """
    model = ServedModel(saved_model, examples.manifest)
    outcomes, mistakes = gather(model, examples, batch_size)
    first = next(examples.batches(REQUESTS))
    costs = measure_costs(model, first.images, first.records)
    evaluation = Evaluation(
        fingerprint=examples.manifest.fingerprint,
        split=examples.name,
        class_names=outcomes.class_names,
        mistakes=mistakes,
        **_summarize(outcomes, min_slice, costs),
    )
    baseline = measure_baseline(outcomes, examples.manifest, evaluation.metrics)
    return Measured(replace(evaluation, baseline=baseline), outcomes, min_slice).counted()


def _summarize(outcomes: Outcomes, min_slice: int, others: Mapping[str, float]) -> dict[str, Any]:
    """Returns the fields of an evaluation that follow from the outcomes; `others` are further metrics."""
    labels, predicted, names = outcomes.labels, outcomes.predicted, outcomes.class_names
    bins = metrics.calibrate(outcomes)
    roc, precision_recall = metrics.draw_curves(outcomes)
    measured = metrics.score(outcomes, bins)
    if roc:
        measured["roc_auc"] = metrics.mean_area(roc)
        measured["pr_auc"] = metrics.mean_area(precision_recall)
    found = metrics.intervals(labels, predicted, names)
    if "top5_accuracy" in measured:
        right = round(measured["top5_accuracy"] * len(labels))
        found["top5_accuracy"] = metrics.share_interval(right, len(labels))
    confusion = confusion_matrix(labels, predicted, labels=list(range(len(names)))).tolist()
    return {
        "examples": len(labels),
        "accuracy": measured["accuracy"],
        "log_loss": measured.get("log_loss"),
        "non_finite": int((~outcomes.finite).sum()),
        "classes": metrics.score_classes(outcomes),
        "confusion": tuple(map(tuple, confusion)),
        "metrics": measured | {name: value for name, value in others.items() if name not in _FROM_OUTCOMES},
        "intervals": found,
        "slices": metrics.slice_outcomes(outcomes, min_slice),
        "calibration": bins,
        "roc": metrics.worst(roc),
        "precision_recall": metrics.worst(precision_recall),
    }


def measure_baseline(outcomes: Outcomes, manifest: Manifest, ours: Mapping[str, float]) -> Baseline:
    """Returns the trivial answer, the class that is most frequent in training, on the same examples.

    `ours` are the model's own metrics.
    """
    train, labels = manifest.splits.get("train"), outcomes.labels
    counts = train.class_counts if train else np.bincount(labels)
    answer = int(np.argmax(counts))
    leads = metrics.leads(labels, outcomes.predicted, np.full_like(labels, answer), outcomes.class_names)
    return Baseline(
        answer=outcomes.class_names[answer],
        metrics={name: ours[name] - leads[name].difference for name in COUNTED},
        leads={name: leads[name] for name in COUNTED},
    )


def compare(
    challenger: Measured, champion: Measured, trained_on: npt.NDArray[np.bool_] | None = None
) -> Evaluation:
    """Returns the challenger's evaluation with that of the champion on the same examples.

    `trained_on` says which of them the champion was trained on: these are left out, for both.
    """
    whole = challenger.evaluation
    if trained_on is not None and trained_on.any():
        challenger, champion = challenger.only(~trained_on), champion.only(~trained_on)
        whole = replace(whole, left_out=int(trained_on.sum()), compared=challenger.evaluation)
    ours, theirs = challenger.outcomes, champion.outcomes
    metrics_of_theirs = dict(champion.evaluation.metrics)
    # The process has had both models in memory by then.
    del metrics_of_theirs["peak_memory_mb"]
    return replace(
        whole,
        champion=replace(champion.evaluation, mistakes=(), metrics=metrics_of_theirs),
        leads=metrics.leads(ours.labels, ours.predicted, theirs.predicted, ours.class_names),
    )


def gather(model: ServedModel, examples: Examples, batch_size: int) -> tuple[Outcomes, tuple[Mistake, ...]]:
    """Returns a model's answers to all examples, and the wrong predictions that it was surest of."""
    names = examples.manifest.class_names
    batches, answers, seen = [], [], 0
    ranked: list[_Ranked] = []
    for batch in _reported(examples.batches(batch_size), examples.split.records):
        answer = _predict(model, batch)
        ranked = sorted([*ranked, *_find_mistakes(batch, answer, seen, names)], reverse=True)[:MOST_MISTAKES]
        seen += len(batch.keys)
        # The images themselves would not fit in memory.
        batches.append(replace(batch, images=None, records=None))
        answers.append(answer)
    outcomes = Outcomes(
        class_names=names,
        labels=np.concatenate([batch.labels for batch in batches]),
        predicted=Predictions.join(answers).classes[LABEL],
        probabilities=Predictions.join(answers).said[LABEL],
        columns={
            name: np.concatenate([batch.columns[name] for batch in batches]) for name in batches[0].columns
        },
    )
    return outcomes, tuple(mistake for *_, mistake in ranked)


def _find_mistakes(batch: Batch, answer: Predictions, seen: int, names: Sequence[str]) -> Iterator[_Ranked]:
    """Yields the wrong predictions of a batch with what ranks them: the probability, then the order."""
    classes, said = answer.classes[LABEL], answer.said[LABEL]
    for index in map(int, np.flatnonzero(classes != batch.labels)):
        predicted, row = int(classes[index]), said[index]
        probability = float(row[predicted]) if np.isfinite(row).all() else None
        mistake = Mistake(
            key=batch.keys[index],
            true=names[batch.labels[index]],
            predicted=names[predicted],
            probability=probability,
            image=b"" if batch.images is None else batch.images[index].numpy(),
        )
        yield np.inf if probability is None else probability, -(seen + index), mistake


def _predict(model: ServedModel, batch: Batch) -> Predictions:
    try:
        if batch.images is None:
            return model.predict_examples(batch.records)
        return model.predict(batch.images)
    except tf.errors.InvalidArgumentError as error:
        # The cause stands above the name of the node; before it, only where the node was built.
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


def _parse(records: tf.Tensor, manifest: Manifest) -> Any:
    single = [feature for feature in manifest.features if feature.name == "image" or not feature.shape]
    parsed = tf.io.parse_example(
        records,
        {item.name: tf.io.FixedLenFeature([], _STORED.get(item.dtype, tf.string)) for item in single},
    )
    if "image" in parsed and manifest.image.encoding == "raw":  # the model is served files
        parsed["image"] = tf.map_fn(
            lambda stored: encode_stored(stored, manifest.image),
            parsed["image"],
            fn_output_signature=tf.string,
        )
    return parsed


def _text(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns a column with text in place of bytes."""
    if column.dtype != object:
        return column
    return np.array([value.decode("utf-8", "replace") for value in column], dtype=np.str_)


def _check_labels(batch: Batch, classes: int) -> None:
    wrong = np.flatnonzero((batch.labels < 0) | (batch.labels >= classes))
    if wrong.size:
        first = int(wrong[0])
        raise DatasetError(
            f"example {batch.keys[first]!r} has label {batch.labels[first]}, the dataset has classes "
            f"0..{classes - 1}; preprocess the data again"
        )
