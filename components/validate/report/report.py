"""Report of a validation: one self-contained HTML page, without network or script."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from shardline.components.html import make_picture, render
from shardline.components.model_store import Export
from shardline.components.validate.gate.gate import CHAMPION, FAMILY, LEVEL
from shardline.components.validate.gate.power import PairedTest
from shardline.components.validate.gate.rules import parse_rules
from shardline.components.validate.gate.verdict import Blessing
from shardline.components.validate.metrics.evaluation import Evaluation, Interval, Lead, NumberScore
from shardline.components.validate.metrics.metrics import BY_KIND, MAIN, SERVING, Metric
from shardline.components.validate.report import plots
from shardline.components.validate.report.model_card import TrainingRecord, fact_tables, make_calls
from shardline.trainer.base import files
from shardline.trainer.data.manifest import Manifest

#: Rows of a table, at most.
MAX_ROWS = 40
#: Slices, rows with mistakes, and columns of a row that are shown; the others are folded.
MOST_SHOWN = 8

_SHORT = 40  # characters of a value that is no text
_MOST_DRAWN_CLASSES = 25
_MOST_CLASSES_ON_A_PHONE = 12

# Verdicts that decide come first.
_VERDICT_ORDER = ("failed", "unmeasured", "undecided", "off", "skipped", "passed")


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
        rules=sorted(blessing.rules, key=lambda rule: _VERDICT_ORDER.index(rule.verdict)),
        origin=origin or Origin(),
        manifest=manifest,
        export=export,
        sections=sections(evaluation),
        power=_power(evaluation.champion_comparison, blessing),
        calls=make_calls(export),
        serving=metric_rows(evaluation.champion_comparison, SERVING),
        format_interval=format_interval,
        family=FAMILY,
        most_rows=MAX_ROWS,
        most_shown=MOST_SHOWN,
        ruled={rule.metric for rule in blessing.rules},
        learning=[plots.draw_learning(name, training.history) for name in training.metrics],
        tables=fact_tables(manifest, export, training),
    )


@dataclass(frozen=True)
class Origin:
    """Time and run of a validation, and the directory for TensorBoard's --logdir; "" where not known."""

    created: str = ""
    run: str = ""
    logs: str = ""

    @classmethod
    def of(cls, model_file: Path, training: TrainingRecord, run: str) -> Origin:
        """Returns the origin of a model that is judged now, with the logs of its training."""
        named = training.settings.get("settings", {}).get("tensorboard_log_dir")
        directory = model_file.parent
        paths = [files.local_path(named)] if named and isinstance(named, str) else []
        paths += [directory / "logs", directory.parent / "logs"]
        # All attempts of a job have one directory, below the root of the runs.
        paths += [root / "jobs" / run / "logs" for root in list(directory.parents)[:4] if run]
        logs = next((path for path in paths if path.is_dir()), None)
        # Shown as a URI: a bucket is mounted here only.
        shown = re.sub("^/gcs/", "gs://", str(logs or ""))
        return cls(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", run, shown)


class Row(NamedTuple):
    """A value of a model and of the champion, formatted; "" where there is none.

    The difference is the model's value minus the champion's; the intervals are 95 % intervals. `change` is
    better, worse or, where the interval of the difference contains 0, unclear; "" without an interval.
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
    """Returns rows of the metrics that were measured, in their order."""
    before = evaluation.champion.metrics if evaluation.champion else {}
    intervals, leads = evaluation.intervals, evaluation.leads
    rows = []
    for metric in metrics:
        if (value := evaluation.metrics.get(name := metric.name)) is not None:
            interval = format_interval(intervals.get(name), metric.text)
            row = Row(name, metric.label, metric.text(value), interval)
            rows.append(_compare_row(row, metric, value, before.get(name), leads.get(name)))
    return rows


def _compare_row(row: Row, metric: Metric, value: float, before: float | None, lead: Lead | None) -> Row:
    if before is None:
        return row
    text = metric.text
    difference, change = value - before, ""
    if lead and lead.interval[0] <= 0 <= lead.interval[1] and difference:
        change = "unclear"
    elif lead and difference:
        change = "better" if (difference > 0) == metric.higher_is_better else "worse"
    return row._replace(
        champion=text(before),
        difference=format_difference(difference, text),
        difference_interval=format_interval(lead.interval if lead else None, text),
        change=change,
    )


def format_interval(interval: Interval | None, text: Callable[[float], str] = "{:.4f}".format) -> str:
    """Returns "0.9512 to 0.9740", or "" for none and for one whose ends are written alike."""
    ends = dict.fromkeys(map(text, interval or ()))
    return " to ".join(ends) if len(ends) > 1 else ""


def format_difference(difference: float, text: Callable[[float], str] = "{:.4f}".format) -> str:
    """Returns a difference with its sign."""
    sign = "±" if difference == 0 else "+" if difference > 0 else "-"
    return sign + text(abs(difference))


def sections(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Returns the data that the report's template shows of each label."""
    whole, compared = evaluation.champion_comparison, []
    for part in whole.parts:  # each with the champion's evaluation of the same label
        prefix = f"{part.label}."
        leads = {
            name.removeprefix(prefix): lead for name, lead in whole.leads.items() if name.startswith(prefix)
        }
        compared.append(replace(part, champion=whole.champion and whole.champion.of(part.label), leads=leads))
    pairs = zip(evaluation.each, compared or [whole], strict=True)
    return [_section(*pair, name_label=bool(whole.parts)) for pair in pairs]


def _section(evaluation: Evaluation, compared: Evaluation, *, name_label: bool) -> dict[str, Any]:
    main = next(metric for metric in BY_KIND[evaluation.kind] if metric.name == MAIN[evaluation.kind])
    bins, names, confusion = evaluation.calibration, evaluation.class_names, evaluation.confusion
    drawn = {}
    if bins:
        described = (
            f"{b.accuracy:.2f} right of {b.examples:,} at confidence {b.confidence:.2f}" for b in bins
        )
        points = [(each.confidence, each.accuracy) for each in bins]
        description = f"Reliability: {', '.join(described)}."
        drawn["Calibration"] = plots.draw_reliability(points, description)
    if roc := evaluation.roc:
        drawn["ROC"] = plots.draw_curves(roc, "ROC", "false positive rate", "true positive rate")
    if recall := evaluation.precision_recall:
        shown = plots.draw_curves(recall, "Precision over recall", "recall", "precision")
        drawn["Precision and recall"] = shown
    return {
        "label": evaluation.label if name_label else "",
        "kind": evaluation.kind,
        "main": main.name,
        "text": main.text,
        "evaluation": evaluation,
        "quality": metric_rows(compared, BY_KIND[evaluation.kind]),
        "confusion": confusion and plots.draw_confusion(confusion, names, _MOST_DRAWN_CLASSES),
        "confusion_large": len(names) > _MOST_CLASSES_ON_A_PHONE,
        "drawn_classes": min(len(names), _MOST_DRAWN_CLASSES),
        "wrong": evaluation.examples - sum(row[i] for i, row in enumerate(confusion)),
        "curves": drawn,
        "classes": sorted(evaluation.classes, key=lambda score: (score.f1, -score.examples))[:MAX_ROWS],
        "never_predicted": [item.name.partition("=")[2] for item in evaluation.never_predicted],
        "numbers": [_number_section(score, main.text) for score in evaluation.numbers],
        "slices": _slice_rows(compared, main, decided=True),
        "small_slices": _slice_rows(compared, main, decided=False),
        "decided": sum(item.decided for item in evaluation.slices),
        "weakest": next(iter(_slice_rows(evaluation, main, decided=True)), None),
        "mistakes": _mistake_rows(evaluation, main),
    }


def _power(evaluation: Evaluation, blessing: Blessing) -> dict[str, tuple[PairedTest, str]]:
    judged = [each for each in blessing.rules if each.name == CHAMPION and each.verdict != "off"]
    level = min(LEVEL, FAMILY / max(1, len(judged)))
    tests = {
        rule.label: PairedTest.of(evaluation, rule, level) for rule in parse_rules(r.rule for r in judged)
    }
    return {label: (test, plots.draw_power(test)) for label, test in tests.items() if test}


def _mistake_rows(evaluation: Evaluation, main: Metric) -> list[dict[str, Any]]:
    pairs = (pair for mistake in evaluation.mistakes for pair in mistake.values.items())
    texts = {name for name, value in pairs if len(value) > _SHORT}  # before the other columns of a row
    return [
        {
            **asdict(mistake),
            "picture": make_picture(mistake.image) if mistake.image else None,
            "error": "" if mistake.error is None else format_difference(mistake.error, main.text),
            "values": sorted(mistake.values.items(), key=lambda pair: pair[0] not in texts),
        }
        for mistake in evaluation.mistakes
    ]


def _number_section(score: NumberScore, text: Callable[[float], str]) -> dict[str, Any]:
    drawn = {}
    if score.points:
        drawn["Predicted and true"] = plots.draw_predictions(score)
    return {
        "name": score.name,
        "unit": score.unit,
        "values": [text(score.rmse), text(score.mae), format_difference(score.bias, text)],
        "errors": [(share, format_difference(value, text)) for share, value in score.errors.items()],
        "plots": drawn,
    }


def _slice_rows(evaluation: Evaluation, main: Metric, *, decided: bool) -> list[Row]:
    """Returns rows of the slices that are decided, or not, the weakest and then the largest first."""
    champion = {item.name: item.value for item in evaluation.champion.slices} if evaluation.champion else {}
    slices = [item for item in evaluation.slices if item.examples and item.decided == decided]
    sign = 1 if main.higher_is_better else -1
    slices.sort(key=lambda item: (sign * item.value, -item.examples, item.name))
    rows = []
    for item in slices[:MAX_ROWS]:
        lead = evaluation.leads.get(f"{main.name}[{item.name}]")
        interval = format_interval(item.interval, main.text)
        row = Row(item.name, item.name, main.text(item.value), interval, examples=item.examples)
        rows.append(_compare_row(row, main, item.value, champion.get(item.name), lead))
    return rows
