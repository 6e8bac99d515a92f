"""Registration of a blessed model: as the champion, in the Model Registry, and on an endpoint.

TensorFlow Serving gets the model's directory and a container; the registry gets a description and the
evaluation; an endpoint's traffic is shared between its models and the new one.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.model_store import Export, champion_directory, current, publish, read_part
from shardline.components.vertex.client import Platform, ask
from shardline.trainer.errors import ModelError, RunError
from shardline.trainer.progress import fact, say

#: TensorFlow Serving serves only subdirectories whose name is a number.
VERSION_DIRECTORY = "1"

#: Name of the model that is being deployed in the API; it has no id yet.
NEW_MODEL = "0"

_NAME = "model"
_A_YEAR_S = 31_536_000
_SCHEMA = "gs://google-cloud-aiplatform/schema/modelevaluation/classification_metrics_1.0.0.yaml"
# The confusion matrix of more classes would be a request of megabytes, and unreadable.
_MOST_CLASSES = 200


def register_model(exported: Path, accuracy: float, champion_uri: str) -> None:
    """Makes an exported, blessed model the champion; champion_uri "" publishes nothing.

    Raises:
        ModelError: When `exported` is incomplete or not blessed, or the present champion is damaged.
        SettingsError: When the champion's place cannot be reached or written to.
        RunError: When copying fails.
    """
    if not champion_uri:
        say("register", "champion_uri is empty: the blessed model is not published")
        return
    directory = champion_directory(champion_uri)
    previous = current(directory)
    published = publish(exported, directory, accuracy=accuracy)
    replaced = f", replacing {previous.version} (accuracy {previous.accuracy:.4f})" if previous else ""
    say("register", f"version {published.version} is the champion{replaced}")
    fact("champion", str(directory / published.path))


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


def describe(exported: Path, accuracy: float) -> str:
    """Returns a line that describes an exported model in the registry.

    It is pasted between quotes into the launcher's payload, so it holds neither quotes nor backslashes.
    """
    export = Export.read(exported)
    return f"test accuracy {accuracy:.4f}, {export.parameters:,} parameters, dataset {export.fingerprint}"


def import_evaluation(exported: Path, resource_name: str) -> str:
    """Imports the evaluation of an exported model beside the registered model, and returns its name.

    `resource_name` is the model's, projects/P/locations/L/models/ID@VERSION; in a local run, where nothing
    has been uploaded, it is "", and so is what is returned.

    Raises:
        ModelError: When `exported` is incomplete.
        PlatformError: When the API refuses or is not reached.
    """
    evaluation = read_part(exported, model_store.EVALUATION_FILE)
    if not resource_name:
        say("register", "nothing was uploaded: the evaluation is not imported")
        return ""
    measured = {"fingerprint": evaluation["fingerprint"], "examples": evaluation["examples"]}
    content = {
        "display_name": f"{evaluation['split']} split",
        "metrics_schema_uri": _SCHEMA,
        "metrics": registry_metrics(evaluation),
        "metadata": {**measured, **evaluation["metrics"]},
    }
    imported = ask(
        f"import the evaluation of {resource_name}",
        Platform.of(resource_name).models.import_model_evaluation,
        {"parent": resource_name, "model_evaluation": content},
        repeatable=False,
    )
    say("register", f"the evaluation of {resource_name} is imported")
    return str(imported.name)


def registry_metrics(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of evaluation.json as ClassificationEvaluationMetrics.

    Areas under curves are left out: the schema means micro-averaged ones, and ours are means over classes.
    With one prediction per example, the most probable class, precision and recall are both the accuracy.

    Source: https://cloud.google.com/vertex-ai/docs/reference/rest/Shared.Types/ClassificationEvaluationMetrics
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


def share_traffic(present: Mapping[str, int], percent: int) -> dict[str, int]:
    """Returns the traffic of each deployed model, in percent by id, with that of the new one under "0".

    The models that have traffic keep their proportions in the rest; percents are whole and add up to 100,
    the largest remainders being rounded up. A new model without traffic changes nothing: {}.

    Source: google.cloud.aiplatform_v1.types.DeployModelRequest.traffic_split, which replaces the endpoint's;
    where it is empty the endpoint's stays as it is.
    """
    if percent == 0:
        return {}
    serving = {model: share for model, share in present.items() if share}
    if not serving or percent == 100:
        return {NEW_MODEL: 100}
    rest, total = 100 - percent, sum(serving.values())
    shares = {model: share * rest // total for model, share in serving.items()}
    by_remainder = sorted(serving, key=lambda model: (-(serving[model] * rest % total), model))
    for model in by_remainder[: rest - sum(shares.values())]:
        shares[model] += 1
    return {NEW_MODEL: percent, **{model: share for model, share in shares.items() if share}}


def plan_traffic(endpoint: str, model: str, percent: int) -> dict[str, str]:
    """Reads an endpoint's traffic and plans how it is shared with a new model.

    Args:
        endpoint: projects/P/locations/L/endpoints/ID.
        model: Resource name of the uploaded model; "" in a local run, where nothing has been uploaded.
        percent: Share of the new model, 0..100.

    Returns:
        Percents by the id of the deployed model, as texts: KFP would make 10.0 of a number.
    """
    if not model:
        say("deploy", "nothing was uploaded: no traffic is assigned")
        return {}
    method = Platform.of(endpoint).endpoints.get_endpoint
    found = ask(f"read the traffic of {endpoint}", method, {"name": endpoint})
    present = {deployed.id: found.traffic_split.get(deployed.id, 0) for deployed in found.deployed_models}
    shared = share_traffic(present, percent)
    if not shared:
        say("deploy", f"the new model gets no traffic of {endpoint}, which stays as it is")
        return {}
    parts = ", ".join(
        f"{share} % {'the new model' if model_id == NEW_MODEL else f'deployed model {model_id}'}"
        for model_id, share in shared.items()
    )
    say("deploy", f"traffic of {endpoint}: {parts}")
    if idle := sorted(set(present) - set(shared)):
        say(
            "deploy",
            f"deployed without traffic, at the price of machines: {', '.join(idle)}; take them off with "
            "gcloud ai endpoints undeploy-model once they are no longer needed for a rollback",
        )
    return {deployed: str(share) for deployed, share in shared.items()}
