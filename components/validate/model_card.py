"""Model card: what a model is for, takes, returns, was made from and is worth, as Markdown and as HTML."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.components.html import Rows, fact_rows, render
from shardline.components.model_store import SETTINGS_FILE, Export
from shardline.components.validate.evaluation import Evaluation
from shardline.trainer import files
from shardline.trainer.data.features import LABEL, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.errors import ModelError

# The name that the trainer gives to this file; importing it would import Keras.
HISTORY_FILE = "history.csv"

_NOT_METRICS = ("epoch", "examples", "seconds")
_UNSET = ("", "[]", "{}", "null")
_MOST_CLASSES = 40
MOST_COLUMNS = 20
_WEAKEST = 5


@dataclass(frozen=True)
class TrainingRecord:
    """Settings and history that a training left beside its model file; empty where there is no such file.

    Attributes:
        settings: Content of settings.json.
        history: Columns of history.csv, a number per epoch, NaN where there is none.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def initial_model(self) -> str:
        """What the training started from, as its option of that name; "" for nothing."""
        return str(self.settings.get("settings", self.settings).get("initial_model") or "")

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the dataset of the training; "" where it is not known."""
        return str(self.settings.get("fingerprint") or "")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that have a curve, without their `val_` twins."""
        names = [name for name in self.history if name not in _NOT_METRICS]
        return tuple(name for name in names if name.removeprefix("val_") not in names or name[:4] != "val_")


def read_training(model_file: Path) -> TrainingRecord:
    """Reads settings.json and history.csv beside a model file; raises ModelError when one cannot be read."""
    return TrainingRecord(
        _read(model_file.with_name(SETTINGS_FILE), _parse_settings),
        _read(model_file.with_name(HISTORY_FILE), _parse_history),
    )


