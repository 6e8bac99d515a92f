"""The tuning job: the real launcher and client at the fake; tests/e2e/test_tune.py trains a study."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import Scheduling
from google.rpc import code_pb2

from shardline.components.tune.best_trial import read_job, read_trials
from shardline.components.tune.component import tuning_job
from shardline.pipelines.settings import load_settings
from shardline.trainer.base.errors import PlatformError
from tests.contract.fake.services import PROJECT, PROJECT_NUMBER
from tests.contract.fake.vertex import LOCATION, FakeVertex
from tests.helpers import programs

LAUNCHER = "google_cloud_pipeline_components.container.v1.hyperparameter_tuning_job.launcher"
POOL = {"machine_spec": {"machine_type": "n1-standard-4"}, "replica_count": 1}
NOTE = 'say "hi" \\ {{ x }} \'\n\ttab, näïve ☃'


def launch(vertex: FakeVertex, text: str, resources: Path) -> subprocess.CompletedProcess[str]:
    where = ("--project", PROJECT, "--location", LOCATION, "--gcp_resources", str(resources))
    return programs.run(
        [sys.executable, "-m", LAUNCHER, "--type", "HyperparameterTuningJob", "--payload", text, *where],
        env=vertex.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def payload(**changes: str) -> str:
    """The payload that the backend makes of our component, with a study of 0 to 1."""
    fields: dict[str, Any] = {
        "study_spec": json.dumps(
            {
                "metrics": [{"metric_id": "val_loss", "goal": "MINIMIZE"}],
                "parameters": [
                    {"parameter_id": "x", "double_value_spec": {"min_value": 0.0, "max_value": 1.0}},
                    {"parameter_id": "n", "discrete_value_spec": {"values": [0, 8]}},
                ],
                "convex_automated_stopping_spec": {"min_measurement_count": 5},
            }
        ),
        "worker_pool_specs": json.dumps(
            [
                {**POOL, "container_spec": {"image_uri": "image:1", "args": [NOTE]}},
                {"replica_count": "0"},
                {"replica_count": "0"},
                {**POOL, "container_spec": {"image_uri": "image:1"}},
            ]
        ),
        "max_trial_count": 3,
        "parallel_trial_count": 2,
        "max_failed_trial_count": 0,
        "base_output_directory": "gs://staging/trials",
        "labels": '{"component": "tune", "seed": "7"}',
    }
    train = replace(
        load_settings(Path("settings/local.toml")).train,
        service_account="sa@acme-vision.iam.gserviceaccount.com",
        network="projects/123456/global/networks/net",
        encryption_spec_key_name="",
        **changes,
    )
    job = tuning_job("tune", train)
    args = job.component_spec.implementation.container.args
    template = "".join(str(part) for part in args[list(args).index("--payload") + 1].items)

    def paste(match: re.Match[str]) -> str:
        value = fields[match.group(1)]
        return value if isinstance(value, str) else json.dumps(value)

    return re.sub(r"\{\{\$\.inputs\.parameters\['(\w+)'\]\}\}", paste, template)


def test_our_tuning_job_arrives_as_it_was_meant(vertex_environ: FakeVertex, tmp_path: Path) -> None:
    vertex, resources = vertex_environ, tmp_path / "gcp_resources"
    done = launch(vertex, payload(), resources)

    assert done.returncode == 0, done.stderr
    (job,) = vertex.services.tuning_jobs.values()
    assert (job.max_trial_count, job.parallel_trial_count) == (3, 2)
    assert job.labels == {"component": "tune", "seed": "7"}
    assert job.study_spec.convex_automated_stopping_spec.min_measurement_count == 5
    assert list(job.study_spec.parameters[1].discrete_value_spec.values) == [0, 8]
    spec = job.trial_job_spec
    # What GCPC's own component leaves out, and without which a cluster does not survive a lost worker.
    assert spec.scheduling.restart_job_on_worker_restart is True
    assert spec.scheduling.timeout.days == 7
    assert spec.scheduling.strategy == Scheduling.Strategy.STANDARD
    assert [pool.replica_count for pool in spec.worker_pool_specs] == [1, 0, 0, 1]
    assert spec.worker_pool_specs[0].container_spec.args == [NOTE]
    assert spec.service_account == "sa@acme-vision.iam.gserviceaccount.com"
    assert spec.base_output_directory.output_uri_prefix == "gs://staging/trials"

    # The step after it finds the job by the launcher's output alone, with the client as it is.
    read = read_job(resources.read_text())
    assert read["name"] == f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/hyperparameterTuningJobs/1"
    trials = read_trials(read)
    assert [trial.value for trial in trials] == [1, 2, 3]
    assert trials[0].parameters == {"x": pytest.approx(1 / 6), "n": 0}
    assert trials[2].parameters == {"x": pytest.approx(5 / 6), "n": 8}


def test_a_job_that_cannot_be_read_is_named(vertex_environ: FakeVertex) -> None:
    name = f"projects/{PROJECT}/locations/{LOCATION}/hyperparameterTuningJobs/9"
    uri = f"https://{LOCATION}-aiplatform.googleapis.com/v1/{name}"
    resources = json.dumps({"resources": [{"resourceType": "HyperparameterTuningJob", "resourceUri": uri}]})
    with pytest.raises(PlatformError, match=f"cannot read the tuning job {name}: not found"):
        read_job(resources)
    vertex_environ.services.fail("GetHyperparameterTuningJob", code_pb2.PERMISSION_DENIED)
    with pytest.raises(PlatformError, match=r"aiplatform\.hyperparameterTuningJobs\.get"):
        read_job(resources)
