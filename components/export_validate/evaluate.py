"""Evaluation of an exported model: every example of a split, once, as raw bytes."""

from __future__ import annotations

import heapq
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from sklearn import metrics

from components.export_validate.evaluation import ClassScore, Evaluation, Mistake
from components.export_validate.examples import Batch, find_split, read_batches
from components.export_validate.served import Predictions, ServedModel
from trainer.data import manifest as manifests
from trainer.errors import DatasetError
from trainer.progress import advance

MOST_MISTAKES = 24

_SECONDS_BETWEEN_REPORTS = 1.0


def evaluate(saved_model: Path, dataset: Path, split: str = "test", *, batch_size: int = 64) -> Evaluation:
    """Evaluates an exported model on a split of a dataset.

    The stored bytes of every example go once through the model's own `serving_default`.

    Args:
        saved_model: Directory of the SavedModel.
        dataset: Dataset directory.
        split: Name of the split.
        batch_size: Images per call.

    Raises:
        ModelError: When there is no SavedModel with the signature that Shardline exports.
        DatasetError: When the dataset or the split cannot be used.
    """
    manifest = manifests.load(dataset)
    chosen = find_split(manifest, dataset, split)
    classes = len(manifest.class_names)
    model = ServedModel(saved_model, classes)
    tally = _Tally(manifest.class_names)
    reported = time.monotonic()
    for batch in read_batches(manifest, chosen, dataset, batch_size):
        tally.add(batch, _predict(model, batch))
        if time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS or tally.seen == chosen.records:
            advance("validate", tally.seen, chosen.records, "examples")
            reported = time.monotonic()
    return tally.evaluation(manifest.fingerprint, split)


def _predict(model: ServedModel, batch: Batch) -> Predictions:
    try:
        return model.predict(batch.images)
    except tf.errors.InvalidArgumentError as error:
        reason = str(error.message).strip().partition("\n")[0]
        raise DatasetError(
            f"an image between {batch.keys[0]!r} and {batch.keys[-1]!r} cannot be served: {reason}; "
            "preprocess the data again"
        ) from None


class _Tally:
    """Gathers labels and predictions, and the worst mistakes among them."""

    def __init__(self, class_names: tuple[str, ...]) -> None:
        self.seen = 0
        self._names = class_names
        self._labels: list[npt.NDArray[np.int64]] = []
        self._predicted: list[npt.NDArray[np.int64]] = []
        self._probabilities: list[npt.NDArray[np.float32]] = []
        # A heap: the mistake of which the model was least sure comes first; of equal ones, the later one.
        self._mistakes: list[tuple[float, int, Mistake]] = []

    def add(self, batch: Batch, predictions: Predictions) -> None:
        self._labels.append(batch.labels)
        self._predicted.append(predictions.labels)
        self._probabilities.append(predictions.probabilities)
        for index in np.flatnonzero(predictions.labels != batch.labels):
            self._keep(batch, predictions, int(index))
        self.seen += len(batch.keys)

    def _keep(self, batch: Batch, predictions: Predictions, index: int) -> None:
        predicted, row = int(predictions.labels[index]), predictions.probabilities[index]
        probability, finite = float(row[predicted]), bool(np.isfinite(row).all())
        sureness, order = (probability if finite else np.inf), -(self.seen + index)
        if len(self._mistakes) == MOST_MISTAKES and (sureness, order) < self._mistakes[0][:2]:
            return
        mistake = Mistake(
            key=batch.keys[index],
            true=self._names[batch.labels[index]],
            predicted=self._names[predicted],
            probability=probability if finite else None,
            image=batch.images[index].numpy(),
        )
        heapq.heappush(self._mistakes, (sureness, order, mistake))
        if len(self._mistakes) > MOST_MISTAKES:
            heapq.heappop(self._mistakes)

    def evaluation(self, fingerprint: str, split: str) -> Evaluation:
        labels, predicted = np.concatenate(self._labels), np.concatenate(self._predicted)
        probabilities = np.concatenate(self._probabilities)
        finite = np.isfinite(probabilities).all(axis=1)
        classes = list(range(len(self._names)))
        confusion = metrics.confusion_matrix(labels, predicted, labels=classes)
        return Evaluation(
            fingerprint=fingerprint,
            split=split,
            examples=len(labels),
            accuracy=float(metrics.accuracy_score(labels, predicted)),
            log_loss=_log_loss(labels[finite], probabilities[finite], classes),
            non_finite=int((~finite).sum()),
            class_names=self._names,
            classes=_class_scores(labels, predicted, self._names),
            confusion=tuple(tuple(row) for row in confusion.tolist()),
            mistakes=tuple(mistake for *_, mistake in sorted(self._mistakes, reverse=True)),
        )


def _log_loss(
    labels: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float32], classes: list[int]
) -> float | None:
    if not len(labels):
        return None
    # A softmax in 16 bits does not sum to one as exactly as scikit-learn expects.
    exact = probabilities.astype(np.float64)
    return float(metrics.log_loss(labels, exact / exact.sum(axis=1, keepdims=True), labels=classes))


def _class_scores(
    labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], names: tuple[str, ...]
) -> tuple[ClassScore, ...]:
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        labels, predicted, labels=list(range(len(names))), zero_division=0.0
    )
    return tuple(
        ClassScore(name, int(support[i]), float(precision[i]), float(recall[i]), float(f1[i]))
        for i, name in enumerate(names)
    )
