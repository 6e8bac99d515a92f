"""The model card: what a model is for, takes, gives, was made of and is worth, as Markdown and as HTML.

What a training left beside its model file: settings.json and history.csv, both optional.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.components.html import Rows, fact_rows, render
from shardline.components.validate.evaluation import Evaluation
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import ModelError

# The names that the trainer gives to these files; importing them would import Keras.
SETTINGS_FILE = "settings.json"
HISTORY_FILE = "history.csv"

_NOT_METRICS = ("epoch", "examples", "seconds")


@dataclass(frozen=True)
class TrainingRecord:
    """How a model was trained.

    Attributes:
        settings: Content of settings.json; empty where there is none.
        history: Columns of history.csv, a number per epoch, NaN where there is none; empty without a file.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that have a curve, without their `val_` twins."""
        names = [name for name in self.history if name not in _NOT_METRICS]
        return tuple(name for name in names if name.removeprefix("val_") not in names or name[:4] != "val_")


def read(model_file: Path) -> TrainingRecord:
    """Reads what lies beside a model file.

    Raises:
        ModelError: When one of the files is there and cannot be read.
    """
    settings, history = model_file.with_name(SETTINGS_FILE), model_file.with_name(HISTORY_FILE)
    return TrainingRecord(
        _read_settings(settings) if settings.exists() else {},
        _read_history(history) if history.exists() else {},
    )


def _read_settings(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path} beside the model: {error}; remove it or train again") from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), str):
        raise ModelError(f"{path} beside the model names no model function; remove it or train again")
    return content


def _read_history(path: Path) -> Mapping[str, tuple[float, ...]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        names = list(rows[0]) if rows else []
        return {name: tuple(float(row[name] or math.nan) for row in rows) for name in names}
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise ModelError(f"cannot read {path} beside the model: {error}; remove it or train again") from None


_MOST_CLASSES = 40
_MOST_COLUMNS = 20
_WEAKEST = 5


@dataclass(frozen=True)
class Section:
    """One part of the card.

    Attributes:
        title: Its heading.
        text: Its sentences.
        head: Names of the columns of its table.
        rows: Of the table; () for none.
    """

    title: str
    text: str
    head: tuple[str, ...] = ("", "")
    rows: Sequence[tuple[str, ...]] = ()


@dataclass(frozen=True)
class ModelCard:
    """A model card.

    Attributes:
        title: Name of the model.
        verdict: Whether it was blessed, and why, in one sentence.
        sections: Its parts in order.
    """

    title: str
    verdict: str
    sections: tuple[Section, ...]

    def to_markdown(self) -> str:
        """Returns the card as Markdown."""
        parts = [f"# {_escape(self.title)}", _escape(self.verdict)]
        for section in self.sections:
            parts += [f"## {section.title}", _escape(section.text)]
            if section.rows:
                lines = [section.head, ("---",) * len(section.head), *section.rows]
                parts.append("\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines))
        return "\n\n".join(parts) + "\n"

    def to_html(self) -> str:
        """Returns the card as a self-contained HTML page."""
        return render(Path(__file__).with_name("model_card.html.j2"), card=self, tables=[])


def make_card(
    manifest: Manifest,
    export: Mapping[str, Any],
    training: TrainingRecord,
    evaluation: Evaluation,
    verdict: str,
) -> ModelCard:
    """Returns the card of an exported model.

    Args:
        manifest: Of the dataset.
        export: Content of export.json.
        training: How the model was trained, as far as that is known.
        evaluation: What was measured.
        verdict: Whether it was blessed, and why, in one sentence.
    """
    sections = (
        _use(manifest),
        _interface(export),
        _quality(evaluation),
        _weak_points(evaluation),
        _data(manifest),
        Section("Training", "Settings of the run.", ("setting", "value"), _training_rows(training)),
        Section("Provenance", "How to tell this model from others.", ("what", "value"), _provenance(export)),
    )
    title = str(training.settings.get("model", "model"))
    shown = tuple(one for one in sections if one.rows or one.title == "Use")
    return ModelCard(title, verdict, shown)


def _use(manifest: Manifest) -> Section:
    names = ", ".join(manifest.class_names[:_MOST_CLASSES])
    more = len(manifest.class_names) - _MOST_CLASSES
    taken = "images" if "image" in manifest.inputs else f"rows of the columns {', '.join(manifest.inputs)}"
    return Section(
        "Use",
        f"Tells {len(manifest.class_names):,} classes of {taken} apart: {names}"
        + (f" and {more:,} more" if more > 0 else "")
        + ". It always gives one of these classes, also for what is none of them. Its quality was "
        f"measured on held-out examples of {manifest.source} and holds for data like these.",
    )


def _interface(export: Mapping[str, Any]) -> Section:
    return Section(
        "Interface",
        "Signatures of the SavedModel. The labels are inside; [n] is the number of examples in a request.",
        ("signature", "takes", "gives"),
        [
            (name, _specs(signature["inputs"]), _specs(signature["outputs"]))
            for name, signature in export["signatures"].items()
        ],
    )


def _specs(specs: Mapping[str, Mapping[str, Any]]) -> str:
    shown = [
        f"{name}: {spec['dtype']} [{', '.join('n' if size is None else str(size) for size in spec['shape'])}]"
        for name, spec in list(specs.items())[:_MOST_COLUMNS]
    ]
    return "; ".join(shown) + (f"; {len(specs) - len(shown):,} more" if len(specs) > len(shown) else "")


def _quality(evaluation: Evaluation) -> Section:
    metrics = evaluation.metrics or {"accuracy": evaluation.accuracy}
    rows = [
        (
            name,
            f"{value:.4g}",
            "to".join(f" {end:.4g} " for end in evaluation.intervals.get(name, ())).strip(),
        )
        for name, value in metrics.items()
    ]
    text = f"Measured on the export with {evaluation.examples:,} {evaluation.split} examples, each used once."
    if evaluation.non_finite:
        text += f" {evaluation.non_finite:,} of them got an output that is not finite."
    return Section("Quality", text, ("metric", "value", "95 % interval"), rows)


def _weak_points(evaluation: Evaluation) -> Section:
    weakest = sorted(evaluation.classes, key=lambda score: (score.f1, score.name))[:_WEAKEST]
    return Section(
        "Weakest classes",
        "Those with the lowest F1; all of them are in the report.",
        ("class", "examples", "precision", "recall"),
        [(one.name, f"{one.examples:,}", f"{one.precision:.3f}", f"{one.recall:.3f}") for one in weakest],
    )


def _data(manifest: Manifest) -> Section:
    rows: Rows = [
        ("source", manifest.source),
        ("fingerprint", manifest.fingerprint),
        *((f"{name} examples", f"{split.records:,}") for name, split in manifest.splits.items()),
        ("left out", f"{sum(manifest.rejected.values()):,}"),
    ]
    return Section("Data", "What it was trained and measured on.", ("what", "value"), rows)


def _training_rows(training: TrainingRecord) -> Rows:
    settings = training.settings.get("settings", training.settings)
    # Null, and empty text, stand for what was not asked for.
    return [(name, value) for name, value in fact_rows(settings) if value not in ("null", "", "[]", "{}")]


def _provenance(export: Mapping[str, Any]) -> Rows:
    rows = [("parameters", f"{export['parameters']:,}"), ("bytes", f"{export['bytes']:,}")]
    if export.get("max_difference") is not None:
        examples = f"on {export['compared_examples']:,} examples"
        rows.append(
            ("largest difference from the trained model", f"{export['max_difference']:.2g} {examples}")
        )
    if revision := export.get("git_revision"):
        rows.append(("git revision", revision))
    return rows + fact_rows(export["versions"])


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _escape(text: str) -> str:
    """Returns text that Markdown, and HTML inside it, shows as it is."""
    for sign in ("\\", "`", "*", "_", "|", "[", "]"):
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
