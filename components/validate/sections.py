"""Sections of a report about one label: what of an evaluation is shown, and how, by the label's kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

from shardline.components.html import make_picture
from shardline.components.validate import number_plots, plots
from shardline.components.validate.evaluation import (
    Evaluation,
    Interval,
    Lead,
    Mistake,
    NumberScore,
    Slice,
)
from shardline.components.validate.metrics import BY_KIND, FALLING, MAIN, QUALITY, Metric
from shardline.trainer.data.features import CLASS, MULTILABEL

#: Rows of a table.
MOST_ROWS = 40

_MOST_DRAWN_CLASSES = 25
_MOST_CLASSES_ON_A_PHONE = 12
_MOST_PAIRS = 10
# Numbers that are drawn.
_MOST_NUMBERS = 6

_TEXTS = {metric.name: metric.text for metric in QUALITY}

#: "unclear": the interval of the difference has 0 in it.
Change = Literal["better", "worse", "unclear", ""]


class MetricRow(NamedTuple):
    """One metric of a model and of the champion, as texts; "" where there is none.

    The difference is the model's value minus the champion's; the intervals are 95 % intervals.
    """

    name: str
    label: str
    value: str
    interval: str
    champion: str = ""
    difference: str = ""
    difference_interval: str = ""
    change: Change = ""


def metric_rows(evaluation: Evaluation, metrics: Sequence[Metric]) -> list[MetricRow]:
    """Returns those of the metrics that were measured, in their order."""
    return [_row(evaluation, metric) for metric in metrics if metric.name in evaluation.metrics]


def _row(evaluation: Evaluation, metric: Metric) -> MetricRow:
    name, text = metric.name, metric.text
    value = evaluation.metrics[name]
    row = MetricRow(name, metric.label, text(value), show_interval(evaluation.intervals.get(name), text))
    before = evaluation.champion.metrics.get(name) if evaluation.champion else None
    if before is None:
        return row
    lead = evaluation.leads.get(name)
    return row._replace(
        champion=text(before),
        difference=show_difference(value - before, text),
        difference_interval=show_interval(lead.interval if lead else None, text),
        change=_change(value - before, lead, rising=metric.rising),
    )


def show_interval(interval: Interval | None, text: Callable[[float], str] = "{:.4f}".format) -> str:
    """Returns "0.9512 to 0.9740", or "" for none."""
    return "" if interval is None else " to ".join(map(text, interval))


def show_difference(difference: float, text: Callable[[float], str] = "{:.4f}".format) -> str:
    """Returns a difference with its sign."""
    sign = "±" if difference == 0 else "+" if difference > 0 else "-"
    return sign + text(abs(difference))


def _change(difference: float, lead: Lead | None = None, *, rising: bool = True) -> Change:
    if difference == 0:
        return ""
    if lead and lead.interval[0] <= 0 <= lead.interval[1]:
        return "unclear"
    return "better" if (difference > 0) == rising else "worse"


def sections(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Returns what a report shows of each label, for its template."""
    whole = evaluation.beside_champion
    beside = [_of_label(whole, part) for part in whole.parts] or [whole]
    return [_section(*both, several=bool(whole.parts)) for both in zip(evaluation.each, beside, strict=True)]


def _of_label(whole: Evaluation, part: Evaluation) -> Evaluation:
    """Returns the evaluation of one of several labels beside the champion's of the same."""
    prefix = f"{part.label}."
    leads = {name.removeprefix(prefix): lead for name, lead in whole.leads.items() if name.startswith(prefix)}
    return replace(part, champion=whole.champion and whole.champion.of(part.label), leads=leads)


def _section(evaluation: Evaluation, beside: Evaluation, *, several: bool) -> dict[str, Any]:
    main = MAIN[evaluation.kind]
    return {
        "label": evaluation.label if several else "",
        "kind": evaluation.kind,
        "main": main,
        "main_label": next(metric.label for metric in BY_KIND[evaluation.kind] if metric.name == main),
        "text": _TEXTS[main],
        "evaluation": evaluation,
        "quality": metric_rows(beside, BY_KIND[evaluation.kind]),
        "champion": beside.champion,
        **_matrix(evaluation),
        "wrong": evaluation.examples - sum(row[i] for i, row in enumerate(evaluation.confusion)),
        "calibration": _drawn(plots.draw_calibration, evaluation.calibration),
        "roc": _drawn(plots.draw_roc, evaluation.roc),
        "precision_recall": _drawn(plots.draw_precision_recall, evaluation.precision_recall),
        "classes": sorted(evaluation.classes, key=lambda score: (score.f1, -score.examples))[:MOST_ROWS],
        "never_predicted": [one.name.partition("=")[2] for one in evaluation.never_predicted],
        "numbers": [_number(score) for score in evaluation.numbers],
        "slices": _shown_slices(beside, decided=True),
        "small_slices": _shown_slices(beside, decided=False),
        "decided": sum(one.decided for one in evaluation.slices),
        "weakest": next(iter(_weakest_slices(evaluation, decided=True)), None),
        "mistakes": [_shown_mistake(item) for item in evaluation.mistakes],
    }


