"""The request that starts a run, as JSON: what is shown is what is sent."""

from __future__ import annotations

import copy
import datetime
import re
import secrets
from collections.abc import Mapping
from typing import Any

from shardline.pipelines.vertex.environment import Environment, check_labels
from shardline.trainer.errors import PipelineError, SettingsError

#: google.cloud.aiplatform_v1.types.CreatePipelineJobRequest.pipeline_job_id.
_JOB_ID = re.compile(r"[a-z][-a-z0-9]{0,126}")
_LONGEST_ID = 127
_LONGEST_NAME = 128
_OLDEST_SCHEMA = (2, 1)


def job_request(
    environment: Environment,
    spec: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    job_id: str = "",
    labels: Mapping[str, str] | None = None,
    enable_caching: bool | None = None,
    template_uri: str = "",
) -> dict[str, Any]:
    """Returns a CreatePipelineJobRequest in the API's JSON form.

    Args:
        environment: Where, in whose name, and with which labels.
        spec: The compiled pipeline (IR).
        parameters: Checked values (`check_parameters`), without those that keep their default.
        job_id: Id of the run; "" leaves it out, as a schedule's request must.
        labels: Of this run, beside the environment's.
        enable_caching: For every task; None leaves it to each.
        template_uri: Where in the registry the pipeline came from.

    Raises:
        SettingsError: When there is no pipeline root, or a label or the id has not the form that it needs.
        PipelineError: When the pipeline is of a form that takes parameters in another way, or has a name that
            breaks the launcher of custom jobs.
    """
    _check_spec(spec)
    job = {
        "displayName": spec["pipelineInfo"]["name"],
        "pipelineSpec": spec if enable_caching is None else with_caching(spec, enable_caching),
        "labels": merge_labels(environment, labels or {}),
        "runtimeConfig": {
            "gcsOutputDirectory": _root(environment, spec),
            "parameterValues": dict(parameters),
        },
        "serviceAccount": environment.service_account,
        "network": environment.network,
        "encryptionSpec": {"kmsKeyName": environment.encryption_spec_key_name}
        if environment.encryption_spec_key_name
        else {},
        "templateUri": template_uri,
    }
    request = {"parent": environment.parent, "pipelineJob": {key: job[key] for key in job if job[key]}}
    if job_id:
        check_job_id(job_id)
        request["pipelineJobId"] = job_id
    return request


def new_job_id(name: str, now: datetime.datetime | None = None) -> str:
    """Returns an id that no other run has: NAME-YYYYMMDDhhmmss-6hex.

    The SDK's own end with the second, and collide within it.

    Args:
        name: Name of the pipeline.
        now: Time; the present one unless given.
    """
    moment = (now or datetime.datetime.now(datetime.UTC)).strftime("%Y%m%d%H%M%S")
    end = f"-{moment}-{secrets.token_hex(3)}"
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    word = word if word[:1].isalpha() else f"run-{word}".rstrip("-")
    return word[: _LONGEST_ID - len(end)].rstrip("-") + end


def check_job_id(job_id: str) -> None:
    """Checks the form of a run's id.

    Raises:
        SettingsError: When it has another.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise SettingsError(
            f"a run's id must begin with a letter, and have lower-case letters, digits and - only, "
            f"{_LONGEST_ID} at most, got {job_id!r}"
        )


def merge_labels(environment: Environment, labels: Mapping[str, str]) -> dict[str, str]:
    """Returns the labels of an environment and of a run, checked.

    Raises:
        SettingsError: When one has not the form that it needs.
    """
    merged = {**environment.labels, **labels}
    check_labels(merged)
    return merged


def with_caching(spec: Mapping[str, Any], enabled: bool) -> dict[str, Any]:
    """Returns a pipeline with caching on, or off, in every task."""
    changed = copy.deepcopy(dict(spec))
    for component in (changed["root"], *changed["components"].values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            task["cachingOptions"] = {"enableCache": True} if enabled else {}
    return changed


def _root(environment: Environment, spec: Mapping[str, Any]) -> str:
    return environment.pipeline_root or spec.get("defaultPipelineRoot") or environment.need("pipeline_root")


def _check_spec(spec: Mapping[str, Any]) -> None:
    name = spec["pipelineInfo"]["name"]
    if '"' in name or len(name) > _LONGEST_NAME:
        raise PipelineError(
            f"the pipeline is called {name[:80]!r}; a name may have {_LONGEST_NAME} characters, none of them "
            'a ", which breaks what its custom jobs are launched with: give another in @dsl.pipeline'
        )
    version = str(spec.get("schemaVersion", ""))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST_SCHEMA:
        raise PipelineError(
            f"the pipeline has schema version {version or 'none'}; compile it with KFP 2, which writes 2.1.0"
        )
