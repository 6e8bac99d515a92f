"""Schedules. Time does not pass by itself: a test says when one fires."""

from __future__ import annotations

import datetime
import json
import re
import zoneinfo
from collections.abc import Callable, Iterator
from typing import Any

from cronsim import CronSim
from google.cloud.aiplatform_v1.types import PipelineJob, Schedule, schedule_service
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2, json_format
from google.rpc import code_pb2

from tests.contract.fake.api import ApiError, done, find, location, now, page, refuse
from tests.contract.fake.pipeline_jobs import PipelineJobs, as_json
from tests.contract.fake.rules import pipeline_faults

_OUTPUT_ONLY = (
    *("started_run_count", "state", "create_time", "update_time", "next_run_time", "last_pause_time"),
    *("last_resume_time", "catch_up", "last_scheduled_run_response"),
)
_ZONED = re.compile(r"(?:(?:CRON_)?TZ=(\S+)\s+)?(.*)")
#: The second form is that of the documentation.
_TIME_PLACEHOLDER = re.compile(r"\{\{\$\.pipeline_job_schedule_time_utc(_placeholder)?\}\}")


class Schedules:
    """Answers the calls of ScheduleService; `schedules` has them by name."""

    def __init__(self, pipelines: PipelineJobs, number: Callable[[], int]) -> None:
        self.schedules: dict[str, Schedule] = {}
        self._pipelines = pipelines
        self._number = number

    def create_schedule(self, request: schedule_service.CreateScheduleRequest) -> Schedule:
        parent = location(request.parent)
        schedule = Schedule(request.schedule)
        for field in _OUTPUT_ONLY:
            Schedule.pb(schedule).ClearField(field)
        self._check(schedule, parent)
        schedule.name = f"{parent}/schedules/{self._number()}"
        schedule.state = Schedule.State.ACTIVE
        schedule.create_time = schedule.update_time = now()
        if schedule.start_time is None:
            schedule.start_time = schedule.create_time
        _set_next_run(schedule)
        self.schedules[schedule.name] = schedule
        return schedule

    def list_schedules(self, request: schedule_service.ListSchedulesRequest) -> Any:
        parent = location(request.parent)
        found = [item for item in self.schedules.values() if item.name.startswith(f"{parent}/")]
        if request.filter == "create_pipeline_job_request:*":
            found = [item for item in found if "create_pipeline_job_request" in item]
        items, token = page(sorted(found, key=lambda item: item.create_time, reverse=True), request)
        return schedule_service.ListSchedulesResponse(schedules=items, next_page_token=token)

    def pause_schedule(self, request: schedule_service.PauseScheduleRequest) -> empty_pb2.Empty:
        schedule = self._in_state(request.name, Schedule.State.ACTIVE)
        schedule.state = Schedule.State.PAUSED
        schedule.last_pause_time = schedule.update_time = now()
        return empty_pb2.Empty()

    def resume_schedule(self, request: schedule_service.ResumeScheduleRequest) -> empty_pb2.Empty:
        schedule = self._in_state(request.name, Schedule.State.PAUSED)
        schedule.state = Schedule.State.ACTIVE
        schedule.last_resume_time = schedule.update_time = now()
        _set_next_run(schedule)
        return empty_pb2.Empty()

    def delete_schedule(self, request: schedule_service.DeleteScheduleRequest) -> operations_pb2.Operation:
        schedule = find(self.schedules, request.name)
        del self.schedules[schedule.name]
        return done(f"{schedule.name}/operations/{self._number()}")

    def fire(self, name: str, at: datetime.datetime) -> PipelineJob | None:
        """Does what a schedule does at one of its times.

        Returns:
            The job that was made; None where the schedule has not started, is paused, has ended, or is at its
            limit (the run is then skipped).
        """
        schedule = find(self.schedules, name)
        if schedule.state != Schedule.State.ACTIVE or at.timestamp() < schedule.start_time.timestamp():
            return None
        ended = schedule.end_time is not None and at.timestamp() >= schedule.end_time.timestamp()
        if ended or 0 < schedule.max_run_count <= schedule.started_run_count:
            schedule.state = Schedule.State.COMPLETED
            return None
        schedule.next_run_time = next(_fire_times(schedule.cron, at))
        limit = schedule.max_concurrent_active_run_count
        if limit and self._pipelines.active(schedule.name) >= limit:
            return None
        return self._start(schedule, at)

    def _start(self, schedule: Schedule, at: datetime.datetime) -> PipelineJob | None:
        request = schedule.create_pipeline_job_request
        text = json.dumps(as_json(request.pipeline_job))
        time = at.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        content = json.loads(_TIME_PLACEHOLDER.sub(time, text))
        job = PipelineJob(json_format.ParseDict(content, PipelineJob.pb(PipelineJob())))
        spec = content.get("pipeline_spec") or self._pipelines.resolve_template(job.template_uri)[0]
        json_format.ParseDict(spec, PipelineJob.pb(job).pipeline_spec)
        stem = f"{spec['pipelineInfo']['name']}-{at.astimezone(datetime.UTC):%Y%m%d%H%M%S}-{self._number()}"
        parent = "/".join(schedule.name.split("/")[:4])
        job.name = f"{parent}/pipelineJobs/{request.pipeline_job_id or stem}"
        job.schedule_name = schedule.name
        schedule.last_scheduled_run_response.scheduled_run_time = at
        try:
            self._pipelines.start(job)
        except ApiError as error:
            schedule.last_scheduled_run_response.run_response = str(error)
            return None
        schedule.last_scheduled_run_response.run_response = "OK"
        schedule.started_run_count += 1
        if 0 < schedule.max_run_count <= schedule.started_run_count:
            schedule.state = Schedule.State.COMPLETED
        return job

    def _in_state(self, name: str, state: Schedule.State) -> Schedule:
        """Returns a schedule, or answers FAILED_PRECONDITION where it is in another state."""
        schedule = find(self.schedules, name)
        if schedule.state != state:
            words = f"Schedule {schedule.name!r} is {schedule.state.name}, not {state.name}."
            raise ApiError(code_pb2.FAILED_PRECONDITION, words)
        return schedule

    def _check(self, schedule: Schedule, parent: str) -> None:
        request = schedule.create_pipeline_job_request
        faults = list(pipeline_faults(as_json(request.pipeline_job)))
        if location(request.parent) != parent or schedule.max_concurrent_run_count < 1:
            faults.append("schedule: its requests are of its location, and max_concurrent_run_count positive")
        refuse(*faults)


def _fire_times(cron: str, after: datetime.datetime) -> Iterator[datetime.datetime]:
    """Yields when a schedule fires after a time, in UTC."""
    zone, fields = _ZONED.fullmatch(cron).groups()  # type: ignore[union-attr]
    for time in CronSim(fields, after.astimezone(zoneinfo.ZoneInfo(zone or "UTC"))):
        yield time.astimezone(datetime.UTC)


def _set_next_run(schedule: Schedule) -> None:
    after = max(now().timestamp(), schedule.start_time.timestamp())
    times = _fire_times(schedule.cron, datetime.datetime.fromtimestamp(after, datetime.UTC))
    schedule.next_run_time = next(times)