def _matrix(evaluation: Evaluation) -> dict[str, Any]:
    """Returns what of classes is taken for another, or which labels are given together."""
    none = {"confusion": None, "left_out": 0, "confusion_large": False, "pairs": ()}
    if evaluation.kind == MULTILABEL:
        examples = [score.examples for score in evaluation.classes]
        kept = sorted(range(len(examples)), key=lambda i: -examples[i])[:_MOST_DRAWN_CLASSES]
        drawn = plots.draw_together(
            [evaluation.classes[i].name for i in kept],
            [[evaluation.together[i][j] for j in kept] for i in kept],
            [examples[i] for i in kept],
        )
        large = len(kept) > _MOST_CLASSES_ON_A_PHONE
        left_out = len(examples) - len(kept)
        return none | {"confusion": Markup(drawn), "left_out": left_out, "confusion_large": large}
    if evaluation.kind != CLASS:
        return none
    names = evaluation.class_names
    confusions = plots.most_confused(evaluation.confusion, names, _MOST_DRAWN_CLASSES)
    return {
        "confusion": Markup(plots.draw_confusion(confusions)),
        "left_out": confusions.left_out,
        "confusion_large": len(confusions.names) > _MOST_CLASSES_ON_A_PHONE,
        "pairs": plots.confused_pairs(evaluation.confusion, names, _MOST_PAIRS),
    }


def _number(score: NumberScore) -> dict[str, Any]:
    text = _TEXTS["rmse"]
    return {
        "name": score.name,
        "unit": score.unit,
        "values": [text(score.rmse), text(score.mae), show_difference(score.bias, text)],
        "errors": [(share, show_difference(value, text)) for share, value in score.errors.items()],
        "plots": [
            Markup(draw(score))
            for draw in (number_plots.draw_predictions, number_plots.draw_errors)
            if score.points
        ],
        "calibration": _drawn(lambda _: number_plots.draw_calibration(score), score.calibration),
    }


def _drawn(draw: Callable[[Any], str], points: Sequence[Any]) -> Markup | None:
    return Markup(draw(points)) if points else None


def _weakest_slices(evaluation: Evaluation, *, decided: bool) -> list[Slice]:
    """Returns the slices with examples enough for a rule, or too few, the weakest and then largest first."""
    slices = [one for one in evaluation.slices if one.examples and one.decided == decided]
    sign = -1 if MAIN[evaluation.kind] in FALLING else 1
    return sorted(slices, key=lambda one: (sign * one.value, -one.examples, one.name))


def _shown_slices(evaluation: Evaluation, *, decided: bool) -> list[dict[str, Any]]:
    """Returns the weakest slices, with the champion's value on the same examples.

    Only of a class it is known by which interval the two differ.
    """
    champion = {one.name: one.value for one in evaluation.champion.slices} if evaluation.champion else {}
    main = MAIN[evaluation.kind]
    text, rising = _TEXTS[main], main not in FALLING
    rows = []
    for one in _weakest_slices(evaluation, decided=decided)[:MOST_ROWS]:
        before, lead = champion.get(one.name), evaluation.leads.get(f"recall[{one.name}]")
        difference = None if before is None else one.value - before
        row = {**asdict(one), "value": text(one.value), "interval": show_interval(one.interval, text)}
        row["champion"] = "" if before is None else text(before)
        row["difference"] = "" if difference is None else show_difference(difference, text)
        row["change"] = "" if difference is None or lead is None else _change(difference, lead, rising=rising)
        rows.append({**row, "difference_interval": show_interval(lead.interval if lead else None)})
    return rows


def _shown_mistake(mistake: Mistake) -> dict[str, Any]:
    return {**asdict(mistake), "picture": make_picture(mistake.image) if mistake.image else None}
