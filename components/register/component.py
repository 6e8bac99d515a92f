"""The registration components. KFP embeds the source text of a function alone, so it imports inside."""

from google_cloud_pipeline_components.types.artifact_types import (
    UnmanagedContainerModel,
    VertexEndpoint,
    VertexModel,
)
from kfp import dsl


def register(
    exported: dsl.Input[dsl.Model],
    quality: str,
    gate: dict,  # type: ignore[type-arg]  # KFP reads it
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
) -> None:
    """Publishes a blessed model as the champion, once in a run.

    Args:
        exported: SavedModel with its evaluation, report and verdict.
        quality: How good it is on the test split, in words: "accuracy 0.9812".
        gate: Where it is published: the fields of `components.validate.settings.GateSettings`.
        job_name: Name of the run.
    """
    from pathlib import Path

    from shardline.components.register.publish import register_model
    from shardline.components.validate.settings import GateSettings
    from shardline.trainer.progress import errors_end_the_process
    from shardline.trainer.records import read

    with errors_end_the_process("register"):
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
    """Makes a blessed model ready to be uploaded to the Model Registry.

    It is refused here, before anything is served, where the champion is another than it was judged against.

    Args:
        exported: SavedModel with its evaluation, report and verdict.
        serving: Base path of the model for TensorFlow Serving, with the container that serves it.
        quality: How good it is on the test split, in words: "accuracy 0.9812".
        image_uri: TensorFlow Serving.
        gate: Where it will be published: the fields of `components.validate.settings.GateSettings`.
        job_name: Name of the run.

    Returns:
        The model's description.
    """
    from pathlib import Path

    from shardline.components.champions import check_judged
    from shardline.components.register.registry import container_spec, describe, lay_out
    from shardline.components.validate.settings import GateSettings
    from shardline.trainer.progress import errors_end_the_process
    from shardline.trainer.records import read

    with errors_end_the_process("register"):
        check_judged(Path(exported.path), read(GateSettings, gate, "gate").champion_uri, job_name)
        lay_out(Path(exported.path), Path(serving.path))
        serving.metadata["containerSpec"] = container_spec(image_uri)
        return describe(Path(exported.path), quality)


def model_upload(
    serving: dsl.Input[UnmanagedContainerModel],
    model: dsl.Output[VertexModel],
    description: str,
    upload: dict,  # type: ignore[type-arg]
    labels: dict,  # type: ignore[type-arg]
    encryption_key: str,
    job_name: str,
    project: str,
    location: str,
) -> None:
    """Uploads a model to the Model Registry, once in a run.

    Args:
        serving: Base path of the model for TensorFlow Serving, with the container that serves it.
        model: The uploaded model.
        description: What the registry shows of the model.
        upload: The fields of `shardline.components.register.settings.ModelUpload`.
        labels: Labels beside those of `upload`, which win.
        encryption_key: Resource name of the key in Cloud KMS; "" for Google's own.
        job_name: Name of the run.
        project: Where the pipeline runs.
        location: Its region.
    """
    from shardline.components.register.registry import upload_model
    from shardline.components.register.settings import ModelUpload
    from shardline.components.vertex.client import Platform
    from shardline.trainer.progress import errors_end_the_process
    from shardline.trainer.records import read

    with errors_end_the_process("register"):
        platform = Platform(project, location)
        name = upload_model(
            platform,
            read(ModelUpload, upload, "upload"),
            serving=serving,
            description=description,
            labels=labels,
            encryption_key=encryption_key,
            run=job_name,
        )
        model.uri = f"https://{platform.host}/v1/{name}" if name else "local:not-uploaded"
        # Without a resourceName later tasks can tell that there is no such model.
        model.metadata.update({"resourceName": name} if name else {})


def registry_evaluation(exported: dsl.Input[dsl.Model], model: dsl.Input[VertexModel]) -> str:
    """Imports a model's evaluation into the Model Registry.

    Args:
        exported: SavedModel with its evaluation, report and verdict.
        model: The uploaded model.

    Returns:
        The evaluation's resource name; "" in a local run.
    """
    from pathlib import Path

    from shardline.components.register.registry import import_evaluation
    from shardline.trainer.progress import errors_end_the_process

    with errors_end_the_process("register"):
        return import_evaluation(Path(exported.path), model.metadata.get("resourceName", ""))


def model_deploy(
    exported: dsl.Input[dsl.Model],
    model: dsl.Input[VertexModel],
    endpoint: dsl.Output[VertexEndpoint],
    deploy: dict,  # type: ignore[type-arg]
    labels: dict,  # type: ignore[type-arg]
    gate: dict,  # type: ignore[type-arg]
    encryption_key: str,
    job_name: str,
    project: str,
    location: str,
) -> None:
    """Deploys a model that gives its golden answers, once in a run.

    It gets no traffic where the champion is another than it was judged against.

    Args:
        exported: SavedModel with its golden examples.
        model: The uploaded model.
        endpoint: Where it is deployed.
        deploy: The fields of `shardline.components.register.settings.Deploy`.
        labels: Labels of a new endpoint.
        gate: Where it will be published: the fields of `components.validate.settings.GateSettings`.
        encryption_key: Resource name of the key of a new endpoint; "" for Google's own.
        job_name: Name of the run.
        project: Where the pipeline runs.
        location: Its region.
    """
    from pathlib import Path

    from shardline.components.champions import check_judged
    from shardline.components.register.deployment import deploy_model
    from shardline.components.register.settings import Deploy
    from shardline.components.validate.settings import GateSettings
    from shardline.components.vertex.client import Platform
    from shardline.trainer.progress import errors_end_the_process
    from shardline.trainer.records import read

    with errors_end_the_process("deploy"):
        platform, champion = Platform(project, location), read(GateSettings, gate, "gate").champion_uri
        name = deploy_model(
            platform,
            read(Deploy, deploy, "deploy"),
            model=model.metadata.get("resourceName", ""),
            exported=Path(exported.path),
            labels=labels,
            encryption_key=encryption_key,
            run=job_name,
            check=lambda: check_judged(Path(exported.path), champion, job_name),
        )
        endpoint.uri = f"https://{platform.host}/v1/{name}" if name else "local:not-deployed"
        endpoint.metadata.update({"resourceName": name} if name else {})
