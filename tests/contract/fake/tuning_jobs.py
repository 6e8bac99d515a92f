"""Hyperparameter tuning jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from google.cloud.aiplatform_v1.types import HyperparameterTuningJob, JobState, StudySpec, Trial, job_service
from google.protobuf import empty_pb2
from google.rpc import code_pb2, status_pb2

from tests.contract.fake.api import Outcome, find, location, now, refuse
from tests.contract.fake.rules import spec_faults

#: Runs a tuning job: fills in its trials and says how it ended.
RunTuning = Callable[[HyperparameterTuningJob], Outcome]

#: Seconds for which a look at a running job waits for its end, as with custom jobs.
_PATIENCE_S = 60.0
_ENDED = (JobState.JOB_STATE_SUCCEEDED, JobState.JOB_STATE_FAILED, JobState.JOB_STATE_CANCELLED)


def even_trials(job: HyperparameterTuningJob) -> Outcome:
    """Fills in trials all over the ranges; each metric of a trial is its number."""
    count = job.max_trial_count
    for number in range(1, count + 1):
        share = (number - 0.5) / count
        parameters = [
            Trial.Parameter(parameter_id=spec.parameter_id, value=_value(spec, share))
            for spec in job.study_spec.parameters
        ]
        metrics = [{"metric_id": metric.metric_id, "value": number} for metric in job.study_spec.metrics]
        job.trials.append(
            Trial(
                id=str(number),
                state=Trial.State.SUCCEEDED,
                parameters=parameters,
                final_measurement={"step_count": 1, "metrics": metrics},
            )
        )
    return Outcome()


class TuningJobs:
    """Answers the calls of hyperparameter tuning jobs.

    Attributes:
        jobs: Jobs by name, with their state and trials.
    """

    def __init__(self, run: RunTuning, number: Callable[[], int]) -> None:
        self.jobs: dict[str, HyperparameterTuningJob] = {}
        self._run = run
        self._number = number
        self._ended: dict[str, threading.Event] = {}

    def create_hyperparameter_tuning_job(
        self, request: job_service.CreateHyperparameterTuningJobRequest
    ) -> HyperparameterTuningJob:
        parent = location(request.parent)
        job = HyperparameterTuningJob(request.hyperparameter_tuning_job)
        refuse(*_faults(job))
        job.name = f"{parent}/hyperparameterTuningJobs/{self._number()}"
        job.state = JobState.JOB_STATE_RUNNING
        job.create_time = job.start_time = now()
        self.jobs[job.name] = job
        self._ended[job.name] = threading.Event()
        threading.Thread(target=self._execute, args=(job,), daemon=True).start()
        return job

    def _execute(self, job: HyperparameterTuningJob) -> None:
        outcome = Outcome(code_pb2.INTERNAL, "the fake broke")
        try:
            outcome = self._run(job)
        finally:
            if outcome.code:
                job.error = status_pb2.Status(code=outcome.code, message=outcome.message)
            succeeded = JobState.JOB_STATE_SUCCEEDED
            self._end(job, JobState.JOB_STATE_FAILED if outcome.code else succeeded)

    def _end(self, job: HyperparameterTuningJob, state: JobState) -> None:
        if job.state not in _ENDED:
            job.end_time = now()
            job.state = state
        self._ended[job.name].set()

    def get_hyperparameter_tuning_job(
        self, request: job_service.GetHyperparameterTuningJobRequest
    ) -> HyperparameterTuningJob:
        job = find(self.jobs, request.name)
        self._ended[job.name].wait(_PATIENCE_S)
        return job

    def cancel_hyperparameter_tuning_job(
        self, request: job_service.CancelHyperparameterTuningJobRequest
    ) -> empty_pb2.Empty:
        self._end(find(self.jobs, request.name), JobState.JOB_STATE_CANCELLED)
        return empty_pb2.Empty()


def _faults(job: HyperparameterTuningJob) -> Iterator[str]:
    """Source: the comments in hyperparameter_tuning_job.proto and study.proto."""
    if not 1 <= len(job.display_name) <= 128:
        yield "display_name: must have 1 to 128 characters"
    if job.max_trial_count < 1:
        yield "max_trial_count: must be positive"
    if not 1 <= job.parallel_trial_count <= job.max_trial_count:
        yield "parallel_trial_count: must be 1 to max_trial_count"
    if not job.study_spec.metrics:
        yield "study_spec.metrics: is required"
    if not job.study_spec.parameters:
        yield "study_spec.parameters: is required"
    for spec in job.study_spec.parameters:
        yield from _parameter_faults(spec)
    faults = spec_faults(HyperparameterTuningJob.pb(job).trial_job_spec)
    yield from (fault.replace("job_spec", "trial_job_spec", 1) for fault in faults)


def _parameter_faults(spec: StudySpec.ParameterSpec) -> Iterator[str]:
    name = f"study_spec.parameters[{spec.parameter_id!r}]"
    kind = StudySpec.ParameterSpec.pb(spec).WhichOneof("parameter_value_spec")
    if kind is None:
        yield f"{name}: one of the value specs is required"
    elif kind in ("double_value_spec", "integer_value_spec"):
        values = getattr(spec, kind)
        if values.min_value > values.max_value:
            yield f"{name}: min_value is above max_value"
        logarithmic = (
            StudySpec.ParameterSpec.ScaleType.UNIT_LOG_SCALE,
            StudySpec.ParameterSpec.ScaleType.UNIT_REVERSE_LOG_SCALE,
        )
        if spec.scale_type in logarithmic and values.min_value <= 0:
            yield f"{name}: a logarithmic scale needs positive values"
    elif not getattr(spec, kind).values:
        yield f"{name}: values are required"


def _value(spec: StudySpec.ParameterSpec, share: float) -> Any:
    kind = StudySpec.ParameterSpec.pb(spec).WhichOneof("parameter_value_spec")
    values = getattr(spec, kind)
    if kind in ("discrete_value_spec", "categorical_value_spec"):
        return values.values[int(share * len(values.values))]
    value = values.min_value + share * (values.max_value - values.min_value)
    return round(value) if kind == "integer_value_spec" else value
