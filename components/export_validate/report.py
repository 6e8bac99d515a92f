"""The report: one self-contained HTML page for a person, without network or script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from components.export_validate.evaluation import ClassScore, Evaluation
from components.export_validate.gates import Blessing
from components.export_validate.plots import draw_confusion, draw_curve
from components.export_validate.training_record import TrainingRecord
from components.html.page import Rows, fact_rows, render
from components.html.pictures import make_picture
from trainer.data.manifest import Manifest

_MOST_CLASSES = 40


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
    return render(
        Path(__file__).with_name("report.html.j2"),
        model_name=training.settings.get("model", "model"),
        evaluation=evaluation,
        wrong=evaluation.examples - sum(row[i] for i, row in enumerate(evaluation.confusion)),
        blessing=blessing,
        manifest=manifest,
        export=export,
        # The plots are our own markup; all text in them was escaped when it was drawn.
        curves=[Markup(draw_curve(name, training.history)) for name in training.metrics],
        confusion=Markup(draw_confusion(evaluation.confusion, evaluation.class_names)),
        classes=_shown_classes(evaluation),
        mistakes=[{**asdict(item), "picture": make_picture(item.image)} for item in evaluation.mistakes],
        tables=_tables(manifest, export, training),
    )


def _shown_classes(evaluation: Evaluation) -> tuple[ClassScore, ...]:
    if len(evaluation.classes) <= _MOST_CLASSES:
        return evaluation.classes
    return tuple(sorted(evaluation.classes, key=lambda score: (score.f1, score.name))[:_MOST_CLASSES])


def _tables(
    manifest: Manifest, export: Mapping[str, Any], training: TrainingRecord
) -> list[tuple[str, Rows]]:
    settings = dict(training.settings)
    trained_with = settings.pop("versions", {})
    tables = [("Dataset", _dataset_rows(manifest))]
    if settings:
        tables.append(("Training", fact_rows(settings)))
    if trained_with:
        tables.append(("Versions in training", fact_rows(trained_with)))
    tables.append(("Versions in validation", fact_rows(export["versions"])))
    return tables


def _dataset_rows(manifest: Manifest) -> Rows:
    splits = ", ".join(f"{name} {split.records:,}" for name, split in manifest.splits.items())
    height, width, channels = manifest.image.shape
    rows = [
        ("source", manifest.source),
        ("fingerprint", manifest.fingerprint),
        ("examples", splits),
        ("classes", f"{len(manifest.class_names):,}"),
        ("image", f"{height} x {width} x {channels}, {manifest.image.encoding}"),
        ("rejected examples", _rejected(manifest)),
    ]
    return rows + fact_rows(manifest.settings)


def _rejected(manifest: Manifest) -> str:
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in manifest.rejected.items())
    return f"{sum(manifest.rejected.values()):,} ({reasons})" if reasons else "none"
