"""A model predicts a batch: our task, kfp.local, the real launcher, the fake, and back."""

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.aiplatform_v1.types import Model
from kfp import compiler, dsl

from shardline.components.register.settings import BatchPrediction
from shardline.components.register.tasks import batch_prediction_task
from shardline.pipelines.local.localize import localize
from tests.contract.fake.services import PROJECT_NUMBER
from tests.contract.fake.vertex import LOCATION, FakeVertex
from tests.helpers.execution import execute

pytestmark = [pytest.mark.timeout(120), pytest.mark.e2e]

PLACE = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}"
MODEL = f"{PLACE}/models/7@1"
BATCH = BatchPrediction(
    gcs_source_uris=("gs://b/in/*.jsonl",),
    gcs_destination_output_uri_prefix="gs://b/out",
    machine_type="n1-standard-2",
    accelerator_type="NVIDIA_TESLA_T4",
    accelerator_count=1,
)


@dsl.component(base_image="image:1", install_kfp_package=False)
def upload(model: dsl.Output[dsl.Artifact], name: str) -> None:
    """Stands for the upload, which has tests of its own."""
    model.metadata["resourceName"] = name


def run(vertex: FakeVertex, directory: Path, after_upload: Any) -> subprocess.CompletedProcess[str]:
    """Runs a pipeline with the launchers where kfp.local will start them."""

    @dsl.pipeline(name="predict")
    def pipeline() -> None:
        component = functools.partial(dsl.component, base_image="image:1", install_kfp_package=False)
        after_upload(component(), upload(name=MODEL))

    compiler.Compiler().compile(pipeline, str(directory / "predict.yaml"))
    spec = yaml.safe_load((directory / "predict.yaml").read_text())
    for executor in spec["deploymentSpec"]["executors"].values():
        command = executor.get("container", {}).get("command", [])
        if any("gcp_launcher" in part or part.endswith(".launcher") for part in command):
            command[3:] = ["tests.contract.fake.launch", "--marker=kfp.dsl.executor_main"]
    return execute(directory, localize(spec), environment=vertex.environment)


@pytest.fixture(autouse=True)
def registered(vertex: FakeVertex) -> None:
    vertex.services.models[MODEL.partition("@")[0]] = [Model()]


def test_a_batch_is_predicted(vertex: FakeVertex, tmp_path: Path) -> None:
    done = run(
        vertex,
        tmp_path,
        lambda _, task: batch_prediction_task(BATCH, "digits", task, {"pipeline": "retrain"}),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = vertex.services.predictions.values()
    assert (job.display_name, job.model, job.labels["pipeline"]) == ("digits", MODEL, "retrain")
    assert list(job.input_config.gcs_source.uris) == ["gs://b/in/*.jsonl"]
    assert job.output_config.gcs_destination.output_uri_prefix == "gs://b/out"
    assert (job.input_config.instances_format, job.output_config.predictions_format) == ("jsonl", "jsonl")
    spec = json.loads(type(job.dedicated_resources).to_json(job.dedicated_resources))
    assert spec["machineSpec"]["acceleratorCount"] == 1
    assert (spec["startingReplicaCount"], spec["maxReplicaCount"]) == (1, 1)
