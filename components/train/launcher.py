"""Launcher of a job with alternatives of machines, like GCPC's; --fallback is `CustomJobSettings.choices`.

gcp_resources lists the choices that were tried, the one in use last; those before it have an error. A
restarted launcher continues with the last. No job begins before the one before it has ended: both write the
same checkpoints.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardline.components.runs.causes import is_shortage
from shardline.components.vertex.client import Platform, call_api, list_all
from shardline.components.vertex.forms import seconds
from shardline.components.vertex.payload import read_payload
from shardline.trainer.base import files
from shardline.trainer.base.errors import PlatformError
from shardline.trainer.base.progress import exit_on_error, report
from shardline.trainer.cluster.cluster import ACCELERATORS_VARIABLE

#: Seconds between two reads of a job, and the exit code after a failed one: those of GCPC's launcher.
POLL_S, _EXIT_FAILED = 20.0, 13
#: Label of a job, by which a launcher finds what an earlier attempt of its task has created.
_LABEL = "shardline_launcher"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a job on the first of its choices of machines that the platform has."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for option in ("type", "project", "location", "payload", "gcp_resources", "fallback"):
        parser.add_argument(f"--{option}", required=True)
    options = parser.parse_args(argv)
    with exit_on_error("train"):
        from google_cloud_pipeline_components.container.v1.custom_job import remote_runner

        job = read_payload(remote_runner.insert_system_labels_into_payload(options.payload))
        path, choices = Path(options.gcp_resources), json.loads(options.fallback)
        path.parent.mkdir(parents=True, exist_ok=True)
        tried = files.read_json(path, PlatformError)["resources"] if path.is_file() else []
        while not (tried and _succeeds(tried, choices[len(tried) - 1], path)):
            ends = "".join(f"{each['labels']['machines']}: {each['error']['message']}; " for each in tried)
            if len(tried) == len(choices):
                raise PlatformError(f"no choice of machines was there: {ends}submit it again later")
            choice = choices[len(tried)]
            report("train", f"{ends}next: {choice['name']}")
            # SIGTERM waits until the new job is known, which it cancels.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            platform = Platform(options.project, choice["location"] or options.location)
            key = hashlib.sha256(f"{path} {len(tried)}".encode()).hexdigest()[:32]
            tried.append(_create(platform, on_machines(job, choice), choice["name"], key))
            files.write_json(path, {"resources": tried})


def on_machines(job: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a payload with the machines of a choice."""
    spec = copy.deepcopy(job["job_spec"])
    for pool, machine in zip(spec["worker_pool_specs"], choice["machines"], strict=True):
        if machine:  # None for an empty slot
            container = pool.setdefault("container_spec", {})
            env = [item for item in container.get("env", ()) if item["name"] != ACCELERATORS_VARIABLE]
            if kind := machine.get("accelerator_type"):
                found = f"{machine['accelerator_count']} {kind}"
                env.append({"name": ACCELERATORS_VARIABLE, "value": found})
            pool["machine_spec"], container["env"] = machine, env
    spec["scheduling"] = {**spec.get("scheduling", {}), "strategy": choice["strategy"]}
    if choice["strategy"] != "FLEX_START":  # the API refuses it with any other
        spec["scheduling"].pop("max_wait_duration", None)
    return {**job, "job_spec": spec}


def _create(platform: Platform, job: Mapping[str, Any], machines: str, key: str) -> dict[str, Any]:
    """Creates a job; returns its resource, with an error where the platform has no such machines.

    A job that has the label `key` has been created before, and the answer was lost.
    """
    labels = {"machines": machines, "location": platform.location}
    resource = {"resourceType": "CustomJob", "resourceUri": "", "labels": labels}
    job = {**job, "labels": {**job.get("labels", {}), _LABEL: key}}
    create, find = platform.jobs.create_custom_job, platform.jobs.list_custom_jobs
    wanted = {"parent": platform.parent, "filter": f'labels.{_LABEL}="{key}"'}
    if not (found := list_all("look for the training job", find, wanted)):
        request = {"parent": platform.parent, "custom_job": job}
        try:
            found = [call_api("create the training job", create, request, repeatable=False)]
        except PlatformError as error:
            if is_shortage(error.line):
                return resource | {"error": {"message": error.line}}
            if not (found := list_all("look for the training job", find, wanted)):
                raise
    return resource | {"resourceUri": f"https://{platform.host}/v1/{found[0].name}"}


def _succeeds(tried: list[dict[str, Any]], choice: Mapping[str, Any], path: Path) -> bool:
    """Waits for the end of the last job; returns whether it has succeeded, or the next one is due.

    Exits as GCPC's launcher does where it has failed for another reason than its machines.
    """
    from google_cloud_pipeline_components.container.utils.execution_context import ExecutionContext

    last, name = tried[-1], tried[-1]["resourceUri"].partition("/v1/")[2]
    if not name:
        return False
    jobs, request, limit = Platform.of_resource(name).jobs, {"name": name}, seconds(choice["wait"])
    since, state, refused = 0.0, "", None

    def cancel() -> None:
        call_api("cancel the training job", jobs.cancel_custom_job, request)

    with ExecutionContext(on_cancel=cancel):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        while state not in ("SUCCEEDED", "FAILED", "CANCELLED", "PAUSED", "EXPIRED"):
            time.sleep(POLL_S if state else 0.0)
            job = call_api("read the training job", jobs.get_custom_job, request, outage_s=900.0)
            state = job.state.name.removeprefix("JOB_STATE_")
            # After a preemption it waits anew.
            since = (since or time.time()) if state in ("QUEUED", "PENDING") else 0.0
            if "error" not in last and limit is not None and since and time.time() - since > limit:
                last["error"] = {"message": f"not there after {limit:,.0f} s"}
                files.write_json(path, {"resources": tried})
            if "error" in last and state in ("QUEUED", "PENDING", "RUNNING"):
                if refused:
                    raise refused
                try:
                    cancel()
                except PlatformError as error:  # it may have ended since it was read
                    refused = error
    message = " ".join(job.error.message.split()) or state.lower()
    preempted = choice["strategy"] == "SPOT" and "preempt" in message.lower()
    if "error" not in last and (state == "EXPIRED" or is_shortage(message) or preempted):
        last["error"] = {"message": message}
        files.write_json(path, {"resources": tried})
    elif "error" not in last and state != "SUCCEEDED":
        print(f"the training job {name} ended as {state}: {message}", file=sys.stderr)
        raise SystemExit(_EXIT_FAILED)
    return state == "SUCCEEDED"


if __name__ == "__main__":
    main()
