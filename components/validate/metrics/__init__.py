"""Metrics by name: label, format, whether higher is better, and the kinds of labels that have them.

The modules here measure them, without TensorFlow; they import no other package of `validate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from shardline.trainer.manifest import CLASS, MULTILABEL, REGRESSION


@dataclass(frozen=True)
class Metric:
    """One metric: its name in rules, its label in reports, the format of its values, and its direction."""

    name: str
    label: str
    text: Callable[[float], str] = "{:.4f}".format
    higher_is_better: bool = True


_ms, _mb, _count, _number = "{:,.2f} ms".format, "{:,.2f} MB".format, "{:,.0f}".format, "{:,.4g}".format


def _tiny(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


_LOG_LOSS, _ROC_AUC = Metric("log_loss", "log loss", higher_is_better=False), Metric("roc_auc", "ROC AUC")
#: Metrics of quality by kind of label; errors of numbers are in their units, a mean over several numbers.
BY_KIND = {
    CLASS: (
        Metric("accuracy", "accuracy"),
        Metric("top5_accuracy", "top-5 accuracy"),
        Metric("macro_precision", "precision, mean of classes"),
        Metric("macro_recall", "recall, mean of classes"),
        Metric("macro_f1", "F1, mean of classes"),
        Metric("weighted_f1", "F1, weighted by examples"),
        _LOG_LOSS,
        _ROC_AUC,
        Metric("pr_auc", "PR AUC"),
        Metric("ece", "calibration error (ECE)", higher_is_better=False),
    ),
    MULTILABEL: (
        Metric("macro_f1", "F1, mean of labels"),
        Metric("micro_f1", "F1 of all labels together"),
        Metric("macro_precision", "precision, mean of labels"),
        Metric("macro_recall", "recall, mean of labels"),
        Metric("subset_accuracy", "examples with all labels right"),
        Metric("hamming_loss", "labels that are wrong", higher_is_better=False),
        Metric("mean_average_precision", "average precision, mean of labels"),
        _ROC_AUC,
        _LOG_LOSS,
    ),
    REGRESSION: (
        Metric("rmse", "root mean squared error (RMSE)", _number, higher_is_better=False),
        Metric("mae", "mean absolute error (MAE)", _number, higher_is_better=False),
        Metric("median_absolute_error", "median absolute error", _number, higher_is_better=False),
        Metric("p90_absolute_error", "absolute error, 90th percentile", _number, higher_is_better=False),
        Metric("mape", "mean absolute percentage error (MAPE)", _percent, higher_is_better=False),
        Metric("r2", "variance explained (R2)"),
    ),
}
#: All of them, each name once.
_ALL = (metric for metrics in (*BY_KIND.values(), BY_KIND[CLASS]) for metric in metrics)
QUALITY = tuple({metric.name: metric for metric in _ALL}.values())

#: The main metric, by kind of label, and the metric of default rules that sees a rare class.
MAIN = {CLASS: "accuracy", MULTILABEL: "macro_f1", REGRESSION: "rmse"}
OF_RARE = "pr_auc"

SERVING = (
    Metric("latency_p50_ms", "latency of one example, median", _ms, higher_is_better=False),
    Metric("latency_p95_ms", "latency of one example, 95th percentile", _ms, higher_is_better=False),
    Metric("latency_batch32_p50_ms", "latency of 32 examples, median", _ms, higher_is_better=False),
    Metric("latency_batch32_p95_ms", "latency of 32 examples, 95th percentile", _ms, higher_is_better=False),
    Metric("throughput", "throughput", "{:,.0f} / s".format),
    Metric("size_mb", "size on disk", _mb, higher_is_better=False),
    Metric("peak_memory_mb", "peak memory", _mb, higher_is_better=False),
    Metric("max_difference", "largest difference from the trained model", _tiny, higher_is_better=False),
    Metric("batch_difference", "largest difference between batches", _tiny, higher_is_better=False),
)

CHECKS = (
    Metric("examples", "test examples", _count),
    Metric("non_finite", "examples with non-finite output", _count, higher_is_better=False),
    Metric(
        "leaked", "groups of equal examples across splits, of test examples", _percent, higher_is_better=False
    ),
    Metric("never_predicted", "classes that are never predicted", _count, higher_is_better=False),
    Metric("constant_labels", "labels that do not vary in the test split", _count, higher_is_better=False),
    Metric("golden_difference", "largest difference with TensorFlow alone", _tiny, higher_is_better=False),
    Metric("drifted", "features whose distribution has moved", _count, higher_is_better=False),
)


#: Metrics that are measured of the new model only, not of the champion.
CHALLENGER_METRICS = (
    *("peak_memory_mb", "max_difference", "golden_difference", "leaked", "constant_labels", "examples"),
)

#: Metrics where lower is better, and metrics that are shares, 0..1.
LOWER_IS_BETTER = tuple(metric.name for metric in QUALITY + SERVING + CHECKS if not metric.higher_is_better)
SHARES = (
    "ece",
    *(metric.name for kind in (CLASS, MULTILABEL) for metric in BY_KIND[kind] if metric.higher_is_better),
)

#: Means of areas under the ROC and the precision-recall curve, by the kind of a label.
AREAS = {CLASS: ("roc_auc", "pr_auc"), MULTILABEL: ("roc_auc", "mean_average_precision")}

#: Metrics of answers, not of probabilities, with leads over the champion and over the baseline, by kind.
LEADS_BY_KIND = {
    CLASS: ("accuracy", "macro_precision", "macro_recall", "macro_f1", "weighted_f1"),
    MULTILABEL: ("macro_f1", "micro_f1", "subset_accuracy", "hamming_loss"),
    REGRESSION: ("rmse", "mae", "mape", "r2"),
}
#: The share of the examples that are right, by kind of label.
COUNTED = {CLASS: "accuracy", MULTILABEL: "subset_accuracy"}
#: All metrics with leads: these, and those of probabilities.
LEAD_METRICS = tuple(dict.fromkeys(chain(*LEADS_BY_KIND.values(), ("log_loss",), *AREAS.values())))

#: Metrics of a single class, label of a multilabel, or number, by kind of label.
PARTS = {
    CLASS: ("class", ("accuracy", "precision", "recall", "f1")),
    MULTILABEL: ("label", ("precision", "recall", "f1")),
    REGRESSION: ("number", ("rmse", "mae")),
}

#: Metrics of a converted model, besides the main metric, as in `size_mb[format=onnx]`.
FORMAT_METRICS = ("size_mb", "latency_p50_ms", "latency_p95_ms", "max_difference")
