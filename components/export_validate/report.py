"""The report: one self-contained HTML page for a person, without network or script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from components.export_validate.evaluation import ClassScore, Evaluation
from components.export_validate.gates import Blessing
from components.export_validate.pictures import make_picture
from components.export_validate.plots import draw_confusion, draw_curve
from components.export_validate.training_record import TrainingRecord
from trainer.data.manifest import Manifest

_MOST_CLASSES = 40
_MOST_REJECTED = 5

Rows = list[tuple[str, str]]


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
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
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
        tables.append(("Training", _rows(settings)))
    if trained_with:
        tables.append(("Versions in training", _rows(trained_with)))
    tables.append(("Versions in validation", _rows(export["versions"])))
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
    return rows + _rows(manifest.settings)


def _rejected(manifest: Manifest) -> str:
    if not manifest.rejected:
        return "none"
    shown = [f"{item['key']}: {item['reason']}" for item in manifest.rejected[:_MOST_REJECTED]]
    more = ["..."] if len(manifest.rejected) > _MOST_REJECTED else []
    return f"{len(manifest.rejected):,} ({'; '.join(shown + more)})"


def _rows(values: Mapping[str, Any], prefix: str = "") -> Rows:
    """Flattens nested settings: {"a": {"b": 1}} is one row, "a.b"."""
    rows: Rows = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += _rows(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value if isinstance(value, str) else json.dumps(value)))
    return rows
