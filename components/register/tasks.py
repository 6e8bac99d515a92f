"""Tasks of a pipeline that upload a model to the Model Registry, deploy it and predict with it in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from google_cloud_pipeline_components.v1.batch_predict_job import ModelBatchPredictOp
from kfp import dsl

from shardline.components.register.component import model_deploy, model_upload
from shardline.components.register.settings import BatchPrediction, Deploy, ModelUpload
from shardline.components.vertex.job import ENCRYPTION_KEY

#: Where the pipeline runs. Without it GCPC works in us-central1, wherever the pipeline runs.
PROJECT = "{{$.pipeline_google_cloud_project_id}}"
LOCATION = "{{$.pipeline_google_cloud_location}}"


def upload_task(
    component: Callable[..., Any], upload: ModelUpload, ready: dsl.PipelineTask, labels: Mapping[str, str]
) -> dsl.PipelineTask:
    """Adds the upload to the pipeline that is being defined, in the pipeline's own project and location.

    `component` makes a component of a function, `ready` is the task of `serving_model`; `labels` are the
    model's, beside those of `upload`, which win.
    """
    return component(model_upload)(
        serving=ready.outputs["serving"],
        description=ready.outputs["Output"],
        upload={**asdict(upload), "version_aliases": list(upload.version_aliases)},
        labels=dict(labels),
        encryption_key=ENCRYPTION_KEY,
        job_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
        project=PROJECT,
        location=LOCATION,
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

    `component` makes a component of a function; `exported` is the validated model, `labels` are those of a
    new endpoint, `gate` says where champions are.
    """
    return component(model_deploy)(
        exported=exported,
        model=uploaded.outputs["model"],
        deploy={**asdict(deploy), "traffic_steps": list(deploy.traffic_steps)},
        labels=dict(labels),
        gate=gate,
        encryption_key=ENCRYPTION_KEY,
        job_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
        project=PROJECT,
        location=LOCATION,
    )


def batch_prediction_task(
    batch: BatchPrediction, name: str, uploaded: dsl.PipelineTask, labels: Mapping[str, str]
) -> dsl.PipelineTask:
    """Adds a batch prediction with an uploaded model to the pipeline that is being defined.

    `name` is the job's display name.
    """
    return ModelBatchPredictOp(
        location=LOCATION,
        job_display_name=name,
        model=uploaded.outputs["model"],
        gcs_source_uris=list(batch.gcs_source_uris),
        gcs_destination_output_uri_prefix=batch.gcs_destination_output_uri_prefix,
        instances_format=batch.instances_format,
        predictions_format=batch.predictions_format,
        machine_type=batch.machine_type,
        accelerator_type=batch.accelerator_type,
        accelerator_count=batch.accelerator_count,
        starting_replica_count=batch.min_replica_count,
        max_replica_count=batch.max_replica_count,
        service_account=batch.service_account,
        labels=dict(labels),
        encryption_spec_key_name=ENCRYPTION_KEY,
        # Today's files may differ from yesterday's.
    ).set_caching_options(False)
