"""The components that register a model, and the tasks of a pipeline that upload and deploy it.

KFP embeds the source text of a function alone, so it imports inside.
"""

from typing import Any

from google_cloud_pipeline_components.types.artifact_types import (
    UnmanagedContainerModel,
    VertexEndpoint,
    VertexModel,
)
from google_cloud_pipeline_components.v1.endpoint import EndpointCreateOp, ModelDeployOp
from google_cloud_pipeline_components.v1.model import ModelUploadOp
from kfp import dsl

from shardline.components.custom_job import CustomJobSettings
from shardline.components.register.registration import PIPELINE_LABEL, Deploy, ModelUpload

#: Where the pipeline runs. Without it GCPC works in us-central1, wherever the pipeline runs.
PROJECT = "{{$.pipeline_google_cloud_project_id}}"
LOCATION = "{{$.pipeline_google_cloud_location}}"


def register(
    exported: dsl.Input[dsl.Model],
    champion_uri: str,
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
) -> None:
    """Publishes a blessed model as the champion, once in a run.

    Args:
        exported: SavedModel with its evaluation, report and verdict.
        champion_uri: Directory or gs:// URI where it is published; "" publishes nothing.
        job_name: Name of the run.
    """
    from pathlib import Path

    from shardline.components.register import register_model
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("register"):
        register_model(Path(exported.path), champion_uri, job_name)


def serving_model(
    exported: dsl.Input[dsl.Model],
    serving: dsl.Output[UnmanagedContainerModel],
    image_uri: str,
    champion_uri: str = "",
    job_name: str = "",
    pipeline: str = "",
    parent_model: str = "",
    endpoint: str = "",
) -> str:
    """Prepares a blessed model for its upload to the Model Registry.

    It is refused here, before anything is served, if the champion has changed since the validation, or if it
    would replace a model of someone else.

    Args:
        exported: SavedModel with its evaluation, report and verdict.
        serving: Base path of the model for TensorFlow Serving, with the container that serves it.
        image_uri: Image of TensorFlow Serving.
        champion_uri: Where it will be published; "" for nowhere.
        job_name: Name of the run.
        pipeline: Name of the pipeline; only its models are replaced.
        parent_model: Registered model that gets a new version, "" for none.
        endpoint: Endpoint the traffic of which the model gets, "" for a new one.

    Returns:
        The model's description.
    """
    from pathlib import Path

    from shardline.components.model_store.champions import check_judged
    from shardline.components.register import registration
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("register"):
        check_judged(Path(exported.path), champion_uri, job_name)
        registration.check_replaceable(pipeline, parent_model, endpoint)
        registration.copy_saved_model(Path(exported.path), Path(serving.path))
        serving.metadata["containerSpec"] = registration.container_spec(image_uri)
        return registration.describe_model(Path(exported.path))


def upload_task(upload: ModelUpload, ready: dsl.PipelineTask, pipeline: str) -> dsl.PipelineTask:
    """Adds the upload to the pipeline that is being defined, in the pipeline's own project and location.

    `ready` is the task of `serving_model`; the next run knows the model by the label of the `pipeline`.
    """
    parent = upload.parent_model
    return ModelUploadOp(
        location=LOCATION,
        display_name=upload.display_name,
        description=ready.outputs["Output"],
        unmanaged_container_model=ready.outputs["serving"],
        labels={**upload.tags, PIPELINE_LABEL: pipeline},
        encryption_spec_key_name=CustomJobSettings.encryption_spec_key_name,
        **({"parent_model": _existing(parent, VertexModel)} if parent else {}),
    )


def deploy_tasks(
    deploy: Deploy, uploaded: dsl.PipelineTask, name: str, pipeline: str
) -> list[dsl.PipelineTask]:
    """Adds the deployment of an uploaded model, which gets all of its endpoint's traffic; returns the tasks.

    A new endpoint has the display name `name`, and the label of the `pipeline`.
    """
    tasks = []
    if not deploy.endpoint:
        tasks = [
            EndpointCreateOp(
                location=LOCATION,
                display_name=name,
                labels={PIPELINE_LABEL: pipeline},
                encryption_spec_key_name=CustomJobSettings.encryption_spec_key_name,
            )
        ]
    endpoint = tasks[0].outputs["endpoint"] if tasks else _existing(deploy.endpoint, VertexEndpoint)
    machines = {
        f"dedicated_resources_{key}": value
        for key, value in vars(deploy).items()
        if key not in ("endpoint", "service_account")
    }
    deployed = ModelDeployOp(
        model=uploaded.outputs["model"],
        endpoint=endpoint,
        traffic_split={"0": "100"},
        service_account=deploy.service_account,
        **machines,
    )
    return [*tasks, deployed]


def _existing(name: str, artifact_class: Any) -> Any:
    location = name.partition("/locations/")[2].partition("/")[0]
    return dsl.importer(
        artifact_uri=f"https://{location}-aiplatform.googleapis.com/v1/{name}",
        artifact_class=artifact_class,
        metadata={"resourceName": name},
    ).output
