"""Metrics by name: what each is called, how it is written, which way is better, and of which labels it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION


@dataclass(frozen=True)
class Metric:
    """One metric: name in rules, label for a person, how it is written, and whether more is better."""

    name: str
    label: str
    text: Callable[[float], str] = "{:.4f}".format
    rising: bool = True


_ms, _mb, _count, _number = "{:,.2f} ms".format, "{:,.2f} MB".format, "{:,.0f}".format, "{:,.4g}".format


def _tiny(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


_LOG_LOSS, _ROC_AUC = Metric("log_loss", "log loss", rising=False), Metric("roc_auc", "ROC AUC")
#: How well quantiles of a number hold, of a model that gives them: the loss in its unit, the share of the
#: truth inside the outermost two, how far that is from what it should be, and examples where they cross.
OF_QUANTILES = (
    Metric("pinball_loss", "pinball loss of quantiles", _number, rising=False),
    Metric("coverage", "coverage of the interval of quantiles", _percent),
    Metric("coverage_error", "coverage, distance from the nominal", _percent, rising=False),
    Metric("quantile_crossings", "examples whose quantiles cross", _count, rising=False),
)
#: How well a label is told, by its kind; errors of numbers are in their units, of several the mean over them.
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
        Metric("ece", "calibration error (ECE)", rising=False),
    ),
    MULTILABEL: (
        Metric("macro_f1", "F1, mean of labels"),
        Metric("micro_f1", "F1 of all labels together"),
        Metric("macro_precision", "precision, mean of labels"),
        Metric("macro_recall", "recall, mean of labels"),
        Metric("subset_accuracy", "examples with all labels right"),
        Metric("hamming_loss", "labels that are wrong", rising=False),
        Metric("mean_average_precision", "average precision, mean of labels"),
        _ROC_AUC,
        _LOG_LOSS,
    ),
    REGRESSION: (
        Metric("rmse", "root mean squared error (RMSE)", _number, rising=False),
        Metric("mae", "mean absolute error (MAE)", _number, rising=False),
        Metric("median_absolute_error", "median absolute error", _number, rising=False),
        Metric("p90_absolute_error", "absolute error, 90th percentile", _number, rising=False),
        Metric("mape", "mean absolute percentage error (MAPE)", _percent, rising=False),
        Metric("r2", "variance explained (R2)"),
        *OF_QUANTILES,
    ),
}
#: All of them, each name once.
QUALITY = tuple({one.name: one for kind in (*BY_KIND.values(), BY_KIND[CLASS]) for one in kind}.values())

#: The metric that counts first, by the kind of a label.
MAIN = {CLASS: "accuracy", MULTILABEL: "macro_f1", REGRESSION: "rmse"}

SERVING = (
    Metric("latency_p50_ms", "latency of one example, median", _ms, rising=False),
    Metric("latency_p95_ms", "latency of one example, 95th percentile", _ms, rising=False),
    Metric("latency_batch32_p50_ms", "latency of 32 examples, median", _ms, rising=False),
    Metric("latency_batch32_p95_ms", "latency of 32 examples, 95th percentile", _ms, rising=False),
    Metric("throughput", "throughput", "{:,.0f} / s".format),
    Metric("size_mb", "size on disk", _mb, rising=False),
    Metric("peak_memory_mb", "peak memory", _mb, rising=False),
    Metric("max_difference", "largest difference from the trained model", _tiny, rising=False),
    Metric("batch_difference", "largest difference between batches", _tiny, rising=False),
)

CHECKS = (
    Metric("examples", "test examples", _count),
    Metric("non_finite", "examples with non-finite output", _count, rising=False),
    Metric("leaked", "groups of equal examples across splits, of test examples", _percent, rising=False),
    Metric("never_predicted", "classes that are never predicted", _count, rising=False),
    Metric("constant_labels", "labels that do not vary in the test split", _count, rising=False),
    Metric("golden_difference", "largest difference in a clean process", _tiny, rising=False),
    Metric("drifted", "features whose distribution has moved", _count, rising=False),
)

#: Every metric that a rule may name; times are in milliseconds, sizes in MB, throughput in examples/s.
METRICS = tuple(metric.name for metric in QUALITY + SERVING + CHECKS)

#: Metrics that are measured of a new model only, and have no value of the champion's.
OF_THE_NEW = (
    *("peak_memory_mb", "max_difference", "golden_difference", "leaked", "constant_labels", "examples"),
)

#: Those in which less is better, and those that are shares, 0..1.
FALLING = tuple(metric.name for metric in QUALITY + SERVING + CHECKS if not metric.rising)
SHARES = (
    *("ece", "coverage", "coverage_error"),
    *(metric.name for kind in (CLASS, MULTILABEL) for metric in BY_KIND[kind] if metric.rising),
)

#: Means of areas under the ROC and the precision-recall curve, by the kind of a label.
AREAS = {CLASS: ("roc_auc", "pr_auc"), MULTILABEL: ("roc_auc", "mean_average_precision")}

#: By the kind of a label, the metrics that have leads over a champion and over the trivial answer.
LEADING = {
    CLASS: ("accuracy", "macro_precision", "macro_recall", "macro_f1", "weighted_f1"),
    MULTILABEL: ("macro_f1", "micro_f1", "subset_accuracy", "hamming_loss"),
    REGRESSION: ("rmse", "mae", "mape", "r2"),
}
COUNTED = LEADING[CLASS]
LED = tuple(dict.fromkeys(name for names in LEADING.values() for name in names))
#: Metrics that have leads over a champion: these, and what follows from probabilities and quantiles.
LED_BY_CHAMPION = (
    *(*LED, "log_loss", "roc_auc", "pr_auc", "mean_average_precision", "pinball_loss", "coverage_error"),
)

#: Metrics of one class, of one of several labels, or of one of several numbers, by the kind of the label.
PARTS = {
    CLASS: ("class", ("accuracy", "precision", "recall", "f1")),
    MULTILABEL: ("label", ("precision", "recall", "f1")),
    REGRESSION: ("number", ("rmse", "mae")),
}

#: Metrics of a converted model, beside the one that counts first, as in `size_mb[format=int8]`.
FORMAT_METRICS = ("size_mb", "latency_p50_ms", "latency_p95_ms", "max_difference")


def names_of_quantiles(shares: tuple[float, ...]) -> list[str]:
    """Returns the metrics that a model has which gives quantiles of these shares; of one, the loss alone."""
    most = len(OF_QUANTILES) if len(shares) > 1 else len(shares)
    return [metric.name for metric in OF_QUANTILES[:most]]
