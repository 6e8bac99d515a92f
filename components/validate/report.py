"""The report: one self-contained HTML page for a person, without network or script.

The tables of facts that end a report: dataset, training, export, versions.

How the numbers of an evaluation are shown to a person, beside those of the champion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from shardline.components.html import Rows, fact_rows, make_picture, render
from shardline.components.validate.evaluation import ClassScore, Evaluation, Interval, Lead, Mistake, Slice
from shardline.components.validate.gate import Blessing
from shardline.components.validate.metrics import confused_pairs, most_confused
from shardline.components.validate.model_card import TrainingRecord
from shardline.components.validate.plots import (
    draw_calibration,
    draw_confusion,
    draw_learning,
    draw_precision_recall,
    draw_roc,
)
from shardline.trainer.data.manifest import Feature, Manifest

_MOST_COLUMNS = 20

# Of export.json: shown elsewhere on the page, or nothing that a person reads.
_NOT_FACTS = ("format", "format_version", "fingerprint", "parameters", "bytes")

# Of settings.json: shown with the dataset, or in a table of its own.
_NOT_SETTINGS = ("class_names", "versions")
_UNSET = ("", "[]", "{}", "null")


def fact_tables(
    manifest: Manifest, export: Mapping[str, Any], training: TrainingRecord
) -> list[tuple[str, Rows]]:
    """Returns the titles and the rows of the tables.

    Args:
        manifest: Of the dataset.
        export: Content of export.json.
        training: How the model was trained, as far as that is known.
    """
    settings = {name: value for name, value in training.settings.items() if name not in _NOT_SETTINGS}
    tables = [
        ("Dataset", _dataset_rows(manifest)),
        ("Training", [(name, value) for name, value in fact_rows(settings) if value not in _UNSET]),
        ("Versions in training", fact_rows(training.settings.get("versions", {}))),
        ("Export", _export_rows(export)),
        ("Versions in validation", fact_rows(export["versions"])),
    ]
    return [(title, rows) for title, rows in tables if rows]


def _dataset_rows(manifest: Manifest) -> Rows:
    splits = ", ".join(f"{name} {split.records:,}" for name, split in manifest.splits.items())
    rows = [
        ("source", manifest.source),
        ("fingerprint", manifest.fingerprint),
        ("examples", splits),
        ("classes", f"{len(manifest.class_names):,}"),
        _input_row(manifest.inputs),
        ("rejected examples", _rejected(manifest)),
    ]
    return rows + fact_rows(manifest.settings)


def _input_row(inputs: Mapping[str, Feature]) -> tuple[str, str]:
    if "image" in inputs:
        shape = " x ".join("any" if size is None else str(size) for size in inputs["image"].shape)
        return "image", f"{shape}, {inputs['image'].encoding}"
    first = ", ".join(list(inputs)[:_MOST_COLUMNS])
    return f"{len(inputs):,} columns", first + (", …" if len(inputs) > _MOST_COLUMNS else "")


def _rejected(manifest: Manifest) -> str:
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in manifest.rejected.items())
    return f"{sum(manifest.rejected.values()):,} ({reasons})" if reasons else "none"


def _export_rows(export: Mapping[str, Any]) -> Rows:
    """Returns the signatures, and whatever else of export.json is a single value."""
    rows = [(name, _signature(parts)) for name, parts in export.get("signatures", {}).items()]
    single = {
        name.replace("_", " "): value
        for name, value in export.items()
        if isinstance(value, str | int | float) and name not in _NOT_FACTS
    }
    return rows + fact_rows(single)


def _signature(parts: Mapping[str, Mapping[str, Any]]) -> str:
    inputs, outputs = (
        ", ".join(
            f"{name}: {_tensor(spec)}" for name, spec in list(parts.get(side, {}).items())[:_MOST_COLUMNS]
        )
        for side in ("inputs", "outputs")
    )
    return f"{inputs} → {outputs}"


def _tensor(spec: Mapping[str, Any]) -> str:
    return f"{spec['dtype']} [{', '.join('n' if size is None else str(size) for size in spec['shape'])}]"


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


_MOST_ROWS = 40
_MOST_DRAWN_CLASSES = 25
_MOST_CLASSES_ON_A_PHONE = 12
_MOST_PAIRS = 10


def render_report(
    evaluation: Evaluation,
    blessing: Blessing,
    manifest: Manifest,
    export: Mapping[str, Any],
    training: TrainingRecord,
) -> str:
    """Renders the report.

    Args:
        evaluation: What was measured.
        blessing: The verdict on it.
        manifest: Of the dataset.
        export: Content of export.json.
        training: How the model was trained, as far as that is known.

    Returns:
        An HTML page. The same arguments give the same page.
    """
    confusions = most_confused(evaluation.confusion, evaluation.class_names, _MOST_DRAWN_CLASSES)
    return render(
        Path(__file__).with_name("report.html.j2"),
        model_name=training.settings.get("model", "model"),
        evaluation=evaluation,
        wrong=evaluation.examples - sum(row[i] for i, row in enumerate(evaluation.confusion)),
        blessing=blessing,
        manifest=manifest,
        export=export,
        quality=measure_rows(evaluation, QUALITY),
        serving=measure_rows(evaluation, SERVING),
        show_interval=show_interval,
        # The plots are our own markup; all text in them was escaped when it was drawn.
        learning=[Markup(draw_learning(name, training.history)) for name in training.metrics],
        left_out=confusions.left_out,
        confusion=Markup(draw_confusion(confusions)),
        confusion_large=len(confusions.names) > _MOST_CLASSES_ON_A_PHONE,
        pairs=confused_pairs(evaluation.confusion, evaluation.class_names, _MOST_PAIRS),
        calibration=_drawn(draw_calibration, evaluation.calibration),
        roc=_drawn(draw_roc, evaluation.roc),
        precision_recall=_drawn(draw_precision_recall, evaluation.precision_recall),
        classes=_shown_classes(evaluation.classes),
        slices=_shown_slices(evaluation),
        mistakes=[_shown_mistake(item) for item in evaluation.mistakes],
        tables=fact_tables(manifest, export, training),
    )


def _drawn(draw: Callable[[Any], str], points: Sequence[Any]) -> Markup | None:
    return Markup(draw(points)) if points else None


def _shown_classes(scores: tuple[ClassScore, ...]) -> tuple[ClassScore, ...]:
    if len(scores) <= _MOST_ROWS:
        return scores
    return tuple(sorted(scores, key=lambda score: (score.f1, score.name))[:_MOST_ROWS])


def _shown_slices(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Returns the weakest slices, with the champion's accuracy on the same examples."""
    before = {one.name: one.accuracy for one in evaluation.champion.slices} if evaluation.champion else {}
    weakest = sorted(evaluation.slices, key=lambda one: (not one.decided, one.accuracy, one.name))
    return [_shown_slice(one, before.get(one.name)) for one in weakest[:_MOST_ROWS]]


def _shown_slice(one: Slice, before: float | None) -> dict[str, Any]:
    change = (
        "" if before is None or one.accuracy == before else "better" if one.accuracy > before else "worse"
    )
    return {
        **asdict(one),
        "interval": show_interval(one.interval),
        "champion": before,
        "difference": "" if before is None else show_difference(one.accuracy - before),
        "difference_interval": "",
        "change": change,
    }


def _shown_mistake(mistake: Mistake) -> dict[str, Any]:
    return {**asdict(mistake), "picture": make_picture(mistake.image) if mistake.image else None}
