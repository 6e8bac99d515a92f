"""Jobs and schedules that tests send to the fake."""

from __future__ import annotations

import datetime
import threading
from typing import Any

from google.cloud.aiplatform_v1.types import PipelineJob

from tests.contract.fake.pipeline_jobs import PipelineOutcome
from tests.contract.fake.services import PROJECT, PROJECT_NUMBER
from tests.contract.fake.vertex import BUCKET, LOCATION

CONTAINER = {"image_uri": "image:1", "command": ["python"], "args": ["-c", "print('{{ x }} \"é\"')"]}
POOL = {"machine_spec": {"machine_type": "n1-standard-4"}, "replica_count": 1, "container_spec": CONTAINER}

PARENT = f"projects/{PROJECT}/locations/{LOCATION}"
NUMBERED = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}"
SPEC = {
    "pipelineInfo": {"name": "toy"},
    "schemaVersion": "2.1.0",
    "components": {},
    "deploymentSpec": {},
    "root": {
        "inputDefinitions": {
            "parameters": {
                "count": {"parameterType": "NUMBER_INTEGER"},
                "when": {"parameterType": "STRING", "defaultValue": ""},
            }
        }
    },
}
NOON = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)


def job(**changes: Any) -> dict[str, Any]:
    config = {"gcs_output_directory": f"gs://{BUCKET}/runs", "parameter_values": {"count": 3.0}}
    return {"display_name": "toy", "pipeline_spec": SPEC, "runtime_config": config, **changes}


def schedule(**changes: Any) -> dict[str, Any]:
    return {
        "display_name": "nightly",
        "cron": "TZ=Europe/Vienna 0 6 * * *",
        "max_concurrent_run_count": 1,
        "create_pipeline_job_request": {"parent": PARENT, "pipeline_job": job()},
        **changes,
    }


class Waiting:
    """A run that lasts until it is cancelled."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def __call__(self, job: PipelineJob) -> PipelineOutcome:
        self.stop.wait()
        return PipelineOutcome()

    def cancel(self, job: PipelineJob) -> None:
        self.stop.set()
