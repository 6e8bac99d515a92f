"""Registration of a blessed model: as the champion, and in the Model Registry with its evaluation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.model_store import Export, Measured, catalog, champions, read_part
from shardline.components.vertex.client import Platform, ask, ask_all
from shardline.trainer.data.features import MULTILABEL, REGRESSION
from shardline.trainer.errors import ModelError, RunError
from shardline.trainer.progress import fact, say

_NAME = "model"
_A_YEAR_S = 31_536_000
_SCHEMA = "gs://google-cloud-aiplatform/schema/modelevaluation/{}_metrics_1.0.0.yaml"
#: The registry's names of metrics by ours. Areas under curves are left out: the schema means micro-averaged
#: ones, and ours are means over classes.
#: Source: https://cloud.google.com/vertex-ai/docs/reference/rest/Shared.Types/RegressionEvaluationMetrics and
#: ClassificationEvaluationMetrics beside it.
_OF_NUMBERS = {"rootMeanSquaredError": "rmse", "meanAbsoluteError": "mae", "rSquared": "r2"}
_OF_SEVERAL = {"f1ScoreMicro": "micro_f1", "f1ScoreMacro": "macro_f1"}
#: From this probability on, an example is said to have a label.
THRESHOLD = 0.5
# The confusion matrix of more classes would be a request of megabytes, and unreadable.
_MOST_CLASSES = 200


def register_model(exported: Path, quality: str, champion_uri: str, run: str = "") -> None:
    """Makes an exported, blessed model the champion; champion_uri "" publishes nothing.

    Repeated in the same `run`, it publishes once.

    Raises:
        ModelError: When `exported` is incomplete or not blessed, the present champion is damaged, or is no
            longer the one that the model was judged against.
        SettingsError, PlatformError: When the champion's place cannot be reached or written to.
        RunError: When copying fails.
    """
    if not champion_uri:
        say("register", "champion_uri is empty: the blessed model is not published")
        return
    catalog.refuse_container("champion_uri", champion_uri)
    try:
        published = champions.publish(exported, champion_uri, quality=quality, run=run)
    except ModelError as error:
        raise ModelError(f"{error}; an endpoint to which this run has deployed it serves it") from error
    now = champions.require_current(champion_uri).version
    if now != published.version:
        how = f"was the champion, {now} is so since"
    elif published.commit.replaced:
        how = f"is the champion, replacing {published.commit.replaced}"
    else:
        how = "is the champion"
    say("register", f"version {published.version} {how}")
    fact("champion", champions.where(champion_uri, published.version))


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
        # Contents only: a Cloud Storage mount keeps neither modes nor times. A version's name is a number.
        shutil.copytree(saved_model, target / "1", copy_function=shutil.copyfile, dirs_exist_ok=True)
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
    """Returns a line that describes an exported model in the registry.

    It is escaped as in JSON: the launcher's payload pastes it between quotes.
    """
    export = Export.read(exported)
    text = f"{quality}, {export.parameters:,} parameters, dataset {export.fingerprint}"
    return json.dumps(text)[1:-1]


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
    models, doing = Platform.of(resource_name).models, f"import the evaluation of {resource_name}"
    asked = ask_all(doing, models.list_model_evaluations, {"parent": resource_name})
    present = {one.display_name: str(one.name) for one in asked}
    names = []
    for part in evaluation.parts or (evaluation,):
        name = f"{evaluation.split} split" + (f", {part.label}" if evaluation.parts else "")
        if name not in present:  # an earlier attempt has not imported it
            content = describe_evaluation(part, name)
            request = {"parent": resource_name, "model_evaluation": content}
            imported = ask(doing, models.import_model_evaluation, request, repeatable=False)
            present[name] = str(imported.name)
        say("register", f"the evaluation of {resource_name} on the {name} is imported")
        names.append(present[name])
    return names[0]


def describe_evaluation(evaluation: Measured, name: str) -> dict[str, Any]:
    """Returns the API's ModelEvaluation of one label."""
    measured = {"fingerprint": evaluation.fingerprint, "examples": evaluation.examples}
    schema = "regression" if evaluation.kind == REGRESSION else "classification"
    return {
        "display_name": name,
        "metrics_schema_uri": _SCHEMA.format(schema),
        "metrics": registry_metrics(evaluation),
        "metadata": {**measured, **evaluation.metrics},
    }


def registry_metrics(evaluation: Measured) -> dict[str, Any]:
    """Returns an evaluation's metrics in the registry's words.

    With one prediction per example, the most probable class, precision and recall are both the accuracy.
    """
    found = evaluation.metrics
    if evaluation.kind == REGRESSION:
        numbers = _renamed(found, _OF_NUMBERS)
        percent = _renamed(found, {"meanAbsolutePercentageError": "mape"})
        return numbers | {name: 100 * share for name, share in percent.items()}
    metrics: dict[str, Any] = {}
    if evaluation.kind == MULTILABEL:
        metrics["confidenceMetrics"] = [{"confidenceThreshold": THRESHOLD, **_renamed(found, _OF_SEVERAL)}]
    else:
        at_one = dict.fromkeys(("precisionAt1", "recallAt1", "f1ScoreAt1"), evaluation.accuracy)
        metrics["confidenceMetrics"] = [{"confidenceThreshold": 0.0, "maxPredictions": 1, **at_one}]
        if len(evaluation.class_names) <= _MOST_CLASSES:
            specs = [
                {"id": str(label), "displayName": name} for label, name in enumerate(evaluation.class_names)
            ]
            rows = [list(row) for row in evaluation.confusion]
            metrics["confusionMatrix"] = {"annotationSpecs": specs, "rows": rows}
    return metrics | ({} if evaluation.log_loss is None else {"logLoss": evaluation.log_loss})


def _renamed(metrics: Mapping[str, float | None], names: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: metrics[ours] for theirs, ours in names.items() if metrics.get(ours) is not None}
