"""What the fake answers: custom jobs, and the project that all of it belongs to."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.cloud.aiplatform_v1.types import CustomJob, JobState, job_service
from google.cloud.resourcemanager_v3.types import Project
from google.rpc import code_pb2, status_pb2

from tests.contract.fake.rules import faults

PROJECT_NUMBER = "123456"
PROJECT = "my-project"

#: Seconds for which a look at a running job waits for its end: the launcher would look again after 20 s.
_PATIENCE_S = 60.0

_PARENT = re.compile(r"projects/([^/]+)/locations/([a-z]+-[a-z]+\d)")


class ApiError(Exception):
    """An answer that is an error; `code` is one of google.rpc.Code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Outcome:
    """How a job ended: `code` is one of google.rpc.Code, 0 for success."""

    code: int = 0
    message: str = ""


class FakeServices:
    """Holds the custom jobs, and runs each in a thread of its own.

    Attributes:
        jobs: Jobs by name, as they were received, with their state.
        calls: Names of the calls, in order.
    """

    def __init__(self, run: Callable[[CustomJob], Outcome] = lambda job: Outcome()) -> None:
        self.jobs: dict[str, CustomJob] = {}
        self.calls: list[str] = []
        self._run = run
        self._ended: dict[str, threading.Event] = {}
        self._numbers = itertools.count(1)

    def call(self, method: str, request: Any) -> Any:
        """Answers a call.

        Raises:
            ApiError: When the answer is an error.
        """
        self.calls.append(method)
        handler = getattr(self, f"_{re.sub(r'(?<!^)(?=[A-Z])', '_', method).lower()}", None)
        if handler is None:
            raise ApiError(code_pb2.UNIMPLEMENTED, f"the fake does not know {method}")
        return handler(request)

    def _create_custom_job(self, request: job_service.CreateCustomJobRequest) -> CustomJob:
        parent = _PARENT.fullmatch(request.parent)
        if parent is None or parent.group(1) not in (PROJECT, PROJECT_NUMBER):
            raise ApiError(code_pb2.INVALID_ARGUMENT, f"parent: no such location {request.parent!r}")
        job = request.custom_job
        if found := list(faults(CustomJob.pb(job))):
            raise ApiError(code_pb2.INVALID_ARGUMENT, "; ".join(found))
        number = next(self._numbers)
        job.name = f"projects/{PROJECT_NUMBER}/locations/{parent.group(2)}/customJobs/{number}"
        job.state = JobState.JOB_STATE_RUNNING
        self.jobs[job.name] = job
        self._ended[job.name] = threading.Event()
        threading.Thread(target=self._execute, args=(job,), daemon=True).start()
        return job

    def _execute(self, job: CustomJob) -> None:
        outcome = Outcome(code_pb2.INTERNAL, "the fake broke")
        try:
            outcome = self._run(job)
        finally:
            if outcome.code:
                job.error = status_pb2.Status(code=outcome.code, message=outcome.message)
            succeeded = JobState.JOB_STATE_SUCCEEDED
            job.state = JobState.JOB_STATE_FAILED if outcome.code else succeeded
            self._ended[job.name].set()

    def _get_custom_job(self, request: job_service.GetCustomJobRequest) -> CustomJob:
        if request.name not in self.jobs:
            raise ApiError(code_pb2.NOT_FOUND, f"name: no job {request.name!r}")
        self._ended[request.name].wait(_PATIENCE_S)
        return self.jobs[request.name]

    def _list_custom_jobs(self, request: job_service.ListCustomJobsRequest) -> Any:
        jobs = [job for name, job in self.jobs.items() if name.split("/")[3] == request.parent.split("/")[3]]
        return job_service.ListCustomJobsResponse(custom_jobs=jobs)

    def _get_project(self, request: Any) -> Project:
        if request.name not in (f"projects/{PROJECT}", f"projects/{PROJECT_NUMBER}"):
            raise ApiError(code_pb2.PERMISSION_DENIED, f"name: no project {request.name!r}")
        return Project(name=f"projects/{PROJECT_NUMBER}", project_id=PROJECT)
