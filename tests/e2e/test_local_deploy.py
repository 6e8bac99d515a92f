"""A pipeline that uploads, deploys and predicts, on this machine: it says what it would do."""

import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from google_cloud_pipeline_components.v1.batch_predict_job import ModelBatchPredictOp
from google_cloud_pipeline_components.v1.endpoint import EndpointCreateOp, ModelDeployOp
from kfp import compiler, dsl

from shardline.components.register import Deploy, ModelUpload
from shardline.components.register.component import deploy_tasks, serving_model, upload_task
from shardline.pipelines.local.localize import localize
from tests.helpers.execution import execute

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ENDPOINT = "projects/my-project/locations/europe-west4/endpoints/9"
PARENT = "projects/my-project/locations/europe-west4/models/7"


@dsl.component(base_image="image:1", install_kfp_package=False)
def export(exported: dsl.Output[dsl.Model]) -> None:
    """Writes what a validation leaves."""
    from pathlib import Path

    from tests.helpers.exports import write_export

    write_export(Path(exported.path))


def run(directory: Path, deploy: Deploy, parent: str) -> subprocess.CompletedProcess[str]:
    upload = ModelUpload(display_name="digits", serving_image_uri="s:1", parent_model=parent)

    @dsl.pipeline(name="deploy")
    def pipeline() -> None:
        component = functools.partial(dsl.component, base_image="image:1", install_kfp_package=False)
        exported = export().outputs["exported"]
        ready = component()(serving_model)(exported=exported, image_uri="s:1")
        uploaded = upload_task(upload, ready, "deploy")
        deploy_tasks(deploy, uploaded, "digits", "deploy")
        ModelBatchPredictOp(
            job_display_name="digits",
            model=uploaded.outputs["model"],
            gcs_source_uris=["gs://b/in/*.jsonl"],
            gcs_destination_output_uri_prefix="gs://b/out",
            machine_type="n1-standard-2",
        )
        ModelDeployOp(
            model=uploaded.outputs["model"],
            endpoint=EndpointCreateOp(display_name="other").outputs["endpoint"],
            automatic_resources_max_replica_count=2,
        )
        ModelBatchPredictOp(
            job_display_name="digits",
            model=uploaded.outputs["model"],
            bigquery_source_input_uri="bq://p.d.questions",
            bigquery_destination_output_uri="bq://p.d.answers",
            machine_type="n1-standard-2",
        )

    compiler.Compiler().compile(pipeline, str(directory / "deploy.yaml"))
    spec = yaml.safe_load((directory / "deploy.yaml").read_text())
    return execute(directory, localize(spec))


@pytest.mark.parametrize(("where", "parent"), [({"endpoint": ENDPOINT}, PARENT), ({}, "")])
def test_what_would_be_done_is_said(tmp_path: Path, where: dict[str, Any], parent: str) -> None:
    done = run(tmp_path, Deploy(machine_type="n1-standard-2", **where), parent)

    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "leaves out UploadModel of 'digits'",
        "leaves out DeployModel",
        "leaves out CreateEndpoint of 'other'",
        "leaves out BatchPredictionJob of 'digits'",
    ):
        assert said in done.stdout
    assert [path.parent.name for path in tmp_path.rglob("saved_model.pb")].count("1") == 1
