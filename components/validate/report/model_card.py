"""Model card, as Markdown and as HTML: use, inputs, outputs, training and quality of a model.

The report shows the same tables, and the code that calls the model (`make_calls`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.components.html import Rows, fact_rows, render_page
from shardline.components.model_store import Export
from shardline.components.text import enumerate_names, hide_directories
from shardline.components.validate.gate.judged import TrainingRecord
from shardline.components.validate.gate.verdict import Blessing
from shardline.components.validate.metrics.evaluation import Evaluation
from shardline.components.validate.metrics.metrics import CHECKS, SERVING
from shardline.trainer.base.settings import PATH_SETTINGS
from shardline.trainer.checkpoint.store import format_rate
from shardline.trainer.data.features import CLASS, LABEL, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import Manifest

_UNSET = ("", "[]", "{}", "null")
_MOST_CLASSES = 40
_MOST_COLUMNS = 20

# Metrics that do not say how good the model is.
_FOLDED = {metric.name for metric in (*SERVING, *CHECKS)}
_ONLY_CLASSES = "It always predicts one of these classes, also for an input that belongs to none of them."

# Of settings.json: shown with the dataset, or in a table of its own.
_NOT_SETTINGS = ("class_names", "versions", "settings", "learning_rates")

_PYTHON = """\
import tensorflow as tf

call = tf.saved_model.load("saved_model").signatures["serving_default"]
answer = call(ARGUMENTS)
print({name: values.numpy()[0] for name, values in answer.items()})"""

_SERVER = """\
docker run --rm -p 8501:8501 -v "$PWD/saved_model:/models/model/1" tensorflow/serving
# then, in another terminal:
"""
_CURL = "curl -d DATA http://localhost:8501/v1/models/model:predict"
_IMAGE_DATA = """printf '{"instances": [{"b64": "%s"}]}' "$(base64 -w0 image.png)" |"""


def setting_rows(settings: Mapping[str, Any]) -> Rows:
    """Returns nested settings as rows, without those that are not set: null and empty values."""
    return [(name, value) for name, value in fact_rows(settings) if value not in _UNSET]


def describe_tensors(specs: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the tensors of a signature as text, at most 20 of them: "images: string [n]"."""
    shown = [
        f"{name}: {spec['dtype']} [{', '.join('n' if size is None else str(size) for size in spec['shape'])}]"
        for name, spec in list(specs.items())[:_MOST_COLUMNS]
    ]
    return "; ".join(shown) + (f"; {len(specs) - len(shown):,} more" if len(specs) > len(shown) else "")


@dataclass(frozen=True)
class Section:
    """One part of the card: heading, paragraphs, and, if it has rows, a table with `head` as column names."""

    title: str
    paragraphs: tuple[str, ...] = ()
    head: tuple[str, ...] = ("what", "value")
    rows: Sequence[tuple[str, ...]] = ()
    folded: bool = False


