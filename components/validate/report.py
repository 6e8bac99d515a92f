"""Report of a validation: one self-contained HTML page for a person, without network or script."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

from shardline.components.html import make_picture, render
from shardline.components.model_store import Export
from shardline.components.validate import plots
from shardline.components.validate.evaluation import Evaluation, Interval, Lead, NumberScore
from shardline.components.validate.metrics import BY_KIND, FALLING, MAIN, QUALITY, SERVING, Metric
from shardline.components.validate.model_card import TrainingRecord, fact_tables, find_differences, make_calls
from shardline.components.validate.verdict import Blessing, Judgement
from shardline.trainer import files
from shardline.trainer.data.features import CLASS, MULTILABEL
from shardline.trainer.data.manifest import Manifest

#: Rows of a table.
MOST_ROWS = 40

_MOST_DRAWN_CLASSES = 25
_MOST_CLASSES_ON_A_PHONE = 12
_MOST_PAIRS = 10

_NO_MATRIX = {"confusion": None, "left_out": 0, "confusion_large": False, "pairs": ()}

_TEXTS = {metric.name: metric.text for metric in QUALITY}

#: "unclear": the interval of the difference has 0 in it.
Change = Literal["better", "worse", "unclear", ""]

_MOST_CHANGES = 8

# What decides comes first.
_ORDER: tuple[Judgement, ...] = ("failed", "undecided", "open", "off", "skipped", "passed")


def render_report(
    evaluation: Evaluation,
    blessing: Blessing,
    manifest: Manifest,
    export: Export,
    training: TrainingRecord,
    *,
    champion: Export | None = None,
    origin: Origin | None = None,
) -> str:
    """Returns the report as an HTML page; the same arguments give the same page.

    `champion` describes the champion, with which the model is compared in data, code and parameters.
    """
    return render(
        Path(__file__).with_name("report.html.j2"),
        model_name=training.settings.get("model", "model"),
        evaluation=evaluation,
        blessing=blessing,
        rules=sorted(blessing.rules, key=lambda rule: _ORDER.index(rule.verdict)),
        differences=find_differences(champion, export) if champion else None,
        most_changes=_MOST_CHANGES,
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
    """Where and when a model was judged.

    Attributes:
        created: Time, as a person reads it; "" where it is not known.
        run: Name of the run; "" outside of one.
        logs: What TensorBoard's --logdir takes; "" where there are no logs.
    """

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
        **(_matrix(evaluation) if evaluation.kind in (CLASS, MULTILABEL) else _NO_MATRIX),
        "wrong": evaluation.examples - sum(row[i] for i, row in enumerate(evaluation.confusion)),
        "calibration": _drawn(plots.draw_calibration, evaluation.calibration),
        "roc": _drawn(plots.draw_roc, evaluation.roc),
        "precision_recall": _drawn(plots.draw_precision_recall, evaluation.precision_recall),
        "classes": sorted(evaluation.classes, key=lambda score: (score.f1, -score.examples))[:MOST_ROWS],
        "never_predicted": [one.name.partition("=")[2] for one in evaluation.never_predicted],
        "numbers": [_number(score) for score in evaluation.numbers],
        "slices": _slice_rows(beside, decided=True),
        "small_slices": _slice_rows(beside, decided=False),
        "decided": sum(one.decided for one in evaluation.slices),
        "weakest": next(iter(_slice_rows(evaluation, decided=True)), None),
        "mistakes": [
            {**asdict(one), "picture": make_picture(one.image) if one.image else None}
            for one in evaluation.mistakes
        ],
    }


def _matrix(evaluation: Evaluation) -> dict[str, Any]:
    """Returns what of classes is taken for another, or which labels are given together."""
    names, pairs = evaluation.class_names, tuple[plots.ConfusedPair, ...]()
    if evaluation.kind == MULTILABEL:
        examples = [score.examples for score in evaluation.classes]
        kept = sorted(range(len(names)), key=lambda i: -examples[i])[:_MOST_DRAWN_CLASSES]
        together = [[evaluation.together[i][j] for j in kept] for i in kept]
        drawn = plots.draw_together([names[i] for i in kept], together, [examples[i] for i in kept])
        shown, left_out = len(kept), len(names) - len(kept)
    else:
        confusions = plots.most_confused(evaluation.confusion, names, _MOST_DRAWN_CLASSES)
        drawn = plots.draw_confusion(confusions)
        shown, left_out = len(confusions.names), confusions.left_out
        pairs = plots.confused_pairs(evaluation.confusion, names, _MOST_PAIRS)
    return {
        "confusion": Markup(drawn),
        "left_out": left_out,
        "confusion_large": shown > _MOST_CLASSES_ON_A_PHONE,
        "pairs": pairs,
    }


def _number(score: NumberScore) -> dict[str, Any]:
    text = _TEXTS["rmse"]
    return {
        "name": score.name,
        "unit": score.unit,
        "values": [text(score.rmse), text(score.mae), show_difference(score.bias, text)],
        "errors": [(share, show_difference(value, text)) for share, value in score.errors.items()],
        "plots": [
            Markup(draw(score)) for draw in (plots.draw_predictions, plots.draw_errors) if score.points
        ],
        "calibration": Markup(plots.draw_quantiles(score)) if score.calibration else None,
    }


def _drawn(draw: Callable[[Any], str], points: Sequence[Any]) -> Markup | None:
    return Markup(draw(points)) if points else None


def _slice_rows(evaluation: Evaluation, *, decided: bool) -> list[dict[str, Any]]:
    """Returns the slices with examples enough for a rule, or too few, the weakest and then largest first.

    The champion's value is that on the same examples. Only of a class it is known by which interval the two
    differ.
    """
    champion = {one.name: one.value for one in evaluation.champion.slices} if evaluation.champion else {}
    main = MAIN[evaluation.kind]
    text, rising = _TEXTS[main], main not in FALLING
    slices = [one for one in evaluation.slices if one.examples and one.decided == decided]
    slices.sort(key=lambda one: (one.value if rising else -one.value, -one.examples, one.name))
    rows = []
    for one in slices[:MOST_ROWS]:
        before, lead = champion.get(one.name), evaluation.leads.get(f"recall[{one.name}]")
        difference = None if before is None else one.value - before
        rows.append(
            {
                "name": one.name,
                "examples": one.examples,
                "value": text(one.value),
                "interval": show_interval(one.interval, text),
                "champion": "" if before is None else text(before),
                "difference": "" if difference is None else show_difference(difference, text),
                "difference_interval": show_interval(lead.interval if lead else None),
                "change": _change(difference, lead, rising=rising) if difference is not None and lead else "",
            }
        )
    return rows
