"""The report: one self-contained HTML page for a person, without network or script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from shardline.components.export_validate import measures
from shardline.components.export_validate.confusions import confused_pairs, most_confused
from shardline.components.export_validate.evaluation import ClassScore, Evaluation, Mistake, Slice
from shardline.components.export_validate.plots.calibration import draw_calibration
from shardline.components.export_validate.plots.confusion import draw_confusion
from shardline.components.export_validate.plots.curves import draw_precision_recall, draw_roc
from shardline.components.export_validate.plots.learning import draw_learning
from shardline.components.export_validate.report_facts import fact_tables
from shardline.components.export_validate.rules.blessing import Blessing
from shardline.components.export_validate.training_record import TrainingRecord
from shardline.components.html.page import render
from shardline.components.html.pictures import make_picture
from shardline.trainer.data.manifest import Manifest

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
        quality=measures.measure_rows(evaluation, measures.QUALITY),
        serving=measures.measure_rows(evaluation, measures.SERVING),
        show_interval=measures.show_interval,
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
        "interval": measures.show_interval(one.interval),
        "champion": before,
        "difference": "" if before is None else measures.show_difference(one.accuracy - before),
        "difference_interval": "",
        "change": change,
    }


def _shown_mistake(mistake: Mistake) -> dict[str, Any]:
    return {**asdict(mistake), "picture": make_picture(mistake.image) if mistake.image else None}
