"""A validation in terms of KFP artifacts; everything here is handed in, so kfp itself is not imported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.parameters import GateSettings, read
from shardline.components.validate.evaluation import Curve, Evaluation
from shardline.components.validate.validation import validate

# A task may write 131,072 bytes of parameters and artifacts; this leaves room for all the others.
_LARGEST_MATRIX_BYTES = 64 * 1024
# About as many points of each class's curve, for the same reason.
_POINTS = 30


def validate_artifacts(
    dataset: Any,
    model: Any,
    exported: Any,
    gate: Mapping[str, Any],
    *,
    metrics: Any,
    confusion: Any,
    sliced: Any,
    report: Any,
) -> tuple[bool, float]:
    """Validates the model of one task for the next.

    Args:
        dataset: Input artifact, a dataset directory.
        model: Input artifact, a directory with model.keras.
        exported: Output artifact: gets the whole output directory of `validate`.
        gate: Fields of `GateSettings`.
        metrics: Output artifact: gets every metric and the number of examples.
        confusion: Output artifact: gets the confusion matrix, if it is small enough for a task's metadata,
            and of two classes the ROC curve of the second.
        sliced: Output artifact: gets the ROC curve of each class against the others.
        report: Output artifact: gets the HTML page.

    Returns:
        Whether the model is blessed, and its accuracy.

    Raises:
        ShardlineError: As `validate` does.
    """
    out = Path(exported.path)
    judge = read(GateSettings, gate, "gate")
    model_file = Path(model.path) / "model.keras"
    outcome = validate(
        model_file, Path(dataset.path), out, gate=judge.gate, champion_uri=judge.champion_uri
    )
    evaluation, blessed = outcome.evaluation, outcome.blessing.blessed
    exported.framework = "tensorflow"
    exported.metadata.update(
        blessed=blessed, accuracy=evaluation.accuracy, fingerprint=evaluation.fingerprint
    )
    _log(evaluation, metrics, confusion)
    # KFP 2.17's own methods for slices do not work: the attribute that they keep them in is never made.
    sliced.metadata["evaluationSlices"] = [_slice(curve) for curve in evaluation.roc]
    Path(report.path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(out / model_store.REPORT_FILE, report.path)
    return blessed, evaluation.accuracy


def _log(evaluation: Evaluation, metrics: Any, confusion: Any) -> None:
    metrics.log_metric("examples", evaluation.examples)
    for name, value in evaluation.metrics.items():
        metrics.log_metric(name, value)
    matrix = [list(row) for row in evaluation.confusion]
    if len(json.dumps([evaluation.class_names, matrix])) <= _LARGEST_MATRIX_BYTES:
        confusion.log_confusion_matrix(list(evaluation.class_names), matrix)
    if len(evaluation.class_names) == 2 and len(evaluation.roc) == 2:
        curve = evaluation.roc[1]
        confusion.log_roc_curve(list(curve.x), list(curve.y), list(curve.thresholds))


def _slice(curve: Curve) -> dict[str, Any]:
    """Returns a class's ROC curve as the schema of SlicedClassificationMetrics has it."""
    every = max(1, len(curve.x) // _POINTS)
    points = zip(curve.thresholds[::every], curve.y[::every], curve.x[::every], strict=True)
    readings = [
        {"confidenceThreshold": threshold, "recall": recall, "falsePositiveRate": false_positives}
        for threshold, recall, false_positives in points
    ]
    return {
        "slice": f"class={curve.name}",
        "sliceClassificationMetrics": {"confidenceMetrics": readings},
    }
