"""Validation from a model file to a verdict: export, evaluate, judge, report."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from components.export_validate import gates, layout, training_record
from components.export_validate.evaluate import evaluate
from components.export_validate.evaluation import Evaluation
from components.export_validate.examples import find_split
from components.export_validate.export import export_model
from components.export_validate.gates import Blessing
from components.export_validate.report import render_report
from trainer import files
from trainer.data import manifest as manifests
from trainer.progress import fact, say
from trainer.saving import load_model

SPLIT = "test"


@dataclass(frozen=True)
class Validation:
    """Outcome of a validation: what was measured, and what follows from it."""

    evaluation: Evaluation
    blessing: Blessing


def validate(model_file: Path, dataset: Path, out: Path, *, min_accuracy: float) -> Blessing:
    """Exports a model, measures the export on the test split, and decides whether it may be published.

    All input is checked before anything is written, but for the examples themselves: where one of them
    cannot be read the evaluation ends, and there is an export without a verdict.

    Args:
        model_file: A model.keras; history.csv and settings.json of its training are used when beside it.
        dataset: Dataset directory.
        out: Output directory; `layout` says what it holds afterwards. An earlier validation is replaced.
        min_accuracy: Smallest accuracy that is good enough, 0..1.

    Raises:
        SettingsError: When `min_accuracy` is not within 0..1 or `out` cannot be written to.
        DatasetError: When the dataset or its test split cannot be used.
        ModelError: When the model cannot be loaded or does not fit the dataset.
    """
    return run(model_file, dataset, out, min_accuracy=min_accuracy).blessing


def run(model_file: Path, dataset: Path, out: Path, *, min_accuracy: float) -> Validation:
    """Does what `validate` says, and returns the evaluation as well."""
    gates.check_min_accuracy(min_accuracy)
    manifest = manifests.load(dataset)
    find_split(manifest, dataset, SPLIT)
    training = training_record.read(model_file)
    model = load_model(model_file)
    say("validate", "exporting the model")
    export_model(model, manifest, out)
    shutil.copyfile(model_file, out / layout.MODEL_FILE)
    if (settings := model_file.with_name(layout.SETTINGS_FILE)).is_file():
        shutil.copyfile(settings, out / layout.SETTINGS_FILE)
    say("validate", f"evaluating the export on {manifest.splits[SPLIT].records:,} {SPLIT} examples")
    evaluation = evaluate(out / layout.SAVED_MODEL, dataset, SPLIT)
    blessing = gates.judge(evaluation, min_accuracy)
    files.write_json(out / layout.EVALUATION_FILE, evaluation.to_json())
    export = json.loads((out / layout.EXPORT_FILE).read_text(encoding="utf-8"))
    report = render_report(evaluation, blessing, manifest, export, training)
    files.write_text(out / layout.REPORT_FILE, report)
    files.write_json(out / layout.BLESSING_FILE, blessing.to_json())
    _tell(evaluation, blessing, out)
    return Validation(evaluation, blessing)


def _tell(evaluation: Evaluation, blessing: Blessing, out: Path) -> None:
    """Puts the outcome on the table at the end of the run."""
    accuracy = evaluation.accuracy
    fact("test accuracy", accuracy, f"{accuracy:.4f} on {evaluation.examples:,} examples")
    fact("blessed", blessing.blessed, f"{'yes' if blessing.blessed else 'no'}: {blessing.reason}")
    fact("report", str(out / layout.REPORT_FILE))
    fact("exported model", str(out / layout.SAVED_MODEL))
