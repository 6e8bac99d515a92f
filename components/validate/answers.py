"""Answers of an exported model: what its signatures give for each label, and how far two answers are apart.

A difference of numbers is told in standard deviations of the label in training, one of probabilities as it
is, so that a limit means the same for every label.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

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
        return cls(
            {name: np.concatenate([part.said[name] for part in parts]) for name in parts[0].said},
            {name: np.concatenate([part.classes[name] for part in parts]) for name in parts[0].classes},
            {name: np.concatenate([part.quantiles[name] for part in parts]) for name in parts[0].quantiles},
        )

    def reversed(self) -> Predictions:
        """Returns the answers in the opposite order."""
        return Predictions(
            {name: values[::-1] for name, values in self.said.items()},
            {name: values[::-1] for name, values in self.classes.items()},
            {name: values[::-1] for name, values in self.quantiles.items()},
        )


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
    names = list(names)
    found = {name: name for name in names if _is_plain(name)}
    for name in names:
        if name not in found:
            plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
            plain = plain if _is_plain(plain) else f"column_{plain}".rstrip("_")
            while plain in found.values():
                plain += "_"
            found[name] = plain
    return found


def _is_plain(name: str) -> bool:
    # TensorFlow has a use of its own for an argument "self".
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)) and name != "self"


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
