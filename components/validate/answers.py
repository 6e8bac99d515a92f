"""Answers of an exported model: what its signatures give, how far two are apart, and which are most wrong.

A difference of numbers is told in standard deviations of the label in training, one of probabilities as it
is, so that a limit means the same for every label.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.components.validate.evaluation import Mistake
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import Manifest

Floats = npt.NDArray[np.float32]

#: Outputs of a signature by kind of label, that of the probabilities or numbers first.
OUTPUTS = {
    CLASS: ("probabilities", "label", "label_name"),
    MULTILABEL: ("probabilities", "labels"),
    REGRESSION: ("value",),
}

#: One more of a label of one number, of a model that gives quantiles.
QUANTILES = "quantiles"

#: From this probability on, an example is said to have one of several labels.
THRESHOLD = 0.5

#: Wrong predictions that are kept as examples.
MOST_MISTAKES = 24


@dataclass(frozen=True)
class Predictions:
    """Answers of a model to n examples.

    Attributes:
        said: Probabilities or numbers by name of the label, float32 [n, outputs].
        classes: The most probable class by name of the label, of those that are one of several, int64 [n].
        quantiles: Quantiles by name of the label, of those of which the model gives them, float32
            [n, quantiles].
    """

    said: Mapping[str, Floats]
    classes: Mapping[str, npt.NDArray[np.int64]]
    quantiles: Mapping[str, Floats] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Sequence[Predictions]) -> Predictions:
        """Returns the answers to several batches as one; there is at least one."""

        def joined(of: str) -> dict[str, Any]:
            names = getattr(parts[0], of)
            return {name: np.concatenate([getattr(part, of)[name] for part in parts]) for name in names}

        return cls(joined("said"), joined("classes"), joined("quantiles"))

    def reversed(self) -> Predictions:
        """Returns the answers in the opposite order."""
        parts: tuple[Mapping[str, Any], ...] = (self.said, self.classes, self.quantiles)
        return Predictions(*({name: values[::-1] for name, values in part.items()} for part in parts))


def name_outputs(labels: Sequence[Label], quantiles: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """Returns the names of a signature's outputs by name of the label, in the order of `OUTPUTS`.

    Of several labels each name begins with the label's, as in "kind_probabilities". The labels in `quantiles`
    have one more, for these.
    """
    plain = name_plainly([label.name for label in labels])
    return {
        label.name: tuple(
            output if len(labels) == 1 else f"{plain[label.name]}_{output}"
            for output in (*OUTPUTS[label.kind], *([QUANTILES] if label.name in quantiles else []))
        )
        for label in labels
    }


def name_plainly(names: Iterable[str]) -> dict[str, str]:
    """Returns names of arguments and outputs for columns, as TensorFlow wants them, no two the same.

    A name of ASCII letters, digits and "_" stays; "petal width (cm)" becomes "petal_width_cm".
    """

    def is_plain(name: str) -> bool:
        # TensorFlow has a use of its own for an argument "self".
        return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)) and name != "self"

    names = list(names)
    found = {name: name for name in names if is_plain(name)}
    for name in names:
        if name not in found:
            plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
            plain = plain if is_plain(plain) else f"column_{plain}".rstrip("_")
            while plain in found.values():
                plain += "_"
            found[name] = plain
    return found


def read_deviations(manifest: Manifest) -> dict[str, tuple[float, ...]]:
    """Returns the standard deviation of each number in training, by name of the label; 1 where it is 0."""
    split = manifest.splits.get("train") or next(iter(manifest.splits.values()))
    return {
        label.name: tuple(spread.deviation or 1.0 for spread in split.labels[label.name].spreads)
        for label in manifest.labels
        if label.kind == REGRESSION
    }


def largest_gap(
    expected: npt.NDArray[Any], found: npt.NDArray[Any], deviations: Sequence[float] = ()
) -> float:
    """Returns the largest difference; at least 1 where one of two is a number and the other is not."""
    finite = np.isfinite(expected)
    gaps = np.abs(np.where(finite, expected, 0) - np.where(np.isfinite(found), found, 0))
    gap = float((gaps / np.asarray(deviations or 1.0)).max(initial=0.0))
    return max(1.0, gap) if (finite != np.isfinite(found)).any() else gap


def largest_gap_of(
    ours: Predictions, theirs: Predictions, deviations: Mapping[str, Sequence[float]]
) -> float:
    """Returns the largest difference between answers to the same examples, over all labels."""
    pairs = ((ours.said, theirs.said), (ours.quantiles, theirs.quantiles))
    return max(
        largest_gap(values, others[name], deviations.get(name, ()))
        for some, others in pairs
        for name, values in some.items()
    )


def find_mistakes(
    label: Label, true: npt.NDArray[Any], answer: Predictions, keys: Sequence[str], images: Any
) -> Iterator[tuple[float, int, Mistake]]:
    """Yields the most wrong answers to some examples: how wrong each is, the example's place, and the answer.

    Wrong classes rank by the probability that they were given, several labels by the number that is wrong,
    numbers by their error.

    Args:
        label: What was to be predicted.
        true: The truth, as it is stored.
        answer: What the model answered.
        keys: Keys of the examples.
        images: Their encoded images, a string tensor [n]; None for a table.
    """
    said = answer.said[label.name]
    if label.kind == CLASS:
        classes = answer.classes[label.name]
        given = np.where(np.isfinite(said).all(axis=1), said[np.arange(len(said)), classes], np.inf)
        wrong = np.where(classes != true, given, -np.inf)
    elif label.kind == MULTILABEL:
        missed = ((np.nan_to_num(said, nan=0.0) >= THRESHOLD) != (true == 1)).sum(axis=1)
        wrong = np.where(missed > 0, missed, -np.inf)
    else:
        true = true.reshape(len(true), -1)
        errors = np.abs(said - true) / np.maximum(np.abs(true).mean(axis=0), 1e-9)
        missed = np.nan_to_num(errors.sum(axis=1), nan=np.inf)
        wrong = np.where(missed > 0, missed, -np.inf)
    for index in map(int, np.argsort(-wrong, kind="stable")[:MOST_MISTAKES]):
        if wrong[index] == -np.inf:
            return
        probability = None
        if label.kind == CLASS:
            texts = [label.outputs[true[index]], label.outputs[classes[index]]]
            probability = float(given[index]) if np.isfinite(given[index]) else None
        else:
            texts = [_text(label, values) for values in (true[index], said[index])]
        image = b"" if images is None else bytes(images[index].numpy())
        yield float(wrong[index]), index, Mistake(keys[index], texts[0], texts[1], probability, image)


def _text(label: Label, values: npt.NDArray[Any]) -> str:
    if label.kind == MULTILABEL:
        chosen = [name for name, value in zip(label.outputs, values, strict=True) if value >= THRESHOLD]
        return ", ".join(chosen) or "none"
    return ", ".join(f"{value:.4g}" for value in values)
