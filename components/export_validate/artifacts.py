"""A validation in terms of KFP artifacts; everything here is handed in, so kfp itself is not imported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from components.export_validate import layout
from components.export_validate.evaluation import Evaluation
from components.export_validate.run import run

# A task may write 131,072 bytes of parameters and artifacts; this leaves room for all the others.
_LARGEST_MATRIX_BYTES = 64 * 1024


def validate_artifacts(
    *, dataset: Any, model: Any, exported: Any, metrics: Any, confusion: Any, report: Any, min_accuracy: float
) -> tuple[bool, float]:
    """Validates the model of one task for the next.

    Args:
        dataset: Input artifact, a dataset directory.
        model: Input artifact, a directory with model.keras.
        exported: Output artifact: gets the whole output directory of `run`.
        metrics: Output artifact: gets accuracy, log loss and number of examples.
        confusion: Output artifact: gets the confusion matrix, if it is small enough for a task's metadata.
        report: Output artifact: gets the HTML page.
        min_accuracy: Smallest accuracy that is good enough, 0..1.

    Returns:
        Whether the model is blessed, and its accuracy.

    Raises:
        ShardlineError: As `validate` does.
    """
    out = Path(exported.path)
    outcome = run(Path(model.path) / "model.keras", Path(dataset.path), out, min_accuracy=min_accuracy)
    evaluation, blessed = outcome.evaluation, outcome.blessing.blessed
    exported.framework = "tensorflow"
    exported.metadata.update(
        blessed=blessed, accuracy=evaluation.accuracy, fingerprint=evaluation.fingerprint
    )
    _log(evaluation, metrics, confusion)
    shutil.copyfile(out / layout.REPORT_FILE, _parent_made(Path(report.path)))
    return blessed, evaluation.accuracy


def _log(evaluation: Evaluation, metrics: Any, confusion: Any) -> None:
    metrics.log_metric("accuracy", evaluation.accuracy)
    metrics.log_metric("examples", evaluation.examples)
    if evaluation.log_loss is not None:
        metrics.log_metric("log_loss", evaluation.log_loss)
    matrix = [list(row) for row in evaluation.confusion]
    if len(json.dumps([evaluation.class_names, matrix])) <= _LARGEST_MATRIX_BYTES:
        confusion.log_confusion_matrix(list(evaluation.class_names), matrix)


def _parent_made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
