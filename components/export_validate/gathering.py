"""One pass of an exported model over a split: every example once, as it is stored."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import tensorflow as tf

from shardline.components.export_validate.evaluation import Mistake
from shardline.components.export_validate.examples import Batch, find_split, read_batches
from shardline.components.export_validate.outcomes import Outcomes
from shardline.components.export_validate.served import Predictions, ServedModel
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
