"""Report of a validation: one self-contained HTML page for a person, without network or script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

from shardline.components.html import Rows, fact_rows, make_picture, render
from shardline.components.model_store import Export
from shardline.components.validate import plots
from shardline.components.validate.evaluation import (
    QUALITY,
    SERVING,
    ClassScore,
    Evaluation,
    Interval,
    Lead,
    Metric,
    Mistake,
)
from shardline.components.validate.model_card import MOST_COLUMNS, TrainingRecord, describe_tensors, set_rows
from shardline.components.validate.verdict import Blessing
from shardline.trainer.data.manifest import Feature, Manifest

# Of settings.json: shown with the dataset, or in a table of its own.
_NOT_SETTINGS = ("class_names", "versions")

_MOST_ROWS = 40
_MOST_DRAWN_CLASSES = 25
_MOST_CLASSES_ON_A_PHONE = 12
_MOST_PAIRS = 10

#: "unclear": the interval of the difference has 0 in it.
Change = Literal["better", "worse", "unclear", ""]


def render_report(
    evaluation: Evaluation,
    blessing: Blessing,
    manifest: Manifest,
    export: Export,
    training: TrainingRecord,
) -> str:
    """Returns the report as an HTML page; the same arguments give the same page."""
    confusions = plots.most_confused(evaluation.confusion, evaluation.class_names, _MOST_DRAWN_CLASSES)
    return render(
        Path(__file__).with_name("report.html.j2"),
        model_name=training.settings.get("model", "model"),
        evaluation=evaluation,
        wrong=evaluation.examples - sum(row[i] for i, row in enumerate(evaluation.confusion)),
        blessing=blessing,
        manifest=manifest,
        export=export,
        quality=metric_rows(evaluation.beside_champion, QUALITY),
        serving=metric_rows(evaluation.beside_champion, SERVING),
        show_interval=show_interval,
        # The plots are our own markup; all text in them was escaped when it was drawn.
        learning=[Markup(plots.draw_learning(name, training.history)) for name in training.metrics],
        left_out=confusions.left_out,
        confusion=Markup(plots.draw_confusion(confusions)),
        confusion_large=len(confusions.names) > _MOST_CLASSES_ON_A_PHONE,
        pairs=plots.confused_pairs(evaluation.confusion, evaluation.class_names, _MOST_PAIRS),
        calibration=_drawn(plots.draw_calibration, evaluation.calibration),
        roc=_drawn(plots.draw_roc, evaluation.roc),
        precision_recall=_drawn(plots.draw_precision_recall, evaluation.precision_recall),
        classes=_weakest(evaluation.classes),
        slices=_shown_slices(evaluation.beside_champion),
        mistakes=[_shown_mistake(item) for item in evaluation.mistakes],
        tables=fact_tables(manifest, export, training),
    )


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


def fact_tables(manifest: Manifest, export: Export, training: TrainingRecord) -> list[tuple[str, Rows]]:
    """Returns the titles and rows of the tables that end the report: dataset, training, export, versions."""
    settings = {name: value for name, value in training.settings.items() if name not in _NOT_SETTINGS}
    tables = [
        ("Dataset", _dataset_rows(manifest)),
        ("Training", set_rows(settings)),
        ("Versions in training", fact_rows(training.settings.get("versions", {}))),
        ("Export", _export_rows(export)),
        ("Versions in validation", fact_rows(export.versions)),
    ]
    return [(title, rows) for title, rows in tables if rows]


def _dataset_rows(manifest: Manifest) -> Rows:
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in manifest.rejected.items())
    rows = [
        ("source", manifest.source),
        ("fingerprint", manifest.fingerprint),
        ("examples", ", ".join(f"{name} {split.records:,}" for name, split in manifest.splits.items())),
        ("classes", f"{len(manifest.class_names):,}"),
        _input_row(manifest.inputs),
        ("rejected examples", f"{sum(manifest.rejected.values()):,} ({reasons})" if reasons else "none"),
    ]
    return rows + fact_rows(manifest.settings)


def _input_row(inputs: Mapping[str, Feature]) -> tuple[str, str]:
    if "image" in inputs:
        shape = " x ".join("any" if size is None else str(size) for size in inputs["image"].shape)
        return "image", f"{shape}, {inputs['image'].encoding}"
    first = ", ".join(list(inputs)[:MOST_COLUMNS])
    return f"{len(inputs):,} columns", first + (", …" if len(inputs) > MOST_COLUMNS else "")


def _export_rows(export: Export) -> Rows:
    rows = [
        (name, f"{describe_tensors(parts['inputs'])} → {describe_tensors(parts['outputs'])}")
        for name, parts in export.signatures.items()
    ]
    single = {
        "softmax added": export.softmax_added,
        "git revision": export.git_revision,
        "compared examples": export.compared_examples,
        "max difference": export.max_difference,
    }
    return rows + fact_rows({name: value for name, value in single.items() if value is not None})


def _drawn(draw: Callable[[Any], str], points: Sequence[Any]) -> Markup | None:
    return Markup(draw(points)) if points else None


def _weakest(scores: tuple[ClassScore, ...]) -> Sequence[ClassScore]:
    if len(scores) <= _MOST_ROWS:
        return scores
    return sorted(scores, key=lambda score: (score.f1, score.name))[:_MOST_ROWS]


def _shown_slices(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Returns the weakest slices, with the champion's accuracy on the same examples."""
    champion = {one.name: one.accuracy for one in evaluation.champion.slices} if evaluation.champion else {}
    weakest = sorted(evaluation.slices, key=lambda one: (not one.decided, one.accuracy, one.name))
    rows = []
    for one in weakest[:_MOST_ROWS]:
        before = champion.get(one.name)
        difference = None if before is None else one.accuracy - before
        row = {**asdict(one), "interval": show_interval(one.interval), "champion": before}
        row["difference"] = "" if difference is None else show_difference(difference)
        row["change"] = "" if difference is None else _change(difference)
        rows.append({**row, "difference_interval": ""})
    return rows


def _shown_mistake(mistake: Mistake) -> dict[str, Any]:
    return {**asdict(mistake), "picture": make_picture(mistake.image) if mistake.image else None}