@dataclass(frozen=True)
class ModelCard:
    """A model card, to publish: no paths of this machine; `verdict` says whether the model was blessed."""

    title: str
    blessed: bool
    verdict: str
    sections: tuple[Section, ...]

    def to_markdown(self) -> str:
        """Returns the card as Markdown."""
        parts = [f"# {_escape(self.title)}", _escape(self.verdict)]
        for section in self.sections:
            title = "<details>\n<summary>{}</summary>" if section.folded else "## {}"
            parts += [title.format(section.title), *map(_escape, section.paragraphs)]
            if section.rows:
                lines = [section.head, ("---",) * len(section.head), *section.rows]
                parts.append("\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines))
            parts += ["</details>"] * section.folded
        return "\n\n".join(parts) + "\n"

    def to_html(self) -> str:
        """Returns the card as a self-contained HTML page."""
        folded = [(section.title, section.rows) for section in self.sections if section.folded]
        return render_page(Path(__file__).with_name("model_card.html.j2"), card=self, tables=folded)


def make_card(
    manifest: Manifest, export: Export, training: TrainingRecord, evaluation: Evaluation, blessing: Blessing
) -> ModelCard:
    """Returns the card of an exported model; a section without paragraphs and rows is left out."""
    names = enumerate_names(list(manifest.inputs), _MOST_COLUMNS)
    inputs = "images" if "image" in manifest.inputs else f"rows of the columns {names}"
    limits = [_ONLY_CLASSES] * any(label.kind == CLASS for label in manifest.labels)
    source = hide_directories(manifest.source)
    limits.append(f"Its quality was measured on held-out examples of {source} and holds for data like these.")
    limits += [f"{hide_directories(warning).removesuffix('.')}." for warning in blessing.warnings]
    quality = [
        (name, _number(value), " to ".join(map(_number, evaluation.intervals.get(name, ()))))
        for name, value in evaluation.metrics.items()
    ]
    serving = [(name, value) for name, value, _ in quality if name.rpartition(".")[2] in _FOLDED]
    text = f"Measured on the export with {evaluation.examples:,} {evaluation.split} examples, each used once."
    text += f" Intervals are over {evaluation.groups}." if evaluation.groups else ""
    if evaluation.non_finite:
        text += f" {evaluation.non_finite:,} of them got an output that is not finite."
    head = ("metric", "value", "95 % interval")
    rules = [
        (
            f"{rule.name}: {rule.rule}".removeprefix(": "),
            f"{rule.verdict}: {hide_directories(rule.note)}".removesuffix(": "),
            rule.left_text,
            f"{rule.operator} {rule.right_text}".strip(),
        )
        for rule in sorted(blessing.rules, key=lambda rule: rule.verdict == "passed")
    ]
    tables = dict(fact_tables(manifest, export, training))
    shown = [
        Section("Use", tuple(_describe_use(label, inputs) for label in manifest.labels)),
        Section("Rules", (), ("rule", "verdict", "value", "must be"), rules),
        Section("Quality", (text,), head, [row for row in quality if row[:2] not in serving]),
        Section("Dataset", rows=tables.pop("Dataset")),
        Section("Limits of use", tuple(limits)),
        Section("Training", rows=tables.pop("Training", ())),
        Section("Serving and checks", rows=serving, folded=True),
        *(Section(title, rows=rows, folded=True) for title, rows in tables.items()),
    ]
    title, verdict = str(training.settings.get("model", "model")), hide_directories(blessing.headline)
    shown = [section for section in shown if section.paragraphs or section.rows]
    return ModelCard(title, blessing.blessed, verdict, tuple(shown))


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def _describe_use(label: Label, inputs: str) -> str:
    names = enumerate_names(_with_units(label), _MOST_CLASSES)
    of = "" if label.name == LABEL else f"{label.name}: "
    if label.kind == REGRESSION:
        return f"{of}Predicts {names} from {inputs}."
    if label.kind == MULTILABEL:
        return f"{of}Predicts which of {len(label.outputs):,} labels {inputs} have, or none: {names}."
    return f"{of}Classifies {inputs} into {len(label.outputs):,} classes: {names}."


def _with_units(label: Label) -> list[str]:
    units = label.units or ("",) * len(label.outputs)
    return [f"{name} ({unit})" if unit else name for name, unit in zip(label.outputs, units, strict=True)]


def _escape(text: str) -> str:
    for sign in ("\\", "`", "*", "_", "|", "[", "]"):
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())


