"""What the fake answers: custom jobs, models, and the project that all of it belongs to."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.cloud.aiplatform_v1.types import (
    CustomJob,
    JobState,
    Model,
    ModelEvaluation,
    job_service,
    model_service,
)
from google.cloud.resourcemanager_v3.types import Project
from google.longrunning import operations_pb2
from google.rpc import code_pb2, status_pb2

from tests.contract.fake.model_rules import model_faults
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
    """Holds models and custom jobs, and runs each job in a thread of its own.

    Attributes:
        jobs: Jobs by name, as they were received, with their state.
        models: Versions of each model by the model's name, as they were received.
        evaluations: Evaluations by the name of the model's version, as they were received.
        calls: Names of the calls, in order.
    """

    def __init__(self, run: Callable[[CustomJob], Outcome] = lambda job: Outcome()) -> None:
        self.jobs: dict[str, CustomJob] = {}
        self.models: dict[str, list[Model]] = {}
        self.evaluations: dict[str, ModelEvaluation] = {}
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
        location = _location(request.parent)
        job = request.custom_job
        if found := list(faults(CustomJob.pb(job))):
            raise ApiError(code_pb2.INVALID_ARGUMENT, "; ".join(found))
        number = next(self._numbers)
        job.name = f"{location}/customJobs/{number}"
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

    def _upload_model(self, request: model_service.UploadModelRequest) -> operations_pb2.Operation:
        """Answers with an operation that is done: the launcher looks at one that is not after 20 s."""
        location = _location(request.parent)
        if found := list(model_faults(Model.pb(request.model))):
            raise ApiError(code_pb2.INVALID_ARGUMENT, "; ".join(found))
        name = _numbered(request.parent_model) or f"{location}/models/{next(self._numbers)}"
        if request.parent_model and name not in self.models:
            raise ApiError(code_pb2.NOT_FOUND, f"parent_model: no model {request.parent_model!r}")
        versions = self.models.setdefault(name, [])
        versions.append(request.model)
        response = model_service.UploadModelResponse(model=name, model_version_id=str(len(versions)))
        operation = operations_pb2.Operation(name=f"{name}/operations/{next(self._numbers)}", done=True)
        operation.response.Pack(model_service.UploadModelResponse.pb(response))
        return operation

    def _import_model_evaluation(
        self, request: model_service.ImportModelEvaluationRequest
    ) -> ModelEvaluation:
        model, _, version = request.parent.partition("@")
        if not 1 <= int(version or 0) <= len(self.models.get(model, ())):
            raise ApiError(code_pb2.NOT_FOUND, f"parent: no model {request.parent!r}")
        evaluation = request.model_evaluation
        if not re.fullmatch(r"gs://google-cloud-aiplatform/schema/\S+\.yaml", evaluation.metrics_schema_uri):
            raise ApiError(code_pb2.INVALID_ARGUMENT, "metrics_schema_uri: no such schema")
        evaluation.name = f"{request.parent}/evaluations/{next(self._numbers)}"
        self.evaluations[request.parent] = evaluation
        return evaluation

    def _get_project(self, request: Any) -> Project:
        if request.name not in (f"projects/{PROJECT}", f"projects/{PROJECT_NUMBER}"):
            raise ApiError(code_pb2.PERMISSION_DENIED, f"name: no project {request.name!r}")
        return Project(name=f"projects/{PROJECT_NUMBER}", project_id=PROJECT)


def _location(parent: str) -> str:
    """Returns a location's name with the project's number, as the API writes it.

    Raises:
        ApiError: When there is no such location.
    """
    found = _PARENT.fullmatch(parent)
    if found is None or found.group(1) not in (PROJECT, PROJECT_NUMBER):
        raise ApiError(code_pb2.INVALID_ARGUMENT, f"parent: no such location {parent!r}")
    return f"projects/{PROJECT_NUMBER}/locations/{found.group(2)}"


def _numbered(name: str) -> str:
    return name.replace(f"projects/{PROJECT}/", f"projects/{PROJECT_NUMBER}/")
