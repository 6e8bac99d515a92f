"""Hyperparameter tuning jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from google.cloud.aiplatform_v1.types import HyperparameterTuningJob, JobState, StudySpec, Trial, job_service

from tests.contract.fake.api import find, location, now, refuse
from tests.contract.fake.rules import spec_faults

#: Seconds for which a look at a running job waits for its end, as with custom jobs.
_PATIENCE_S = 60.0


def _fill_trials(job: HyperparameterTuningJob) -> None:
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


class TuningJobs:
    """Answers the calls of hyperparameter tuning jobs; `jobs` has them by name."""

    def __init__(self, number: Callable[[], int]) -> None:
        self.jobs: dict[str, HyperparameterTuningJob] = {}
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
        _fill_trials(job)
        job.end_time = now()
        job.state = JobState.JOB_STATE_SUCCEEDED
        self._ended[job.name].set()

    def get_hyperparameter_tuning_job(
        self, request: job_service.GetHyperparameterTuningJobRequest
    ) -> HyperparameterTuningJob:
        job = find(self.jobs, request.name)
        self._ended[job.name].wait(_PATIENCE_S)
        return job


def _faults(job: HyperparameterTuningJob) -> Iterator[str]:
    """Source: the comments in hyperparameter_tuning_job.proto and study.proto."""
    if not 1 <= job.parallel_trial_count <= job.max_trial_count:
        yield "parallel_trial_count: must be 1 to max_trial_count"
    if not (job.study_spec.metrics and job.study_spec.parameters):
        yield "study_spec: metrics and parameters are required"
    yield from spec_faults(HyperparameterTuningJob.pb(job).trial_job_spec)


def _value(spec: StudySpec.ParameterSpec, share: float) -> Any:
    kind = StudySpec.ParameterSpec.pb(spec).WhichOneof("parameter_value_spec")
    values = getattr(spec, kind)
    if kind in ("discrete_value_spec", "categorical_value_spec"):
        return values.values[int(share * len(values.values))]
    value = values.min_value + share * (values.max_value - values.min_value)
    return round(value) if kind == "integer_value_spec" else value
