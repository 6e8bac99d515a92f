"""Report of a validation: one self-contained HTML page for a person, without network or script."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

from shardline.components.html import Rows, fact_rows, make_picture, render
from shardline.components.model_store import Export
from shardline.components.validate import plots
from shardline.components.validate.calls import make_calls
from shardline.components.validate.differences import find_differences
from shardline.components.validate.evaluation import Evaluation, Interval, Lead, Mistake, Slice
from shardline.components.validate.metrics import FALLING, MAIN, QUALITY, SERVING, Metric
from shardline.components.validate.model_card import MOST_COLUMNS, TrainingRecord, describe_tensors, set_rows
from shardline.components.validate.verdict import Blessing, Verdict
from shardline.trainer import files
from shardline.trainer.data.features import Feature
from shardline.trainer.data.manifest import Manifest

# Of settings.json: shown with the dataset, or in a table of its own.
_NOT_SETTINGS = ("class_names", "versions")

_MOST_ROWS = 40
_MOST_DRAWN_CLASSES = 25
_MOST_CLASSES_ON_A_PHONE = 12
_MOST_PAIRS = 10
_MOST_CHANGES = 8

# What decides comes first.
_ORDER: tuple[Verdict, ...] = ("failed", "undecided", "open", "off", "skipped", "passed")

#: "unclear": the interval of the difference has 0 in it.
Change = Literal["better", "worse", "unclear", ""]


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
    confusions = None
    if evaluation.confusion:
        confusions = plots.most_confused(evaluation.confusion, evaluation.class_names, _MOST_DRAWN_CLASSES)
    return render(
        Path(__file__).with_name("report.html.j2"),
        model_name=training.settings.get("model", "model"),
        evaluation=evaluation,
        main=MAIN.get(evaluation.kind, ""),
        wrong=evaluation.examples - sum(row[i] for i, row in enumerate(evaluation.confusion)),
        blessing=blessing,
        rules=sorted(blessing.rules, key=lambda rule: _ORDER.index(rule.verdict)),
        weakest=_weakest_slice(evaluation),
        differences=find_differences(champion, export) if champion else None,
        most_changes=_MOST_CHANGES,
        origin=origin or Origin(),
        manifest=manifest,
        export=export,
        quality=metric_rows(evaluation.beside_champion, QUALITY),
        calls=make_calls(export),
        serving=metric_rows(evaluation.beside_champion, SERVING),
        show_interval=show_interval,
        most_rows=_MOST_ROWS,
        # The plots are our own markup; all text in them was escaped when it was drawn.
        learning=[Markup(plots.draw_learning(name, training.history)) for name in training.metrics],
        left_out=confusions.left_out if confusions else 0,
        confusion=Markup(plots.draw_confusion(confusions)) if confusions else None,
        confusion_large=len(confusions.names) > _MOST_CLASSES_ON_A_PHONE if confusions else False,
        pairs=plots.confused_pairs(evaluation.confusion, evaluation.class_names, _MOST_PAIRS)
        if confusions
        else [],
        calibration=_drawn(plots.draw_calibration, evaluation.calibration),
        roc=_drawn(plots.draw_roc, evaluation.roc),
        precision_recall=_drawn(plots.draw_precision_recall, evaluation.precision_recall),
        classes=sorted(evaluation.classes, key=lambda score: (score.f1, -score.examples))[:_MOST_ROWS],
        never_predicted=[one.name.removeprefix("class=") for one in evaluation.never_predicted],
        slices=_shown_slices(evaluation.beside_champion, decided=True),
        small_slices=_shown_slices(evaluation.beside_champion, decided=False),
        mistakes=[_shown_mistake(item) for item in evaluation.mistakes],
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
        "parameters": export.parameters,
        "softmax added": export.softmax_added,
        "git revision": export.git_revision,
        "compared examples": export.compared_examples,
        "max difference": export.max_difference,
    }
    return rows + fact_rows({name: value for name, value in single.items() if value is not None})


def _drawn(draw: Callable[[Any], str], points: Sequence[Any]) -> Markup | None:
    return Markup(draw(points)) if points else None


def _weakest_slices(evaluation: Evaluation, *, decided: bool) -> list[Slice]:
    """Returns the slices with examples enough for a rule, or too few, the weakest and then largest first."""
    slices = [one for one in evaluation.slices if one.examples and one.decided == decided]
    sign = -1 if MAIN.get(evaluation.kind) in FALLING else 1
    return sorted(slices, key=lambda one: (sign * one.value, -one.examples, one.name))


def _weakest_slice(evaluation: Evaluation) -> Slice | None:
    return next(iter(_weakest_slices(evaluation, decided=True)), None)


def _shown_slices(evaluation: Evaluation, *, decided: bool) -> list[dict[str, Any]]:
    """Returns the weakest slices, with the champion's value on the same examples.

    Only of a class it is known by which interval the two differ.
    """
    champion = {one.name: one.value for one in evaluation.champion.slices} if evaluation.champion else {}
    rows = []
    for one in _weakest_slices(evaluation, decided=decided)[:_MOST_ROWS]:
        before, lead = champion.get(one.name), evaluation.leads.get(f"recall[{one.name}]")
        difference = None if before is None else one.value - before
        row = {**asdict(one), "interval": show_interval(one.interval), "champion": before}
        row["difference"] = "" if difference is None else show_difference(difference)
        row["change"] = "" if difference is None or lead is None else _change(difference, lead)
        rows.append({**row, "difference_interval": show_interval(lead.interval if lead else None)})
    return rows


def _shown_mistake(mistake: Mistake) -> dict[str, Any]:
    return {**asdict(mistake), "picture": make_picture(mistake.image) if mistake.image else None}
