"""The components that register and deploy a model, and the tasks of a pipeline that they make.

Google's own component uploads a model. KFP embeds the source text of a function alone, so it imports inside.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from google_cloud_pipeline_components.types.artifact_types import (
    UnmanagedContainerModel,
    VertexEndpoint,
    VertexModel,
)
from google_cloud_pipeline_components.v1.model import ModelUploadOp
from kfp import dsl

from shardline.components.register.settings import Deploy, ModelUpload
from shardline.components.vertex.forms import MODEL
from shardline.components.vertex.job import ENCRYPTION_KEY

#: Where the pipeline runs. Without it GCPC works in us-central1, wherever the pipeline runs.
PROJECT = "{{$.pipeline_google_cloud_project_id}}"
LOCATION = "{{$.pipeline_google_cloud_location}}"


def register(
    exported: dsl.Input[dsl.Model],
    quality: str,
    gate: dict,  # type: ignore[type-arg]  # KFP reads it
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
) -> None:
    """Publishes a blessed model as the champion, once in a run.

    Args:
        exported: SavedModel with its evaluation, report and verdict.
        quality: Quality on the test split, as text: "accuracy 0.9812".
        gate: Where it is published: the fields of `components.validate.gate.GateSettings`.
        job_name: Name of the run.
    """
    from pathlib import Path

    from shardline.components.register.deployment import register_model
    from shardline.components.validate.gate.gate import GateSettings
    from shardline.trainer.base.deserialize import read
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("register"):
        champion_uri = read(GateSettings, gate, "gate").champion_uri
        register_model(Path(exported.path), quality, champion_uri, job_name)


def serving_model(
    exported: dsl.Input[dsl.Model],
    serving: dsl.Output[UnmanagedContainerModel],
    quality: str,
    image_uri: str,
    gate: dict,  # type: ignore[type-arg]
    job_name: str = "",
) -> str:
    """Prepares a blessed model for its upload to the Model Registry.

    It is refused here, before anything is served, if the champion has changed since the validation.

    Args:
        exported: SavedModel with its evaluation, report and verdict.
        serving: Base path of the model for TensorFlow Serving, with the container that serves it.
        quality: Quality on the test split, as text: "accuracy 0.9812".
        image_uri: Image of TensorFlow Serving.
        gate: Where it will be published: the fields of `components.validate.gate.GateSettings`.
        job_name: Name of the run.

    Returns:
        The model's description.
    """
    from pathlib import Path

    from shardline.components.model_store.champions import check_judged
    from shardline.components.register.deployment import container_spec, copy_saved_model, describe_model
    from shardline.components.validate.gate.gate import GateSettings
    from shardline.trainer.base.deserialize import read
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("register"):
        check_judged(Path(exported.path), read(GateSettings, gate, "gate").champion_uri, job_name)
        copy_saved_model(Path(exported.path), Path(serving.path))
        serving.metadata["containerSpec"] = container_spec(image_uri)
        return describe_model(Path(exported.path), quality)


def model_deploy(
    exported: dsl.Input[dsl.Model],
    model: dsl.Input[VertexModel],
    endpoint: dsl.Output[VertexEndpoint],
    deploy: dict,  # type: ignore[type-arg]
    labels: dict,  # type: ignore[type-arg]
    gate: dict,  # type: ignore[type-arg]
    job_name: str,
    project: str,
    location: str,
) -> None:
    """Deploys a model after probing it with its golden examples, once in a run.

    It gets no traffic if the champion has changed since the validation.

    Args:
        exported: SavedModel with its golden examples.
        model: The uploaded model.
        endpoint: The endpoint that it is deployed to.
        deploy: The fields of `shardline.components.register.settings.Deploy`.
        labels: Labels of the endpoint on which the model is probed.
        gate: Where it will be published: the fields of `components.validate.gate.GateSettings`.
        job_name: Name of the run.
        project: Project of the pipeline.
        location: Region of the pipeline.
    """
    from pathlib import Path

    from shardline.components.model_store.champions import check_judged
    from shardline.components.register.deployment import Deployment
    from shardline.components.register.settings import Deploy
    from shardline.components.validate.gate.gate import GateSettings
    from shardline.components.vertex.client import Platform
    from shardline.trainer.base.deserialize import read
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("deploy"):
        platform, champion = Platform(project, location), read(GateSettings, gate, "gate").champion_uri
        name = Deployment(
            platform=platform,
            settings=read(Deploy, deploy, "deploy"),
            model=model.metadata.get("resourceName", ""),
            exported=Path(exported.path),
            labels=labels,
            run=job_name,
            check=lambda: check_judged(Path(exported.path), champion, job_name),
        ).deploy()
        endpoint.uri = f"https://{platform.host}/v1/{name}" if name else "local:not-deployed"
        endpoint.metadata.update({"resourceName": name} if name else {})


def upload_task(upload: ModelUpload, ready: dsl.PipelineTask, labels: Mapping[str, str]) -> dsl.PipelineTask:
    """Adds the upload to the pipeline that is being defined, in the pipeline's own project and location.

    `ready` is the task of `serving_model`; `labels` are added to those of `upload`, which take precedence.
    """
    parent = {}
    if match := MODEL.match(upload.parent_model):
        parent["parent_model"] = dsl.importer(
            artifact_uri=f"https://{match[1]}-aiplatform.googleapis.com/v1/{upload.parent_model}",
            artifact_class=VertexModel,
            metadata={"resourceName": upload.parent_model},
        ).output
    return ModelUploadOp(
        location=LOCATION,
        display_name=upload.display_name,
        description=ready.outputs["Output"],
        unmanaged_container_model=ready.outputs["serving"],
        labels={**labels, **upload.tags},
        encryption_spec_key_name=ENCRYPTION_KEY,
        **parent,
    )


def deploy_task(
    component: Callable[..., Any],
    deploy: Deploy,
    exported: Any,
    uploaded: dsl.PipelineTask,
    labels: Mapping[str, str],
    gate: Any,
) -> dsl.PipelineTask:
    """Adds the deployment of an uploaded model to the pipeline that is being defined, and returns its task.

    `component` makes a component of a function; `exported` is the validated model, `labels` are those of the
    endpoint on which it is probed, `gate` has the champion_uri.
    """
    return component(model_deploy)(
        exported=exported,
        model=uploaded.outputs["model"],
        deploy=asdict(deploy),
        labels=dict(labels),
        gate=gate,
        job_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
        project=PROJECT,
        location=LOCATION,
    )
