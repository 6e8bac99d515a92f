"""The task that uploads a model to the Model Registry."""

from __future__ import annotations

from collections.abc import Mapping

from google_cloud_pipeline_components.types.artifact_types import VertexModel
from google_cloud_pipeline_components.v1.model import ModelUploadOp
from kfp import dsl

from shardline.components.register.upload import ModelUpload
from shardline.components.train.pools.job import ENCRYPTION_KEY

#: Where the pipeline runs. Without it GCPC works in us-central1, wherever the pipeline runs.
LOCATION = "{{$.pipeline_google_cloud_location}}"


def upload_task(upload: ModelUpload, ready: dsl.PipelineTask, labels: Mapping[str, str]) -> dsl.PipelineTask:
    """Adds the upload to the pipeline that is being defined, in the pipeline's own project and location.

    Args:
        upload: Which model it is in the registry.
        ready: A task of the component `serving_model`.
        labels: Labels of the model, beside those of `upload`, which win.
    """
    parent = {}
    if upload.parent_model:
        imported = dsl.importer(
            artifact_uri=upload.parent_uri,
            artifact_class=VertexModel,
            metadata={"resourceName": upload.parent_model},
        )
        parent["parent_model"] = imported.output
    return ModelUploadOp(
        location=LOCATION,
        display_name=upload.display_name,
        description=ready.outputs["Output"],
        unmanaged_container_model=ready.outputs["serving"],
        version_aliases=list(upload.version_aliases),
        labels={**labels, **upload.labels},
        encryption_spec_key_name=ENCRYPTION_KEY,
        **parent,
    )
