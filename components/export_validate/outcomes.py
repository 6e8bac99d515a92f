"""What a model said of every example of a split, beside what is true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Outcomes:
    """Truth and predictions, an element per example.

    Attributes:
        class_names: In the order of the labels.
        labels: int64 [n], the true classes.
        predicted: int64 [n], as the model served them.
        probabilities: float32 [n, classes].
        columns: Further features of the examples by name, each [n]; what slices are made of.
    """

    class_names: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float32]
    columns: Mapping[str, npt.NDArray[np.generic]]

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Which predictions are right, [n]."""
        return np.equal(self.labels, self.predicted)

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """Of which examples every probability is finite, [n]."""
        finite: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(self.probabilities), axis=1)
        return finite

    def only(self, chosen: npt.NDArray[np.bool_]) -> Outcomes:
        """Returns the outcomes of some of the examples."""
        return Outcomes(
            self.class_names,
            self.labels[chosen],
            self.predicted[chosen],
            self.probabilities[chosen],
            {name: column[chosen] for name, column in self.columns.items()},
        )
