"""Pipeline jobs, each of which runs in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.cloud.aiplatform_v1.types import PipelineJob, PipelineState, PipelineTaskDetail, pipeline_service
from google.protobuf import empty_pb2, json_format
from google.rpc import code_pb2, status_pb2

from tests.contract.fake.api import ApiError, find, location, now, page, refuse
from tests.contract.fake.rules import pipeline_faults

#: Seconds for which a look at a job waits for its end, so that a job that does nothing has ended when
#: somebody looks at it.
_PATIENCE_S = 0.2

_ENDED = (
    PipelineState.PIPELINE_STATE_SUCCEEDED,
    PipelineState.PIPELINE_STATE_FAILED,
    PipelineState.PIPELINE_STATE_CANCELLED,
)


@dataclass
class PipelineOutcome:
    """How a pipeline job ended; with `tasks` of None those stay that the run has put there."""

    code: int = 0
    message: str = ""
    tasks: list[PipelineTaskDetail] | None = field(default=None)


#: Runs a pipeline job. It may fill in the job's task details on the way. Where it has an attribute
#: `cancel` (of the same form), that is called when the job is to be cancelled.
RunPipeline = Callable[[PipelineJob], PipelineOutcome]


class PipelineJobs:
    """Answers the calls of PipelineService; `jobs` has them by name, with their state."""

    def __init__(self, run: RunPipeline, number: Callable[[], int]) -> None:
        self.jobs: dict[str, PipelineJob] = {}
        self.resolve_template: Callable[[str], tuple[dict[str, Any], str]] = _no_template
        self._run = run
        self._number = number
        self._ended: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def create_pipeline_job(self, request: pipeline_service.CreatePipelineJobRequest) -> PipelineJob:
        parent = location(request.parent)
        job = PipelineJob(request.pipeline_job)
        if job.template_uri and not job.pipeline_spec:
            spec, job.template_metadata.version = self.resolve_template(job.template_uri)
            json_format.ParseDict(spec, PipelineJob.pb(job).pipeline_spec)
        content = as_json(job)
        refuse(*pipeline_faults(content, request.pipeline_job_id))
        pipeline = content["pipeline_spec"]["pipelineInfo"]["name"]
        job.name = f"{parent}/pipelineJobs/{request.pipeline_job_id or f'{pipeline}-{self._number()}'}"
        return PipelineJob(self.start(job))

    def start(self, job: PipelineJob) -> PipelineJob:
        """Starts a job that has a name, or answers ALREADY_EXISTS."""
        with self._lock:
            if job.name in self.jobs:
                raise ApiError(code_pb2.ALREADY_EXISTS, f"PipelineJob {job.name!r} already exists.")
            self.jobs[job.name] = job
        job.state = PipelineState.PIPELINE_STATE_PENDING
        job.create_time = job.update_time = now()
        # The backend's own.
        job.labels["vertex-ai-pipelines-run-billing-id"] = str(self._number())
        self._ended[job.name] = threading.Event()
        received = PipelineJob(job)
        threading.Thread(target=self._execute, args=(job,), daemon=True).start()
        return received

    def _execute(self, job: PipelineJob) -> None:
        outcome = PipelineOutcome(code_pb2.INTERNAL, "the fake broke")
        with self._lock:
            if job.state == PipelineState.PIPELINE_STATE_PENDING:
                job.state = PipelineState.PIPELINE_STATE_RUNNING
                job.start_time = job.update_time = now()
        try:
            outcome = self._run(job)
        finally:
            if outcome.tasks is not None:
                job.job_detail.task_details = outcome.tasks
            succeeded = PipelineState.PIPELINE_STATE_SUCCEEDED
            self._end(job, PipelineState.PIPELINE_STATE_FAILED if outcome.code else succeeded, outcome)

    def _end(self, job: PipelineJob, state: PipelineState, outcome: PipelineOutcome) -> None:
        with self._lock:
            if job.state in _ENDED:
                return
            if outcome.code:
                job.error = status_pb2.Status(code=outcome.code, message=outcome.message)
            job.end_time = job.update_time = now()
            job.state = state
        self._ended[job.name].set()

    def get_pipeline_job(self, request: pipeline_service.GetPipelineJobRequest) -> PipelineJob:
        job = find(self.jobs, request.name)
        self._ended[job.name].wait(_PATIENCE_S)
        return job

    def list_pipeline_jobs(self, request: pipeline_service.ListPipelineJobsRequest) -> Any:
        parent = location(request.parent)
        jobs = [job for job in self.jobs.values() if job.name.startswith(f"{parent}/")]
        found, token = page(sorted(jobs, key=lambda job: job.create_time, reverse=True), request)
        return pipeline_service.ListPipelineJobsResponse(
            pipeline_jobs=[_listed(job, list(request.read_mask.paths)) for job in found],
            next_page_token=token,
        )

    def cancel_pipeline_job(self, request: pipeline_service.CancelPipelineJobRequest) -> empty_pb2.Empty:
        """Cancels at once where the run can do that, else its outcome no longer matters.

        On a job that has ended the call has no effect, as its documentation says.
        """
        job = find(self.jobs, request.name)
        if job.state in _ENDED:
            return empty_pb2.Empty()
        cancel = getattr(self._run, "cancel", None)
        if cancel is not None:
            cancel(job)
        outcome = PipelineOutcome(code_pb2.CANCELLED, "The PipelineJob was cancelled by the user.")
        self._end(job, PipelineState.PIPELINE_STATE_CANCELLED, outcome)
        return empty_pb2.Empty()

    def active(self, schedule_name: str) -> int:
        """Returns how many jobs of a schedule have not ended."""
        jobs = [job for job in self.jobs.values() if job.schedule_name == schedule_name]
        return sum(job.state not in _ENDED for job in jobs)


def as_json(message: Any) -> dict[str, Any]:
    """Returns a message (proto-plus) as JSON with the fields' own names."""
    return json_format.MessageToDict(type(message).pb(message), preserving_proto_field_name=True)


def _listed(job: PipelineJob, fields: list[str]) -> PipelineJob:
    """Returns a job as lists show it: without details, or with the fields of a read mask only."""
    if not fields:
        found = PipelineJob(job)
        del found.job_detail
        return found
    return PipelineJob({name: getattr(job, name) for name in fields if name not in ("*", "job_detail")})


def _no_template(uri: str) -> tuple[dict[str, Any], str]:
    raise ApiError(code_pb2.NOT_FOUND, f"template_uri: no template {uri!r}")
