"""What the Vertex AI API receives of a compiled custom job, as backend and launcher make it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from shardline.trainer.base.deserialize import restore_integers

_PARAMETER = re.compile(r"\{\{\$\.inputs\.parameters\['(\w+)'\]\}\}")


def payload(spec: Mapping[str, Any], executor_input: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """Returns the launcher's --payload as the backend fills it in from the component's defaults.

    Args:
        spec: A compiled pipeline whose only container is the custom job's.
        executor_input: Of the task.
        known: Values of the platform's placeholders, by `{{$.NAME}}`; empty for those that are missing.
    """
    (component,) = (item for item in spec["components"].values() if "executorLabel" in item)
    arguments = spec["deploymentSpec"]["executors"][component["executorLabel"]]["container"]["args"]
    template = arguments[arguments.index("--payload") + 1]
    declared = component["inputDefinitions"]["parameters"]

    def paste(match: re.Match[str]) -> str:
        value = declared[match.group(1)].get("defaultValue")
        return value if isinstance(value, str) else json.dumps(restore_integers(value), ensure_ascii=False)

    text = _PARAMETER.sub(paste, template)
    escaped = json.dumps(json.dumps(executor_input, ensure_ascii=False), ensure_ascii=False)[1:-1]
    known = {"{{$.json_escape[1]}}": escaped, **known}
    return re.sub(r"\{\{\$\..*?\}\}", lambda match: known.get(match.group(), ""), text)


def received(text: str) -> Any:
    """Returns the CustomJob (protobuf) that the launcher's client sends for a payload.

    By both ways in which a mapping becomes a message: JSON's own, and that of the launcher's client.
    """
    from google.cloud.aiplatform_v1.types import custom_job, job_service
    from google_cloud_pipeline_components.container.v1.custom_job import remote_runner
    from google_cloud_pipeline_components.container.v1.gcp_launcher.utils import json_util

    content = json_util.recursive_remove_empty(
        json.loads(remote_runner.insert_system_labels_into_payload(text), strict=False)
    )
    if content["job_spec"]["scheduling"]["strategy"] != "FLEX_START":
        del content["job_spec"]["scheduling"]["max_wait_duration"]
    job = json_format.ParseDict(content, custom_job.CustomJob.pb(custom_job.CustomJob()))
    request = job_service.CreateCustomJobRequest(custom_job=content)
    assert custom_job.CustomJob.pb(request.custom_job) == job
    return job
