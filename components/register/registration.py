"""Registration of a blessed model: its settings, its publication as champion, and its upload prepared."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from shardline.components.custom_job import DISPLAY_NAME, ENDPOINT, IMAGE, MODEL, Tags, TextFormat
from shardline.components.model_store import BLESSING_FILE, SAVED_MODEL, Export, Verdict, champions, read_part
from shardline.components.runs import on_platform
from shardline.components.text import quality
from shardline.components.vertex import Platform, call_api
from shardline.trainer.base.deserialize import Count, Natural, Rule, check_types
from shardline.trainer.base.errors import ModelError, RunError, SettingsError
from shardline.trainer.base.progress import fact, report

#: Label of uploaded models: the name of their pipeline, which alone replaces them.
PIPELINE_LABEL = "shardline-pipeline"
#: The platform inserts texts between the quotes of JSON unescaped.
_TEXT = TextFormat(r'[^"\\\n]+', "a text without quotes, backslashes and line breaks")
#: The same, which must be there.
_NAME = Annotated[str, Rule(_TEXT.description, _TEXT.fits)]
_SERVED_NAME = "model"


@dataclass(frozen=True, kw_only=True)
class Deploy:
    """Deployment of a blessed model, after its upload to the Model Registry: [deploy].

    settings/vertex.toml.example explains the fields; `endpoint` "" makes a new endpoint in each run.
    """

    machine_type: _NAME
    endpoint: Annotated[str, ENDPOINT] = ""
    accelerator_type: Annotated[str, _TEXT] = ""
    accelerator_count: Natural = 0
    min_replica_count: Count = 1
    max_replica_count: Count = 1
    service_account: Annotated[str, _TEXT] = ""

    def __post_init__(self) -> None:
        check_types(self)
        if bool(self.accelerator_type) != (self.accelerator_count > 0):
            raise SettingsError("accelerator_type and accelerator_count go together; set both or neither")
        if self.min_replica_count > self.max_replica_count:
            raise SettingsError(f"min_replica_count is 1 to max_replica_count, got {self.min_replica_count}")


@dataclass(frozen=True, kw_only=True)
class ModelUpload:
    """Upload of a blessed model to the Vertex AI Model Registry: [model_upload].

    `parent_model` "" registers a new model with each upload.
    """

    display_name: Annotated[_NAME, DISPLAY_NAME]
    serving_image_uri: Annotated[_NAME, IMAGE]
    parent_model: Annotated[str, MODEL] = ""
    tags: Tags = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)


def register_model(exported: Path, champion_uri: str, run: str = "") -> None:
    """Makes an exported, blessed model the champion; champion_uri "" publishes nothing.

    Repeated in the same `run`, it publishes once. Raises ModelError as `champions.publish` does, and
    SettingsError, PlatformError or RunError when the model store cannot be reached or written to.
    """
    if not champion_uri:
        report("register", "champion_uri is empty: the blessed model is not published")
        return
    champions.refuse_container_path("champion_uri", champion_uri)
    try:
        published = champions.publish(exported, champion_uri, run=run)
    except ModelError as error:
        raise ModelError(f"{error}; if this run deployed it, the endpoint serves it") from error
    present, *before = champions.require_current(champion_uri)[0].champions
    status = f"is the champion, replacing {before[0]}" if before else "is the champion"
    if present != published.version:
        status = f"was the champion until {present} replaced it"
    report("register", f"version {published.version} {status}")
    fact("champion", champions.open_store(champion_uri).location(published.path))


def check_replaceable(pipeline: str, parent_model: str, endpoint: str) -> None:
    """Raises SettingsError where a model that is not of `pipeline` would be replaced, by its label.

    That is the parent model of a new version, or a model that has traffic on the endpoint. "" is no resource;
    a run on this machine replaces nothing. Raises PlatformError where the platform does not say.
    """
    if not on_platform():
        return
    if parent_model:
        _check_own(pipeline, parent_model, "gets no new version", "another parent_model, or none,")
    if endpoint:
        get = Platform.of_resource(endpoint).endpoints.get_endpoint
        found = call_api(f"read the endpoint {endpoint}", get, {"name": endpoint})
        models = {m.id: f"{m.model.split('@')[0]}@{m.model_version_id}" for m in found.deployed_models}
        for deployed in (key for key, percentage in found.traffic_split.items() if percentage):
            model = models.get(deployed, f"the deployed model {deployed} of {endpoint}")
            _check_own(pipeline, model, f"keeps its traffic on {endpoint}", "another endpoint, or none,")


def _check_own(pipeline: str, model: str, kept: str, other: str) -> None:
    get = Platform.of_resource(model).models.get_model
    label = call_api(f"read the model {model}", get, {"name": model}).labels.get(PIPELINE_LABEL, "")
    if label != pipeline or not label:
        raise SettingsError(
            f"{model} is not a model of the pipeline {pipeline!r} and {kept} (label {PIPELINE_LABEL}: "
            f"{label or 'none'}); give {other} in the settings, or give the model the label if it is yours"
        )


def copy_saved_model(exported: Path, target: Path) -> None:
    """Copies an exported model to `target`/1; `target` is a base path for TensorFlow Serving.

    Raises ModelError when `exported` holds no complete export, RunError when copying fails.
    """
    Export.read(exported)  # written last: the export is complete
    saved_model = exported / SAVED_MODEL
    if not saved_model.is_dir():
        raise ModelError(f"no {SAVED_MODEL} in {exported}; validate the model again")
    try:
        # Contents only: a Cloud Storage mount keeps neither modes nor times. TF Serving wants a number.
        shutil.copytree(saved_model, target / "1", copy_function=shutil.copyfile, dirs_exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot copy to {target}: {error.strerror or error}; upload the model again"
        ) from error


def container_spec(image_uri: str) -> dict[str, Any]:
    """Returns the ModelContainerSpec that serves a model over REST, in the API's camel case.

    The platform sets AIP_STORAGE_URI to the directory of the model, and sends requests to port 8080 by
    default. A deployed model never changes: the server does not poll for newer versions.

    Source: https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements
    """
    return {
        "imageUri": image_uri,
        "command": ["/usr/bin/tensorflow_model_server"],
        "args": [
            "--port=8500",
            "--rest_api_port=8080",
            f"--model_name={_SERVED_NAME}",
            "--model_base_path=$(AIP_STORAGE_URI)",
            f"--file_system_poll_wait_seconds={365 * 86_400}",
        ],
        "predictRoute": f"/v1/models/{_SERVED_NAME}:predict",
        "healthRoute": f"/v1/models/{_SERVED_NAME}",
    }


def describe_model(exported: Path) -> str:
    """Returns a line that describes an exported model in the registry.

    It is escaped as in JSON: the launcher's payload pastes it between quotes.
    """
    export = Export.read(exported)
    reached = quality(read_part(exported, BLESSING_FILE, Verdict).metrics)
    text = f"{reached}, {export.parameters:,} parameters, dataset {export.fingerprint}"
    return json.dumps(text)[1:-1]
