"""The evaluation of an uploaded model, as the Model Registry shows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.components.export_validate import layout
from shardline.components.register.champion import read_part
from shardline.trainer.errors import RunError
from shardline.trainer.progress import say

_SCHEMA = "gs://google-cloud-aiplatform/schema/modelevaluation/classification_metrics_1.0.0.yaml"
#: The confusion matrix of more classes would be a request of megabytes, and unreadable.
_MOST_CLASSES = 200


def import_evaluation(exported: Path, resource_name: str) -> str:
    """Imports the evaluation of an exported model beside the registered model.

    Args:
        exported: Output directory of the model's validation.
        resource_name: Of the registered model, projects/P/locations/L/models/ID@VERSION; "" in a local
            run, where nothing has been uploaded.

    Returns:
        The resource name of the evaluation; "" where nothing was imported.

    Raises:
        ModelError: When `exported` is incomplete.
        RunError: When the API refuses.
    """
    evaluation = read_part(exported, layout.EVALUATION_FILE)
    if not resource_name:
        say("register", "nothing was uploaded: the evaluation is not imported")
        return ""
    from google.api_core.exceptions import GoogleAPIError
    from google.cloud.aiplatform_v1.services.model_service import ModelServiceClient
    from google.cloud.aiplatform_v1.types import ModelEvaluation

    location = resource_name.split("/")[3]
    client = ModelServiceClient(client_options={"api_endpoint": f"{location}-aiplatform.googleapis.com"})
    measured = {"fingerprint": evaluation["fingerprint"], "examples": evaluation["examples"]}
    content = ModelEvaluation(
        display_name=f"{evaluation['split']} split",
        metrics_schema_uri=_SCHEMA,
        metrics=registry_metrics(evaluation),
        metadata={**measured, **evaluation["metrics"]},
    )
    try:
        imported = client.import_model_evaluation(parent=resource_name, model_evaluation=content)
    except GoogleAPIError as error:
        raise RunError(f"cannot import the evaluation of {resource_name}: {error}") from error
    say("register", f"the evaluation of {resource_name} is imported")
    return str(imported.name)


def registry_metrics(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of evaluation.json as ClassificationEvaluationMetrics.

    Areas under curves are left out: the schema means micro-averaged ones, and ours are means over classes.
    With one prediction per example, the most probable class, precision and recall are both the accuracy.

    Source: https://cloud.google.com/vertex-ai/docs/reference/rest/Shared.Types/ClassificationEvaluationMetrics

    Args:
        evaluation: Content of evaluation.json.
    """
    accuracy, names = evaluation["accuracy"], evaluation["class_names"]
    at_one = dict.fromkeys(("precisionAt1", "recallAt1", "f1ScoreAt1"), accuracy)
    metrics: dict[str, Any] = {
        "confidenceMetrics": [{"confidenceThreshold": 0.0, "maxPredictions": 1, **at_one}]
    }
    if len(names) <= _MOST_CLASSES:
        specs = [{"id": str(label), "displayName": name} for label, name in enumerate(names)]
        metrics["confusionMatrix"] = {"annotationSpecs": specs, "rows": evaluation["confusion"]}
    if evaluation["log_loss"] is not None:
        metrics["logLoss"] = evaluation["log_loss"]
    return metrics
