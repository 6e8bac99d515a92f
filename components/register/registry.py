"""Model Registry: what TensorFlow Serving gets, the upload of a model, and the import of its evaluation."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.model_store import Export, Measured, read_part
from shardline.components.register.settings import ModelUpload
from shardline.components.vertex.client import Platform, ask, ask_all, wait
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION
from shardline.trainer.errors import ModelError, RunError
from shardline.trainer.progress import say

#: TensorFlow Serving serves only subdirectories whose name is a number.
VERSION_DIRECTORY = "1"
#: Label of an uploaded model: a digest of the run that has uploaded it.
RUN_LABEL = "shardline_run"
#: What a run on this machine has in the place of a region.
LOCAL = "local"

_NAME = "model"
_A_YEAR_S = 31_536_000
#: Seconds that the platform may take to make a model of an upload.
_UPLOAD_S = 1800.0
_SCHEMA = "gs://google-cloud-aiplatform/schema/modelevaluation/{}_metrics_1.0.0.yaml"
# Ours by theirs: https://cloud.google.com/vertex-ai/docs/reference/rest/Shared.Types/RegressionEvaluationMetrics
_OF_NUMBERS = {
    "rootMeanSquaredError": ("rmse", 1),
    "meanAbsoluteError": ("mae", 1),
    "meanAbsolutePercentageError": ("mape", 100),
    "rSquared": ("r2", 1),
}
#: From this probability on, an example is said to have a label.
THRESHOLD = 0.5
# The confusion matrix of more classes would be a request of megabytes, and unreadable.
_MOST_CLASSES = 200


def lay_out(exported: Path, target: Path) -> None:
    """Copies an exported model to `target`/1; `target` is a base path for TensorFlow Serving.

    Raises:
        ModelError: When `exported` holds no complete export.
        RunError: When copying fails.
    """
    Export.read(exported)  # written last: the export is complete
    saved_model = exported / model_store.SAVED_MODEL
    if not saved_model.is_dir():
        raise ModelError(f"no {model_store.SAVED_MODEL} in {exported}; validate the model again")
    try:
        # Contents only: a Cloud Storage mount keeps neither modes nor times.
        shutil.copytree(
            saved_model, target / VERSION_DIRECTORY, copy_function=shutil.copyfile, dirs_exist_ok=True
        )
    except OSError as error:
        raise RunError(
            f"cannot copy to {target}: {error.strerror or error}; upload the model again"
        ) from error


def container_spec(image_uri: str) -> dict[str, Any]:
    """Returns the ModelContainerSpec that serves a model over REST, in the API's camel case.

    The platform puts the directory of the model in AIP_STORAGE_URI, and sends requests to port 8080,
    which is its default. A deployed model never changes: the server need not look for a newer version.

    Source: https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements
    """
    return {
        "imageUri": image_uri,
        "command": ["/usr/bin/tensorflow_model_server"],
        "args": [
            "--port=8500",
            "--rest_api_port=8080",
            f"--model_name={_NAME}",
            "--model_base_path=$(AIP_STORAGE_URI)",
            f"--file_system_poll_wait_seconds={_A_YEAR_S}",
        ],
        "predictRoute": f"/v1/models/{_NAME}:predict",
        "healthRoute": f"/v1/models/{_NAME}",
    }


def describe(exported: Path, quality: str) -> str:
    """Returns a line that describes an exported model in the registry."""
    export = Export.read(exported)
    return f"{quality}, {export.parameters:,} parameters, dataset {export.fingerprint}"


def upload_model(
    platform: Platform,
    upload: ModelUpload,
    *,
    serving: Any,
    description: str,
    labels: Mapping[str, str],
    encryption_key: str,
    run: str,
) -> str:
    """Uploads a model to the Model Registry, and returns the resource name of its version.

    What an earlier attempt of the same run has uploaded is found by its label, and not uploaded again. A run
    on this machine uploads nothing and returns "".

    Args:
        platform: The project and region of the pipeline.
        upload: Names, aliases and labels; its labels win over `labels`.
        serving: Artifact of the model's base path for TensorFlow Serving, with its container.
        description: What the registry shows of the model.
        labels: Labels of the pipeline.
        encryption_key: Resource name of the key in Cloud KMS; "" for Google's own.
        run: Name of the run.

    Raises:
        PlatformError: When the API refuses or is not reached.
    """
    what = f"as a new version of {upload.parent_model}" if upload.parent_model else "as a new model"
    if platform.location == LOCAL:
        say(
            "register",
            f"a local run: {upload.display_name!r} is not uploaded; on Vertex AI it would be, {what}",
        )
        return ""
    mark = run_mark(run)
    if found := _uploaded(platform, upload.parent_model, mark):
        say("register", f"{found} was uploaded by an earlier attempt of this run")
        return found
    model = {
        **_described(upload, serving, {**labels, **upload.labels, RUN_LABEL: mark}),
        "description": description,
        "encryption_spec": {"kms_key_name": encryption_key} if encryption_key else None,
    }
    request = {"parent": platform.parent, "parent_model": upload.parent_model, "model": model}
    doing = f"upload {upload.display_name!r}"
    operation = ask(doing, platform.models.upload_model, request, repeatable=False)
    made = wait(doing, operation, _UPLOAD_S)
    name = f"{made.model}@{made.model_version_id}"
    say("register", f"uploaded {name}, {what}")
    return name


def run_mark(run: str) -> str:
    """Returns what tells a run's own things from others: 32 hexadecimal digits."""
    return hashlib.sha256(run.encode()).hexdigest()[:32]


