"""Jobs and schedules that tests send to the fake."""

from __future__ import annotations

import threading

from google.cloud.aiplatform_v1.types import PipelineJob

from tests.contract.fake.pipeline_jobs import PipelineOutcome
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import LOCATION

CONTAINER = {"image_uri": "image:1", "command": ["python"], "args": ["-c", "print('{{ x }} \"é\"')"]}
POOL = {"machine_spec": {"machine_type": "n1-standard-4"}, "replica_count": 1, "container_spec": CONTAINER}

PARENT = f"projects/{PROJECT}/locations/{LOCATION}"
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


class Waiting:
    """A run that lasts until it is cancelled."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def __call__(self, job: PipelineJob) -> PipelineOutcome:
        self.stop.wait()
        return PipelineOutcome()

    def cancel(self, job: PipelineJob) -> None:
        self.stop.set()
