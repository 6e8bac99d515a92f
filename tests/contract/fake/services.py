"""What the fake answers, and what tests see of it."""

from __future__ import annotations

import datetime
import itertools
import re
import threading
from collections.abc import Callable
from typing import Any

from google.cloud.aiplatform_v1.types import (
    CustomJob,
    Endpoint,
    HyperparameterTuningJob,
    Model,
    PipelineJob,
    Schedule,
)
from google.rpc import code_pb2

from tests.contract.fake.api import PROJECT, PROJECT_NUMBER, ApiError, Outcome
from tests.contract.fake.custom_jobs import CustomJobs
from tests.contract.fake.failures import Drop, Failure, Failures
from tests.contract.fake.log_entries import LogEntries
from tests.contract.fake.models import Models
from tests.contract.fake.pipeline_jobs import PipelineJobs, PipelineOutcome, RunPipeline
from tests.contract.fake.project import PROJECT_ROUTES, Project
from tests.contract.fake.registry import REGISTRY_ROUTES, Registry
from tests.contract.fake.schedules import Schedules
from tests.contract.fake.tokens import Tokens
from tests.contract.fake.tuning_jobs import TuningJobs

__all__ = ["PROJECT", "PROJECT_NUMBER", "ApiError", "FakeServices", "Outcome"]

#: What google-auth asks for by itself, at some time or other.
_BACKGROUND = ("GetAllowedLocations",)


class FakeServices:
    """Holds what clients have made, and answers their calls.

    Attributes:
        calls: Names of the calls, in order.
        failures: What is to fail.
        tokens: Who may ask.
        registry: Artifact Registry.
        logs: Cloud Logging.
        project: What the project is and has.
        web_routes: Calls that are plain HTTP.
    """

    web_routes = (*REGISTRY_ROUTES, *PROJECT_ROUTES)

    def __init__(
        self,
        run: Callable[[CustomJob], Outcome] = lambda job: Outcome(),
        run_pipeline: RunPipeline = lambda job: PipelineOutcome(),
    ) -> None:
        self.calls: list[str] = []
        self.failures = Failures()
        self._idle = threading.Condition()
        self._busy = 0
        self.tokens = Tokens()
        numbers = itertools.count(1).__next__
        self._custom_jobs = CustomJobs(run, numbers)
        self._tuning_jobs = TuningJobs(numbers)
        self._models = Models(numbers)
        self._pipelines = PipelineJobs(run_pipeline, numbers)
        self._schedules = Schedules(self._pipelines, numbers)
        self.registry = Registry()
        self.logs = LogEntries(numbers)
        self.project = Project()
        self._pipelines.resolve_template = self.registry.resolve
        self._parts = (
            *(self._custom_jobs, self._tuning_jobs, self._models, self._pipelines, self._schedules),
            *(self.registry, self.logs, self.project),
        )

    @property
    def jobs(self) -> dict[str, CustomJob]:
        """Custom jobs by name, as they were received, with their state."""
        return self._custom_jobs.jobs

    @property
    def tuning_jobs(self) -> dict[str, HyperparameterTuningJob]:
        """Hyperparameter tuning jobs by name, with their state and trials."""
        return self._tuning_jobs.jobs

    @property
    def models(self) -> dict[str, list[Model]]:
        """Versions of each model by the model's name, as they were received."""
        return self._models.models

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Endpoints by name, which a test makes."""
        return self._models.endpoints

    @property
    def pipeline_jobs(self) -> dict[str, PipelineJob]:
        """Pipeline jobs by name, with their state."""
        return self._pipelines.jobs

    @property
    def schedules(self) -> dict[str, Schedule]:
        """Schedules by name."""
        return self._schedules.schedules

    def fire(self, schedule_name: str, at: datetime.datetime) -> PipelineJob | None:
        """Does what a schedule does at one of its times; None where that makes no job now."""
        return self._schedules.fire(schedule_name, at)

    def fail(
        self,
        method: str,
        code: int = 0,
        message: str = "",
        *,
        times: int = 1,
        delay_s: float = 0.0,
        drop: Drop = "",
    ) -> None:
        """Lets the next calls of a method fail, be late, or lose their connection: see `Failure`."""
        self.failures.add(Failure(method, code, message, times, delay_s, drop))

    def call(self, method: str, request: Any, authorization: str = "") -> Any:
        """Answers a call; `authorization` is the header with the client's token."""
        if method not in _BACKGROUND:
            self.calls.append(method)
        self.tokens.check(authorization)
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower()
        with self._idle:
            self._busy += 1
        try:
            with self.failures.around(method):
                for part in self._parts:
                    if handler := getattr(part, name, None):
                        return handler(request)
                raise ApiError(code_pb2.UNIMPLEMENTED, f"the fake does not know {method}")
        finally:
            self.tokens.answered(method)
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def settle(self, timeout_s: float = 30.0) -> None:
        """Waits until nothing is being answered, those calls included for which nobody waits any more."""
        with self._idle:
            if not self._idle.wait_for(lambda: not self._busy, timeout_s):
                raise TimeoutError(f"{self._busy} calls are being answered after {timeout_s} s")