def labels_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Returns labels with those that the platform gives to all that a run makes, by which it is billed."""
    from google_cloud_pipeline_components.container.v1.gcp_launcher.utils import gcp_labels_util

    return dict(gcp_labels_util.attach_system_labels(dict(labels)))


def _described(upload: ModelUpload, serving: Any, labels: dict[str, str]) -> dict[str, Any]:
    """Returns the API's Model: its names, its files, the container that serves it, and its labels."""
    from google.cloud.aiplatform_v1.types import ModelContainerSpec
    from google.protobuf import json_format

    container = ModelContainerSpec()
    json_format.ParseDict(serving.metadata["containerSpec"], container._pb)
    return {
        "display_name": upload.display_name,
        "artifact_uri": serving.uri,
        "container_spec": container,
        "version_aliases": list(upload.version_aliases),
        "labels": labels_of(labels),
    }


def _uploaded(platform: Platform, parent: str, mark: str) -> str:
    """Returns the resource name of the version with a run's mark; "" where there is none."""
    doing, wanted = "look for the upload of this run", f"labels.{RUN_LABEL}={mark}"
    if parent:
        found = ask_all(doing, platform.models.list_model_versions, {"name": parent, "filter": wanted})
    else:
        found = ask_all(doing, platform.models.list_models, {"parent": platform.parent, "filter": wanted})
    return next((f"{model.name.partition('@')[0]}@{model.version_id}" for model in found), "")


def import_evaluation(exported: Path, resource_name: str) -> str:
    """Imports the evaluation of an exported model beside the registered model, and returns its name.

    Of several labels there is one for each, and the name is that of the first. `resource_name` is that of the
    model, projects/P/locations/L/models/ID@VERSION; in a local run, where nothing has been uploaded, it is
    "", and so is what is returned.

    Raises:
        ModelError: When `exported` is incomplete.
        PlatformError: When the API refuses or is not reached.
    """
    evaluation = read_part(exported, model_store.EVALUATION_FILE, Measured)
    if not resource_name:
        say("register", "nothing was uploaded: the evaluation is not imported")
        return ""
    models = Platform.of(resource_name).models
    doing = f"import the evaluation of {resource_name}"
    asked = ask_all(doing, models.list_model_evaluations, {"parent": resource_name})
    present = {one.display_name: str(one.name) for one in asked}
    names = []
    for part in evaluation.parts or (evaluation,):
        content = describe_evaluation(
            part, f"{evaluation.split} split" + (f", {part.label}" if evaluation.parts else "")
        )
        if found := present.get(content["display_name"]):
            say("register", f"the evaluation of {resource_name} was imported by an earlier attempt")
            names.append(found)
            continue
        request = {"parent": resource_name, "model_evaluation": content}
        imported = ask(doing, models.import_model_evaluation, request, repeatable=False)
        say("register", f"the evaluation of {resource_name} is imported")
        names.append(str(imported.name))
    return names[0]


def describe_evaluation(evaluation: Measured, name: str) -> dict[str, Any]:
    """Returns the API's ModelEvaluation of one label."""
    numbers = evaluation.kind == REGRESSION
    measured = {"fingerprint": evaluation.fingerprint, "examples": evaluation.examples}
    return {
        "display_name": name,
        "metrics_schema_uri": _SCHEMA.format("regression" if numbers else "classification"),
        "metrics": (_metrics_of_numbers if numbers else registry_metrics)(asdict(evaluation)),
        "metadata": {**measured, **evaluation.metrics},
    }


def _metrics_of_numbers(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of evaluation.json as RegressionEvaluationMetrics; means over several numbers."""
    found = evaluation["metrics"]
    return {
        theirs: scale * found[ours]
        for theirs, (ours, scale) in _OF_NUMBERS.items()
        if found.get(ours) is not None
    }


def registry_metrics(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of evaluation.json as ClassificationEvaluationMetrics.

    Areas under curves are left out: the schema means micro-averaged ones, and ours are means over classes.
    With one prediction per example, the most probable class, precision and recall are both the accuracy.

    Source: https://cloud.google.com/vertex-ai/docs/reference/rest/Shared.Types/ClassificationEvaluationMetrics
    """
    if evaluation.get("kind", CLASS) == MULTILABEL:
        return _metrics_of_several(evaluation)
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


def _metrics_of_several(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    found = evaluation["metrics"]
    reading = {"confidenceThreshold": THRESHOLD}
    for theirs, ours in (("f1ScoreMicro", "micro_f1"), ("f1ScoreMacro", "macro_f1")):
        reading[theirs] = found[ours]
    metrics: dict[str, Any] = {"confidenceMetrics": [reading]}
    return metrics | ({"logLoss": evaluation["log_loss"]} if evaluation["log_loss"] is not None else {})
