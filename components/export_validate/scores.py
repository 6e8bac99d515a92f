"""Single numbers over all examples, by scikit-learn wherever it has them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from shardline.components.export_validate.calibration import calibration_error
from shardline.components.export_validate.evaluation import Bin, ClassScore, Curve
from shardline.components.export_validate.outcomes import Outcomes

_TOP = 5


def score(outcomes: Outcomes, bins: tuple[Bin, ...]) -> dict[str, float]:
    """Returns the metrics of predictions and probabilities by name.

    Averages over classes leave out those that are neither among the labels nor among the predictions, as
    scikit-learn does. What needs probabilities is measured on the examples with finite ones, but for
    `top5_accuracy`, where others are wrong; it is left out where there are no more than five classes.

    Args:
        outcomes: Of every example.
        bins: Their calibration.
    """
    labels, predicted = outcomes.labels, outcomes.predicted
    found = {"accuracy": float(metrics.accuracy_score(labels, predicted))}
    macro = metrics.precision_recall_fscore_support(labels, predicted, average="macro", zero_division=0.0)
    found |= dict(zip(("macro_precision", "macro_recall", "macro_f1"), map(float, macro[:3]), strict=True))
    found["weighted_f1"] = float(metrics.f1_score(labels, predicted, average="weighted", zero_division=0.0))
    finite = outcomes.only(outcomes.finite)
    if len(finite.labels):
        found["log_loss"] = _log_loss(finite)
        found["ece"] = calibration_error(bins)
        if len(outcomes.class_names) > _TOP:
            found["top5_accuracy"] = _top(finite) / len(labels)
    return found


def score_classes(outcomes: Outcomes) -> tuple[ClassScore, ...]:
    """Returns how well each class is told from the others, in the order of the classes."""
    names = outcomes.class_names
    precision, recall, f1, support = metrics.precision_recall_fscore_support(
        outcomes.labels, outcomes.predicted, labels=list(range(len(names))), zero_division=0.0
    )
    return tuple(
        ClassScore(name, int(support[i]), float(precision[i]), float(recall[i]), float(f1[i]))
        for i, name in enumerate(names)
    )


def mean_area(curves: tuple[Curve, ...]) -> float:
    """Returns the macro average of the areas under some curves."""
    return float(np.mean([curve.area for curve in curves]))


def _log_loss(finite: Outcomes) -> float:
    return float(
        metrics.log_loss(
            finite.labels, _normalised(finite.probabilities), labels=list(range(len(finite.class_names)))
        )
    )


def _normalised(probabilities: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Returns rows that sum to one as exactly as scikit-learn expects; a softmax in 16 bits does not."""
    exact = probabilities.astype(np.float64)
    exact /= exact.sum(axis=1, keepdims=True)
    return exact


def _top(finite: Outcomes) -> float:
    return float(
        metrics.top_k_accuracy_score(
            finite.labels,
            finite.probabilities,
            k=_TOP,
            normalize=False,
            labels=list(range(len(finite.class_names))),
        )
    )