def make_calls(export: Export) -> dict[str, str]:
    """Returns code that calls a model through `serving_default`, by client or server that it is for.

    There is none where the model's inputs are not known.
    """
    inputs = export.signatures.get("serving_default", {}).get("inputs", {})
    row = next(iter((export.golden or {}).get("instances", ())), None)
    if not export.labels or not inputs:
        return {}
    if list(inputs) == ["images"]:
        arguments = 'images=tf.stack([tf.io.read_file("image.png")])'
        curl = f"{_IMAGE_DATA} \\\n  {_CURL.replace('DATA', '@-')}"
    elif isinstance(row, dict) and inputs.keys() <= row.keys():
        values = {name: row[name] for name in inputs}
        tensors = (f'tf.constant([{value!r}], "{inputs[name]["dtype"]}")' for name, value in values.items())
        arguments = "".join(map("\n    {}={},".format, values, tensors)) + "\n"
        data = json.dumps({"instances": [values]}, ensure_ascii=False).replace("'", "'\\''")
        curl = _CURL.replace("DATA", f"'{data}'")
    else:
        return {}
    python = _PYTHON.replace("ARGUMENTS", arguments)
    return {"Python, with TensorFlow alone": python, "TensorFlow Serving": _SERVER + curl}


def fact_tables(manifest: Manifest, export: Export, training: TrainingRecord) -> list[tuple[str, Rows]]:
    """Returns the titles and rows of the tables of dataset, training, export and versions."""
    record, rate = training.settings, _describe_learning_rate(training)
    settings = {name: value for name, value in record.items() if name not in _NOT_SETTINGS}
    settings |= record.get("settings", {})
    hidden = (*PATH_SETTINGS, *(("learning_rate",) if rate else ()))
    trained = {"learning rate": rate, "epochs": len(training.history.get("epoch", ())) or ""}
    trained |= {
        name.replace("_", " "): record.get(name, "") for name in ("model", "examples_per_update", "cluster")
    }
    signatures = [
        (name, f"{describe_tensors(parts['inputs'])} → {describe_tensors(parts['outputs'])}")
        for name, parts in export.signatures.items()
    ]
    names = ("parameters", "bytes", "softmax_added", "git_revision", "compared_examples", "max_difference")
    single = {name.replace("_", " "): getattr(export, name) for name in names}
    tables = [
        ("Dataset", _dataset_rows(manifest)),
        ("Training", setting_rows(trained)),
        ("Settings of the training", [row for row in setting_rows(settings) if row[0] not in hidden]),
        ("Settings of the dataset", setting_rows(manifest.settings)),
        ("Export", signatures + fact_rows({k: value for k, value in single.items() if value is not None})),
        ("Versions in training", fact_rows(record.get("versions", {}))),
        ("Versions in validation", fact_rows(export.versions)),
    ]
    return [
        (title, [(name, hide_directories(value)) for name, value in rows]) for title, rows in tables if rows
    ]


def _describe_learning_rate(training: TrainingRecord) -> str:
    texts = [str(format_rate(rate)) for rate in training.settings.get("learning_rates", ())]
    if rates := training.history.get("learning_rate"):  # a callback has changed it
        texts.append(f"{rates[-1]:.4g} in the last epoch")
    return "; ".join(texts)


def _dataset_rows(manifest: Manifest) -> Rows:
    names = list(manifest.inputs)
    inputs = (f"{len(names):,} columns", enumerate_names(names, _MOST_COLUMNS))
    if "image" in manifest.inputs:
        image = manifest.inputs["image"]
        shape = " x ".join("any" if size is None else str(size) for size in image.shape)
        inputs = ("image", f"{shape}, {image.encoding}")
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in manifest.rejected.items())
    labels = []
    for label in manifest.labels:
        of = f" of {label.name}" if label.name != LABEL else ""
        if label.kind == REGRESSION:
            labels.append((f"numbers{of}", enumerate_names(_with_units(label), _MOST_CLASSES)))
        else:
            plural = "labels" if label.kind == MULTILABEL else "classes"
            labels.append((f"{plural}{of}", f"{len(label.outputs):,}"))
    return [
        ("source", manifest.source),
        ("fingerprint", manifest.fingerprint),
        ("examples", ", ".join(f"{name} {split.records:,}" for name, split in manifest.splits.items())),
        *labels,
        inputs,
        ("rejected examples", f"{sum(manifest.rejected.values()):,} ({reasons})" if reasons else "none"),
    ]
