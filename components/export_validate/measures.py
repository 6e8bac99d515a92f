"""How the numbers of an evaluation are shown to a person, beside those of the champion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardline.components.export_validate.evaluation import Evaluation, Interval, Lead

#: "unclear": the interval of the difference has 0 in it.
Change = Literal["better", "worse", "unclear", ""]

_Format = Callable[[float], str]


def _share(value: float) -> str:
    return f"{value:.4f}"


def _milliseconds(value: float) -> str:
    return f"{value:,.2f} ms"


def _megabytes(value: float) -> str:
    return f"{value:,.2f} MB"


def _rate(value: float) -> str:
    return f"{value:,.0f} / s"


def _tiny(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


@dataclass(frozen=True)
class Measure:
    """One metric, for people.

    Attributes:
        name: In `Evaluation.metrics`.
        label: What a person calls it.
        text: Writes a value with its unit.
        rising: Whether more is better.
    """

    name: str
    label: str
    text: _Format = _share
    rising: bool = True


QUALITY = (
    Measure("accuracy", "accuracy"),
    Measure("top5_accuracy", "top-5 accuracy"),
    Measure("macro_precision", "precision, mean of classes"),
    Measure("macro_recall", "recall, mean of classes"),
    Measure("macro_f1", "F1, mean of classes"),
    Measure("weighted_f1", "F1, weighted by examples"),
    Measure("log_loss", "log loss", rising=False),
    Measure("roc_auc", "ROC AUC"),
    Measure("pr_auc", "PR AUC"),
    Measure("ece", "calibration error (ECE)", rising=False),
)
SERVING = (
    Measure("latency_p50_ms", "latency of one example, median", _milliseconds, rising=False),
    Measure("latency_p95_ms", "latency of one example, 95th percentile", _milliseconds, rising=False),
    Measure("latency_batch32_p50_ms", "latency of 32 examples, median", _milliseconds, rising=False),
    Measure("latency_batch32_p95_ms", "latency of 32 examples, 95th percentile", _milliseconds, rising=False),
    Measure("throughput", "throughput", _rate),
    Measure("size_mb", "size on disk", _megabytes, rising=False),
    Measure("peak_memory_mb", "peak memory", _megabytes, rising=False),
    Measure("max_difference", "largest difference from the trained model", _tiny, rising=False),
    Measure("batch_difference", "largest difference between batches", _tiny, rising=False),
    Measure("jpeg_flips", "predictions that JPEG changes", _percent, rising=False),
    Measure("shift_flips", "predictions that a shift by one pixel changes", _percent, rising=False),
)


@dataclass(frozen=True)
class MeasureRow:
    """One metric of a model and of the champion, as texts; "" where there is none.

    Attributes:
        name: That rules use.
        label: For a person.
        value: Of the model.
        interval: Its 95 % interval.
        champion: The champion's value.
        difference: The model's value minus the champion's.
        difference_interval: Its 95 % interval.
        change: What the difference means.
    """

    name: str
    label: str
    value: str
    interval: str
    champion: str
    difference: str
    difference_interval: str
    change: Change


def measure_rows(evaluation: Evaluation, measures: Sequence[Measure]) -> list[MeasureRow]:
    """Returns those of the measures that were taken, in their order."""
    return [_row(evaluation, measure) for measure in measures if measure.name in evaluation.metrics]


def _row(evaluation: Evaluation, measure: Measure) -> MeasureRow:
    name, text = measure.name, measure.text
    value = evaluation.metrics[name]
    before = evaluation.champion.metrics.get(name) if evaluation.champion else None
    lead = evaluation.leads.get(name)
    return MeasureRow(
        name=name,
        label=measure.label,
        value=text(value),
        interval=show_interval(evaluation.intervals.get(name), text),
        champion="" if before is None else text(before),
        difference="" if before is None else show_difference(value - before, text),
        difference_interval=show_interval(lead.interval if lead else None, text),
        change="" if before is None else _change(value - before, lead, measure.rising),
    )


def show_interval(interval: Interval | None, text: _Format = _share) -> str:
    """Returns "0.9512 to 0.9740", or "" for none."""
    return "" if interval is None else " to ".join(map(text, interval))


def show_difference(difference: float, text: _Format = _share) -> str:
    """Returns a difference with its sign."""
    sign = "±" if difference == 0 else "+" if difference > 0 else "-"
    return sign + text(abs(difference))


def _change(difference: float, lead: Lead | None, rising: bool) -> Change:
    if difference == 0:
        return ""
    if lead and lead.interval[0] <= 0 <= lead.interval[1]:
        return "unclear"
    return "better" if (difference > 0) == rising else "worse"
