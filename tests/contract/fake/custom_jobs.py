"""Custom jobs, each of which runs in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from google.cloud.aiplatform_v1.types import CustomJob, JobState, job_service
from google.protobuf import empty_pb2
from google.rpc import code_pb2, status_pb2

from tests.contract.fake.api import Outcome, find, location, now, refuse
from tests.contract.fake.rules import label_faults, spec_faults

#: Seconds for which a look at a running job waits for its end: the launcher would look again after 20 s.
_PATIENCE_S = 60.0


class CustomJobs:
    """Answers the calls of custom jobs; `jobs` has them by name, as received, with their state."""

    def __init__(self, run: Callable[[CustomJob], Outcome], number: Callable[[], int]) -> None:
        self.jobs: dict[str, CustomJob] = {}
        self._run = run
        self._number = number
        self._ended: dict[str, threading.Event] = {}

    def create_custom_job(self, request: job_service.CreateCustomJobRequest) -> CustomJob:
        parent = location(request.parent)
        job = request.custom_job
        refuse(*label_faults(job.labels), *spec_faults(CustomJob.pb(job).job_spec))
        job.name = f"{parent}/customJobs/{self._number()}"
        job.state = JobState.JOB_STATE_RUNNING
        job.create_time = now()
        self.jobs[job.name] = job
        self._ended[job.name] = threading.Event()
        threading.Thread(target=self._execute, args=(job,), daemon=True).start()
        return job

    def _execute(self, job: CustomJob) -> None:
        outcome = Outcome(code_pb2.INTERNAL, "the fake broke")
        try:
            outcome = self._run(job)
        finally:
            if job.state == JobState.JOB_STATE_RUNNING:
                if outcome.code:
                    job.error = status_pb2.Status(code=outcome.code, message=outcome.message)
                succeeded = JobState.JOB_STATE_SUCCEEDED
                job.state = JobState.JOB_STATE_FAILED if outcome.code else succeeded
            self._ended[job.name].set()

    def get_custom_job(self, request: job_service.GetCustomJobRequest) -> CustomJob:
        job = find(self.jobs, request.name)
        if job.state == JobState.JOB_STATE_RUNNING:
            self._ended[job.name].wait(_PATIENCE_S)
        return job

    def cancel_custom_job(self, request: job_service.CancelCustomJobRequest) -> Any:
        job = find(self.jobs, request.name)
        if not self._ended[job.name].is_set():
            job.state = JobState.JOB_STATE_CANCELLED
            self._ended[job.name].set()
        return empty_pb2.Empty()
