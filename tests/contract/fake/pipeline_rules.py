"""What the documentation says of a PipelineJob and of a Schedule, as the API would check it.

Sources: the comments in google/cloud/aiplatform/v1/pipeline_job.proto, pipeline_service.proto and
schedule.proto. Where they leave it open the fake refuses, so that clients do not depend on it.
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Iterator
from typing import Any

from cronsim import CronSim, CronSimError

from tests.contract.fake.api import now

_NUMBER = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    "STRING": (str,),
    "NUMBER_INTEGER": _NUMBER,
    "NUMBER_DOUBLE": _NUMBER,
    "BOOLEAN": (bool,),
    "LIST": (list,),
    "STRUCT": (dict,),
}
_TEMPLATE = r"https://[a-z]+-[a-z]+\d-kfp\.pkg\.dev/[^/]+/[^/]+/[^/]+/(sha256:[0-9a-f]{64}|[\w.-]+)"
_KEY = r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+"
_ZONED = re.compile(r"(?:(?:CRON_)?TZ=(\S+)\s+)?(.*)")


def job_faults(job: dict[str, Any], job_id: str = "") -> Iterator[str]:
    """Yields what is wrong with a pipeline job (as JSON with the fields' own names) and its id."""
    if job_id and not re.fullmatch(r"[a-z][a-z0-9-]{0,126}", job_id):
        yield f"pipeline_job_id: {job_id!r} must match [a-z][a-z0-9-]{{0,126}}"
    if len(job.get("display_name", "")) > 128:
        yield "display_name: at most 128 characters"
    yield from _label_faults(job.get("labels", {}))
    output = job.get("runtime_config", {}).get("gcs_output_directory", "")
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/.*)?", output):
        yield f"runtime_config.gcs_output_directory: must be gs://BUCKET/..., got {output!r}"
    forms = {
        "service_account": r"[^@\s]+@[^@\s]+\.gserviceaccount\.com",
        "network": r"projects/\d+/global/networks/[^/]+",
        "template_uri": _TEMPLATE,
    }
    for field, form in forms.items():
        if job.get(field) and not re.fullmatch(form, job[field]):
            yield f"{field}: {job[field]!r} does not have the form {form}"
    key = job.get("encryption_spec", {}).get("kms_key_name", "")
    if key and not re.fullmatch(_KEY, key):
        yield f"encryption_spec.kms_key_name: {key!r} does not have the form {_KEY}"
    if job.get("pipeline_spec"):
        yield from _spec_faults(job)
    elif not job.get("template_uri"):
        yield "pipeline_spec: is required where there is no template_uri"


def schedule_faults(schedule: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with a schedule (as JSON with the fields' own names)."""
    if not 1 <= len(schedule.get("display_name", "")) <= 128:
        yield "display_name: must have 1 to 128 characters"
    if int(schedule.get("max_concurrent_run_count", 0)) < 1:
        yield "max_concurrent_run_count: must be positive"
    for field in ("max_run_count", "max_concurrent_active_run_count"):
        if int(schedule.get(field, 0)) < 0:
            yield f"{field}: must not be negative"
    if not schedule.get("cron"):
        yield "cron: is required"
    else:
        yield from cron_faults(schedule["cron"])
    if "end_time" in schedule and "start_time" in schedule and schedule["end_time"] <= schedule["start_time"]:
        yield "end_time: must be after start_time"
    if "create_pipeline_job_request" not in schedule:
        yield "request: is required"
        return
    request = schedule["create_pipeline_job_request"]
    yield from (
        f"create_pipeline_job_request.pipeline_job.{fault}"
        for fault in job_faults(request.get("pipeline_job", {}))
    )


def cron_faults(cron: str) -> Iterator[str]:
    """Yields what is wrong with a cron expression and its time zone."""
    zone, fields = _ZONED.fullmatch(cron).groups()  # type: ignore[union-attr]
    if zone and zone not in zoneinfo.available_timezones():
        yield f"cron: unknown time zone {zone!r}"
    elif len(fields.split()) != 5:
        yield f"cron: {fields!r} does not have five fields"
    else:
        try:
            CronSim(fields, now())
        except CronSimError as error:
            yield f"cron: {error} in {fields!r}"


def fire_times(cron: str, after: Any) -> Iterator[Any]:
    """Yields when a schedule fires after a time, in UTC."""
    zone, fields = _ZONED.fullmatch(cron).groups()  # type: ignore[union-attr]
    for time in CronSim(fields, after.astimezone(zoneinfo.ZoneInfo(zone or "UTC"))):
        yield time.astimezone(zoneinfo.ZoneInfo("UTC"))


def _label_faults(labels: dict[str, str]) -> Iterator[str]:
    if len(labels) > 64:
        yield "labels: at most 64"
    for key, value in labels.items():
        if not re.fullmatch(r"[^\W\d_][\w-]{0,63}", key) or key != key.lower():
            yield f"labels: invalid key {key!r}"
        if not re.fullmatch(r"[\w-]{0,64}", value) or value != value.lower():
            yield f"labels: invalid value {value!r}"


def _spec_faults(job: dict[str, Any]) -> Iterator[str]:
    spec, config = job["pipeline_spec"], job.get("runtime_config", {})
    for name in ("pipelineInfo", "root", "deploymentSpec", "schemaVersion"):
        if name not in spec:
            yield f"pipeline_spec.{name}: is required"
    declared = spec.get("root", {}).get("inputDefinitions", {}).get("parameters", {})
    given = config.get("parameter_values", {})
    if config.get("parameters"):
        yield "runtime_config.parameters: not with schema 2.1.0"
    for name, value in given.items():
        if name not in declared:
            yield f"runtime_config.parameter_values: the pipeline has no parameter {name!r}"
        elif not _fits(value, declared[name].get("parameterType", "")):
            kind = declared[name].get("parameterType")
            yield f"runtime_config.parameter_values[{name!r}]: must be {kind}, got {value!r}"
    for name, declaration in declared.items():
        if name not in given and "defaultValue" not in declaration and not declaration.get("isOptional"):
            yield f"runtime_config.parameter_values: {name!r} is required"


def _fits(value: Any, kind: str) -> bool:
    if kind not in _TYPES:
        return True
    if kind != "BOOLEAN" and isinstance(value, bool):
        return False
    if kind == "NUMBER_INTEGER" and isinstance(value, float) and not value.is_integer():
        return False
    return isinstance(value, _TYPES[kind])
