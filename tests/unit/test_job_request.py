"""The request that starts a run, and what may not get into one."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import CreatePipelineJobRequest
from google.protobuf.json_format import ParseDict

from shardline.pipelines.remote.submit import job_request, new_job_id
from shardline.pipelines.settings import Environment
from shardline.trainer.base.errors import SettingsError

ENVIRONMENT = Environment(
    project="my-project", location="europe-west4", pipeline_root="gs://b/runs", tags={"team": "vision"}
)
TASK = {"componentRef": {"name": "comp-a"}, "cachingOptions": {"enableCache": True}}
SPEC: dict[str, Any] = {
    "pipelineInfo": {"name": "toy"},
    "schemaVersion": "2.1.0",
    "root": {"dag": {"tasks": {"a": TASK, "loop": {"componentRef": {"name": "comp-loop"}}}}},
    "components": {"comp-a": {"executorLabel": "exec-a"}, "comp-loop": {"dag": {"tasks": {"b": TASK}}}},
    "deploymentSpec": {"executors": {"exec-a": {}}},
}


def test_the_request_is_the_apis_own() -> None:
    request = job_request(
        ENVIRONMENT, SPEC, {"count": 3, "note": 'a "b"'}, job_id="toy-1", tags={"stage": "test"}
    )

    assert request == {
        "parent": "projects/my-project/locations/europe-west4",
        "pipelineJob": {
            "displayName": "toy",
            "pipelineSpec": SPEC,
            "labels": {"team": "vision", "stage": "test"},
            "runtimeConfig": {
                "gcsOutputDirectory": "gs://b/runs",
                "parameterValues": {"count": 3, "note": 'a "b"'},
            },
        },
        "pipelineJobId": "toy-1",
    }
    # What is shown is what is sent: no key is unknown to the API.
    message = ParseDict(
        json.loads(json.dumps(request)), CreatePipelineJobRequest.pb(CreatePipelineJobRequest())
    )
    assert message.pipeline_job.runtime_config.parameter_values["count"].number_value == 3


def test_everything_that_an_environment_says_is_sent() -> None:
    key = "projects/p/locations/europe-west4/keyRings/r/cryptoKeys/k"
    environment = Environment(
        project="my-project",
        location="europe-west4",
        pipeline_root="gs://b",
        service_account="a@my-project.iam.gserviceaccount.com",
        network="projects/1/global/networks/n",
        encryption_spec_key_name=key,
    )
    job = job_request(environment, SPEC, {}, template_uri="https://x/y")["pipelineJob"]
    assert job["serviceAccount"] == "a@my-project.iam.gserviceaccount.com"
    assert job["network"] == "projects/1/global/networks/n"
    assert job["encryptionSpec"] == {"kmsKeyName": key}
    assert job["templateUri"] == "https://x/y"
    assert "labels" not in job
    assert "pipelineJobId" not in job_request(environment, SPEC, {})  # as that of a schedule


def test_a_pipelines_own_root_is_used_where_there_is_no_other() -> None:
    nowhere = Environment(project="my-project", location="europe-west4")
    own = {**SPEC, "defaultPipelineRoot": "gs://own"}
    for environment, root in ((nowhere, "gs://own"), (ENVIRONMENT, "gs://b/runs")):
        config = job_request(environment, own, {})["pipelineJob"]["runtimeConfig"]
        assert config["gcsOutputDirectory"] == root
    with pytest.raises(SettingsError, match="pipeline_root is missing"):
        job_request(nowhere, SPEC, {})


def test_without_the_cache_every_task_runs_and_the_pipeline_is_left_as_it_is() -> None:
    before = copy.deepcopy(SPEC)
    changed = job_request(ENVIRONMENT, SPEC, {}, cached=False)["pipelineJob"]["pipelineSpec"]
    assert changed["root"]["dag"]["tasks"]["a"]["cachingOptions"] == {}
    assert changed["components"]["comp-loop"]["dag"]["tasks"]["b"]["cachingOptions"] == {}
    assert before == SPEC


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("retrain", "retrain"),
        ("2nd", "run-2nd"),  # an id begins with a letter
        ("x" * 200, "x" * 105),  # 127 characters in all
    ],
)
def test_an_id_is_the_pipelines_name_the_second_and_six_digits(name: str, beginning: str) -> None:
    found = new_job_id(name)
    assert re.fullmatch(beginning + "-[0-9]{14}-[0-9a-f]{6}", found)
    assert len(found) <= 127
    assert new_job_id(name) != found  # in the same second
    assert job_request(ENVIRONMENT, SPEC, {}, job_id=found)["pipelineJobId"] == found
