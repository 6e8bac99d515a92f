"""Mistakes: the answers of a model that are most wrong, as a person wants to look at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardline.components.validate.answers import THRESHOLD, Predictions
from shardline.components.validate.evaluation import Mistake
from shardline.trainer.data.features import CLASS, MULTILABEL, Label

#: How wrong an answer is, its place in the split, and the answer.
Ranked = tuple[float, int, Mistake]

#: Answers of one batch that are looked at, of numbers and several labels.
_MOST = 24


class Asked(Protocol):
    """Examples that a model was asked for: their images, if they have any, labels and keys."""

    @property
    def images(self) -> Any:
        """Encoded images, a string tensor [n]; None for a table."""

    @property
    def labels(self) -> Mapping[str, npt.NDArray[Any]]:
        """Targets by name of the label."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the examples."""


def find_mistakes(label: Label, batch: Asked, answer: Predictions, seen: int) -> Iterator[Ranked]:
    """Yields the most wrong answers to a batch, with what ranks them.

    Wrong classes rank by the probability that they were given, several labels by the number that is wrong,
    numbers by their error; then by their order, of which `seen` came before.
    """
    true, said = batch.labels[label.name], answer.said[label.name]
    if label.kind == CLASS:
        yield from _wrong_classes(label, batch, answer, seen)
        return
    if label.kind == MULTILABEL:
        given = np.nan_to_num(said, nan=0.0) >= THRESHOLD
        wrong = (given != (true == 1)).sum(axis=1).astype(np.float64)
    else:
        true = true.reshape(len(true), -1)
        errors = np.abs(said - true) / np.maximum(np.abs(true).mean(axis=0), 1e-9)
        wrong = np.nan_to_num(errors.sum(axis=1), nan=np.inf)
    for index in map(int, np.argsort(-wrong, kind="stable")[:_MOST]):
        if wrong[index]:
            texts = (_text(label, true[index]), _text(label, said[index]))
            yield (
                wrong[index],
                -(seen + index),
                Mistake(batch.keys[index], *texts, None, _image(batch, index)),
            )


def _wrong_classes(label: Label, batch: Asked, answer: Predictions, seen: int) -> Iterator[Ranked]:
    true, classes, said = batch.labels[label.name], answer.classes[label.name], answer.said[label.name]
    for index in map(int, np.flatnonzero(classes != true)):
        predicted, row = int(classes[index]), said[index]
        probability = float(row[predicted]) if np.isfinite(row).all() else None
        names = (label.outputs[true[index]], label.outputs[predicted])
        mistake = Mistake(batch.keys[index], *names, probability, _image(batch, index))
        yield np.inf if probability is None else probability, -(seen + index), mistake


def _image(batch: Asked, index: int) -> bytes:
    return b"" if batch.images is None else bytes(batch.images[index].numpy())


def _text(label: Label, values: npt.NDArray[Any]) -> str:
    if label.kind == MULTILABEL:
        chosen = [name for name, value in zip(label.outputs, values, strict=True) if value >= THRESHOLD]
        return ", ".join(chosen) or "none"
    return ", ".join(f"{value:.4g}" for value in values)
