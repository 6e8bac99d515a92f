"""Vertex Experiments: adds a run to an experiment, whose page compares metrics and parameters.

The contexts are those of google.cloud.aiplatform (metadata/experiment_resources.py), whose own `init` makes a
TensorBoard instance, too: https://github.com/googleapis/python-aiplatform/issues/2298
"""

from __future__ import annotations

import time
from typing import Any

from shardline.components.runs.platform_run import PlatformRun
from shardline.components.vertex.client import Platform, call_api
from shardline.components.vertex.refusals import RefusalKind, refusal_kind
from shardline.trainer.base.errors import PlatformError

_SCHEMA = "system.Experiment"
#: Seconds in which the platform makes the context of a new run.
_CONTEXT_S = 120.0


def add_run(platform: Platform, experiment: str, run: PlatformRun) -> None:
    """Adds a run to an experiment, which is made where there is none.

    Raises PlatformError when the platform refuses, or the name is that of another context.
    """
    action, until = f"add the run to the experiment {experiment}", time.monotonic() + _CONTEXT_S
    read, name = platform.pipelines.get_pipeline_job, {"name": run.name}
    while not (context := call_api(action, read, name).job_detail.pipeline_run_context.name):
        if time.monotonic() > until:
            raise PlatformError(f"cannot {action}: the platform has made no context of the run")
        time.sleep(1.0)
    store, api = context.partition("/contexts/")[0], platform.metadata
    content: dict[str, Any] = {"display_name": experiment, "schema_title": _SCHEMA, "schema_version": "0.0.1"}
    content["metadata"] = {"experiment_deleted": False}
    request = {"parent": store, "context_id": experiment, "context": content}
    try:
        found = call_api(action, api.create_context, request)
    except PlatformError as error:
        if refusal_kind(error.__cause__) is not RefusalKind.CONFLICT:
            raise
        found = call_api(action, api.get_context, {"name": f"{store}/contexts/{experiment}"})
    if found.schema_title != _SCHEMA or "tensorboard_link" in found.metadata:
        raise PlatformError(f"cannot {action}: {found.name} is a {found.schema_title} that takes no runs")
    call_api(action, api.add_context_children, {"context": found.name, "child_contexts": [context]})
