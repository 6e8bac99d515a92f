"""Report of a validation: one self-contained HTML page for a person, without network or script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from markupsafe import Markup

from shardline.components.html import Rows, fact_rows, render
from shardline.components.model_store import Export
from shardline.components.validate import plots
from shardline.components.validate.calls import make_calls
from shardline.components.validate.differences import find_differences
from shardline.components.validate.evaluation import Evaluation
from shardline.components.validate.metrics import SERVING
from shardline.components.validate.model_card import MOST_COLUMNS, TrainingRecord, describe_tensors, set_rows
from shardline.components.validate.sections import MOST_ROWS, metric_rows, sections, show_interval
from shardline.components.validate.verdict import Blessing, Verdict
from shardline.trainer import files
from shardline.trainer.data.features import LABEL, REGRESSION, Feature, Label
from shardline.trainer.data.manifest import Manifest

# Of settings.json: shown with the dataset, or in a table of its own.
_NOT_SETTINGS = ("class_names", "versions")

_MOST_CHANGES = 8

# What decides comes first.
_ORDER: tuple[Verdict, ...] = ("failed", "undecided", "open", "off", "skipped", "passed")


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
        *map(_label_row, manifest.labels),
        _input_row(manifest.inputs),
        ("rejected examples", f"{sum(manifest.rejected.values()):,} ({reasons})" if reasons else "none"),
    ]
    return rows + fact_rows(manifest.settings)


def _label_row(label: Label) -> tuple[str, str]:
    of = f" of {label.name}" if label.name != LABEL else ""
    if label.kind == REGRESSION:
        units = label.units or ("",) * len(label.outputs)
        named = [
            f"{name} [{unit}]" if unit else name for name, unit in zip(label.outputs, units, strict=True)
        ]
        return f"numbers{of}", ", ".join(named)
    return (
        f"{label.kind.replace('class', 'classes').replace('multilabel', 'labels')}{of}",
        f"{len(label.outputs):,}",
    )


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