def _read(path: Path, parse: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    try:
        return parse(path) if path.exists() else {}
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise ModelError(f"cannot read {path} beside the model: {error}; remove it or train again") from None


def _parse_settings(path: Path) -> dict[str, Any]:
    content = files.read_json(path, ModelError)
    if not isinstance(content.get("model"), str) or not isinstance(content.get("settings", {}), dict):
        raise ModelError(f"{path} beside the model names no model function; remove it or train again")
    return content


def _parse_history(path: Path) -> dict[str, tuple[float, ...]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    # A metric of a number for each class is a list there, and has no curve.
    single = [name for name in (rows[0] if rows else ()) if not any(row[name][:1] == "[" for row in rows)]
    return {name: tuple(float(row[name] or math.nan) for row in rows) for name in single}


def set_rows(settings: Mapping[str, Any]) -> Rows:
    """Returns nested settings as rows, without those that are not set: null and empty values."""
    return [(name, value) for name, value in fact_rows(settings) if value not in _UNSET]


def describe_tensors(specs: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the tensors of a signature in words: "images: string [n]"; of many the first 20."""
    shown = [
        f"{name}: {spec['dtype']} [{', '.join('n' if size is None else str(size) for size in spec['shape'])}]"
        for name, spec in list(specs.items())[:MOST_COLUMNS]
    ]
    return "; ".join(shown) + (f"; {len(specs) - len(shown):,} more" if len(specs) > len(shown) else "")


@dataclass(frozen=True)
class Section:
    """One part of the card: heading, sentences, and a table with the names of its columns, if it has rows."""

    title: str
    text: str
    head: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()


@dataclass(frozen=True)
class ModelCard:
    """A model card; `verdict` says in one sentence whether the model was blessed, and why."""

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
    manifest: Manifest, export: Export, training: TrainingRecord, evaluation: Evaluation, verdict: str
) -> ModelCard:
    """Returns the card of an exported model; a section without rows is left out."""
    weakest = sorted(evaluation.classes, key=lambda score: (score.f1, score.name))[:_WEAKEST]
    settings = training.settings.get("settings", training.settings)
    sections = (
        Section(
            "Interface",
            "Signatures of the SavedModel. The labels are inside; [n] is the number of examples in a "
            "request.",
            ("signature", "takes", "gives"),
            [
                (name, describe_tensors(signature["inputs"]), describe_tensors(signature["outputs"]))
                for name, signature in export.signatures.items()
            ],
        ),
        _quality(evaluation),
        Section(
            "Weakest classes",
            "Those with the lowest F1; all of them are in the report.",
            ("class", "examples", "precision", "recall"),
            [(c.name, f"{c.examples:,}", f"{c.precision:.3f}", f"{c.recall:.3f}") for c in weakest],
        ),
        Section("Data", "What it was trained and measured on.", ("what", "value"), _data(manifest)),
        Section("Training", "Settings of the run.", ("setting", "value"), set_rows(settings)),
        Section("Provenance", "How to tell this model from others.", ("what", "value"), _provenance(export)),
    )
    title = str(training.settings.get("model", "model"))
    return ModelCard(title, verdict, (_use(manifest), *(one for one in sections if one.rows)))


def _use(manifest: Manifest) -> Section:
    taken = "images" if "image" in manifest.inputs else f"rows of the columns {', '.join(manifest.inputs)}"
    return Section(
        "Use",
        " ".join(_use_of(label, taken) for label in manifest.labels)
        + f" Its quality was measured on held-out examples of {manifest.source} and holds for data like "
        "these.",
    )


def _use_of(label: Label, taken: str) -> str:
    names = ", ".join(_with_units(label)[:_MOST_CLASSES])
    more = len(label.outputs) - _MOST_CLASSES
    names += f" and {more:,} more" if more > 0 else ""
    of = "" if label.name == LABEL else f"{label.name}: "
    if label.kind == REGRESSION:
        return f"{of}Tells of {taken} how much {names} {'is' if len(label.outputs) == 1 else 'are'}."
    if label.kind == MULTILABEL:
        return f"{of}Tells which of {len(label.outputs):,} labels {taken} have, or none: {names}."
    return (
        f"{of}Tells {len(label.outputs):,} classes of {taken} apart: {names}. "
        "It always gives one of these classes, also for what is none of them."
    )


def _with_units(label: Label) -> list[str]:
    units = label.units or ("",) * len(label.outputs)
    return [f"{name} ({unit})" if unit else name for name, unit in zip(label.outputs, units, strict=True)]


def _quality(evaluation: Evaluation) -> Section:
    known = {} if evaluation.accuracy is None else {"accuracy": evaluation.accuracy}
    metrics = evaluation.metrics or known
    rows = [
        (name, f"{value:.4g}", " to ".join(f"{end:.4g}" for end in evaluation.intervals.get(name, ())))
        for name, value in metrics.items()
    ]
    text = f"Measured on the export with {evaluation.examples:,} {evaluation.split} examples, each used once."
    if evaluation.non_finite:
        text += f" {evaluation.non_finite:,} of them got an output that is not finite."
    return Section("Quality", text, ("metric", "value", "95 % interval"), rows)


def _data(manifest: Manifest) -> Rows:
    return [
        ("source", manifest.source),
        ("fingerprint", manifest.fingerprint),
        *((f"{name} examples", f"{split.records:,}") for name, split in manifest.splits.items()),
        ("left out", f"{sum(manifest.rejected.values()):,}"),
    ]


def _provenance(export: Export) -> Rows:
    rows = [("parameters", f"{export.parameters:,}"), ("bytes", f"{export.bytes:,}")]
    if export.max_difference is not None:
        difference = f"{export.max_difference:.2g} on {export.compared_examples:,} examples"
        rows.append(("largest difference from the trained model", difference))
    if export.git_revision:
        rows.append(("git revision", export.git_revision))
    return rows + fact_rows(export.versions)


def _escape(text: str) -> str:
    """Returns text that Markdown, and HTML inside it, shows as it is."""
    for sign in ("\\", "`", "*", "_", "|", "[", "]"):
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
