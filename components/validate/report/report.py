"""Report of a validation: one self-contained HTML page for a person, without network or script."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from shardline.components.html import make_picture, render
from shardline.components.model_store import Export
from shardline.components.validate.gate.verdict import Blessing, Judgement
from shardline.components.validate.metrics.evaluation import Evaluation, Interval, Lead, NumberScore
from shardline.components.validate.metrics.metrics import BY_KIND, MAIN, QUALITY, SERVING, Metric
from shardline.components.validate.report import plots
from shardline.components.validate.report.model_card import TrainingRecord, fact_tables, make_calls
from shardline.trainer.base import files
from shardline.trainer.data.manifest import Manifest

#: Rows of a table.
MOST_ROWS = 40

_MOST_DRAWN_CLASSES = 25
_MOST_CLASSES_ON_A_PHONE = 12

_TEXTS = {metric.name: metric.text for metric in QUALITY}

# What decides comes first.
_ORDER: tuple[Judgement, ...] = ("failed", "undecided", "open", "off", "skipped", "passed")


def render_report(
    evaluation: Evaluation,
    blessing: Blessing,
    manifest: Manifest,
    export: Export,
    training: TrainingRecord,
    *,
    origin: Origin | None = None,
) -> str:
    """Returns the report as an HTML page; the same arguments give the same page."""
    return render(
        Path(__file__).with_name("report.html.j2"),
        model_name=training.settings.get("model", "model"),
        evaluation=evaluation,
        blessing=blessing,
        rules=sorted(blessing.rules, key=lambda rule: _ORDER.index(rule.verdict)),
        origin=origin or Origin(),
        manifest=manifest,
        export=export,
        sections=sections(evaluation),
        calls=make_calls(export),
        serving=metric_rows(evaluation.beside_champion, SERVING),
        show_interval=show_interval,
        most_rows=MOST_ROWS,
        # The plots are our own markup; all text in them was escaped when it was drawn.
        learning=[Markup(plots.draw_learning(name, training.history)) for name in training.metrics],
        tables=fact_tables(manifest, export, training),
    )


@dataclass(frozen=True)
class Origin:
    """Time and run in which a model was judged, and what TensorBoard's --logdir takes; "" where not known."""

    created: str = ""
    run: str = ""
    logs: str = ""

    @classmethod
    def of(cls, model_file: Path, training: TrainingRecord, run: str) -> Origin:
        """Returns that of a model which is judged now; its logs lie where training has put them."""
        named = training.settings.get("settings", {}).get("tensorboard_log_dir")
        directory = model_file.parent
        places = [files.local_path(named)] if named and isinstance(named, str) else []
        places += [directory / "logs", directory.parent / "logs"]
        # All attempts of a job have one directory, below the root of the runs.
        places += [root / "jobs" / run / "logs" for root in list(directory.parents)[:4] if run]
        logs = next((path for path in places if path.is_dir()), None)
        # A bucket that is mounted here is a URI elsewhere.
        shown = re.sub("^/gcs/", "gs://", str(logs or ""))
        return cls(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", run, shown)


class Row(NamedTuple):
    """A value of a model and of the champion, as texts; "" where there is none.

    The difference is the model's value minus the champion's; the intervals are 95 % intervals. `change` is
    better, worse or, where the interval of the difference has 0 in it, unclear.
    """

    name: str
    label: str
    value: str
    interval: str
    champion: str = ""
    difference: str = ""
    difference_interval: str = ""
    change: str = ""
    examples: int = 0


def metric_rows(evaluation: Evaluation, metrics: Sequence[Metric]) -> list[Row]:
    """Returns those of the metrics that were measured, in their order."""
    before = evaluation.champion.metrics if evaluation.champion else {}
    intervals, leads = evaluation.intervals, evaluation.leads
    return [
        _row(metric, value, before.get(name), intervals.get(name), leads.get(name), name, metric.label)
        for metric in metrics
        if (value := evaluation.metrics.get(name := metric.name)) is not None
    ]


def _row(
    metric: Metric,
    value: float,
    before: float | None,
    interval: Interval | None,
    lead: Lead | None,
    name: str,
    label: str,
    examples: int = 0,
) -> Row:
    text = metric.text
    row = Row(name, label, text(value), show_interval(interval, text), examples=examples)
    if before is None:
        return row
    difference, change = value - before, ""
    if lead and lead.interval[0] <= 0 <= lead.interval[1] and difference:
        change = "unclear"
    elif difference:
        change = "better" if (difference > 0) == metric.rising else "worse"
    return row._replace(
        champion=text(before),
        difference=show_difference(difference, text),
        difference_interval=show_interval(lead.interval if lead else None, text),
        change=change,
    )


def show_interval(interval: Interval | None, text: Callable[[float], str] = "{:.4f}".format) -> str:
    """Returns "0.9512 to 0.9740", or "" for none."""
    return "" if interval is None else " to ".join(map(text, interval))


def show_difference(difference: float, text: Callable[[float], str] = "{:.4f}".format) -> str:
    """Returns a difference with its sign."""
    sign = "±" if difference == 0 else "+" if difference > 0 else "-"
    return sign + text(abs(difference))


def sections(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Returns what a report shows of each label, for its template."""
    whole, beside = evaluation.beside_champion, []
    for part in whole.parts:  # each beside the champion's of the same label
        prefix = f"{part.label}."
        leads = {
            name.removeprefix(prefix): one for name, one in whole.leads.items() if name.startswith(prefix)
        }
        beside.append(replace(part, champion=whole.champion and whole.champion.of(part.label), leads=leads))
    pairs = zip(evaluation.each, beside or [whole], strict=True)
    return [_section(*both, several=bool(whole.parts)) for both in pairs]


def _section(evaluation: Evaluation, beside: Evaluation, *, several: bool) -> dict[str, Any]:
    main = next(one for one in BY_KIND[evaluation.kind] if one.name == MAIN[evaluation.kind])
    bins, names = evaluation.calibration, evaluation.class_names
    curves = {
        "ROC": (evaluation.roc, "ROC", "false positive rate", "true positive rate"),
        "Precision and recall": (
            *(evaluation.precision_recall, "Precision over recall", "recall", "precision"),
        ),
    }
    drawn = {title: plots.draw_curves(*curve) for title, curve in curves.items() if curve[0]}
    if bins:
        said = (
            f"{one.accuracy:.2f} right of {one.examples:,} at confidence {one.confidence:.2f}" for one in bins
        )
        points = [(one.confidence, one.accuracy) for one in bins]
        words = f"Reliability: {', '.join(said)}."
        drawn = {"Calibration": plots.draw_reliability(points, "confidence", "right", words), **drawn}
    confusion = evaluation.confusion
    return {
        "label": evaluation.label if several else "",
        "kind": evaluation.kind,
        "main": main.name,
        "main_label": main.label,
        "text": main.text,
        "evaluation": evaluation,
        "quality": metric_rows(beside, BY_KIND[evaluation.kind]),
        "champion": beside.champion,
        "confusion": confusion and Markup(plots.draw_confusion(confusion, names, _MOST_DRAWN_CLASSES)),
        "confusion_large": len(names) > _MOST_CLASSES_ON_A_PHONE,
        "drawn_classes": min(len(names), _MOST_DRAWN_CLASSES),
        "wrong": evaluation.examples - sum(row[i] for i, row in enumerate(confusion)),
        "curves": {title: Markup(one) for title, one in drawn.items()},
        "classes": sorted(evaluation.classes, key=lambda score: (score.f1, -score.examples))[:MOST_ROWS],
        "never_predicted": [one.name.partition("=")[2] for one in evaluation.never_predicted],
        "numbers": [_number(score) for score in evaluation.numbers],
        "slices": _slice_rows(beside, main, decided=True),
        "small_slices": _slice_rows(beside, main, decided=False),
        "decided": sum(one.decided for one in evaluation.slices),
        "weakest": next(iter(_slice_rows(evaluation, main, decided=True)), None),
        "mistakes": [
            {**asdict(one), "picture": make_picture(one.image) if one.image else None}
            for one in evaluation.mistakes
        ],
    }


def _number(score: NumberScore) -> dict[str, Any]:
    text, drawn = _TEXTS["rmse"], {}
    if score.points:
        drawn["Predicted and true"] = Markup(plots.draw_predictions(score))
    if score.calibration:
        said = ", ".join(f"{below:.3f} below quantile {share:g}" for share, below in score.calibration)
        words = f"Share of true {score.name} below each quantile: {said}."
        names = "quantile", "share of true values below it"
        drawn["Calibration of quantiles"] = Markup(plots.draw_reliability(score.calibration, *names, words))
    return {
        "name": score.name,
        "unit": score.unit,
        "values": [text(score.rmse), text(score.mae), show_difference(score.bias, text)],
        "errors": [(share, show_difference(value, text)) for share, value in score.errors.items()],
        "plots": drawn,
    }


def _slice_rows(evaluation: Evaluation, main: Metric, *, decided: bool) -> list[Row]:
    """Returns the slices with examples enough for a rule, or too few, the weakest and then largest first.

    Only of a class it is known by which interval model and champion differ.
    """
    champion = {one.name: one.value for one in evaluation.champion.slices} if evaluation.champion else {}
    slices = [one for one in evaluation.slices if one.examples and one.decided == decided]
    slices.sort(key=lambda one: (one.value if main.rising else -one.value, -one.examples, one.name))
    rows = []
    for one in slices[:MOST_ROWS]:
        lead = evaluation.leads.get(f"recall[{one.name}]")
        before = champion.get(one.name)
        row = _row(main, one.value, before, one.interval, lead, one.name, one.name, one.examples)
        rows.append(row if lead else row._replace(change=""))
    return rows
