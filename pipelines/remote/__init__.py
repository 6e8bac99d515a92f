"""Vertex AI Pipelines: submission, uploads and schedules.

It may import the specs, settings and rules of `pipelines`.
"""

from shardline.pipelines.remote.schedules import (
    SCHEDULES_TABLE,
    SchedulePlan,
    apply_plan,
    delete_schedules,
    list_schedules,
    load_schedules,
    next_run,
    plan_schedule,
    schedule_request,
)
from shardline.pipelines.remote.submit import (
    continue_parameters,
    download_pipeline,
    job_request,
    request_summary,
    upload_pipeline,
)

__all__ = [
    "SCHEDULES_TABLE",
    "SchedulePlan",
    "apply_plan",
    "continue_parameters",
    "delete_schedules",
    "download_pipeline",
    "job_request",
    "list_schedules",
    "load_schedules",
    "next_run",
    "plan_schedule",
    "request_summary",
    "schedule_request",
    "upload_pipeline",
]
