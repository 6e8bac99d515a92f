"""Stubs for GCPC's launchers and for containers: `python -m shardline.pipelines.local.launcher_stubs NAME`.

`localize` replaces each launcher in the pipeline by a stub with the same arguments; NAME is the launcher's
--type. Custom jobs and tuning jobs run here. The other stubs only report what would be done: nothing leaves
this machine. With the NAME Container, the command of a container component runs as a process
of the user who runs the pipeline, without an image and without isolation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shardline.components.custom_job import mapping_at
from shardline.components.runs import RunDirectory
from shardline.pipelines.local import process
from shardline.pipelines.local.job import parse_injection, parse_payload, read_request, run_job
from shardline.trainer.base import files
from shardline.trainer.base.errors import RunError
from shardline.trainer.base.progress import exit_on_error, report

#: Content of a launcher's gcp_resources.
Resources = list[dict[str, str]]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the stub of a launcher with the launcher's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("name", choices=tuple(STUBS))
    parser.add_argument("--executor_input", required=True)
    for option in ("--payload", "--gcp_resources"):
        parser.add_argument(option, default="")
    for ignored in ("--marker", "--type", "--project", "--location", "--parent_model_name"):
        parser.add_argument(ignored)
    parser.add_argument("--network", default="auto")
    parser.add_argument("--inject", type=parse_injection, action="append", default=[])
    options = parser.parse_args(argv)
    topic, stub = STUBS[options.name]
    with exit_on_error(topic):
        with process.adopted_orphans(0):  # of a replica whose guardian was killed
            resources = stub(options)
        if options.gcp_resources:
            path = Path(options.gcp_resources)
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(path, {"resources": resources or []})  # as of launchers that create nothing


def _custom_job(options: argparse.Namespace) -> None:
    job, logs = parse_payload(options.payload, options.executor_input), _logs(options)
    run_job(job, logs, show_line=_print_line, injections=options.inject, network=options.network)


def _tuning_job(options: argparse.Namespace) -> Resources:
    from shardline.pipelines.local.job.tuning import run_tuning_job

    payload, logs = read_request(options.payload, options.name), _logs(options)
    job = Path(options.gcp_resources).with_name("tuning_job.json")
    run_tuning_job(payload, options.executor_input, logs, job, show_line=_print_line, network=options.network)
    return [{"resourceType": "HyperparameterTuningJob", "resourceUri": job.absolute().as_uri()}]


def _logs(options: argparse.Namespace) -> Path:
    """Returns the directory for the replicas' logs, and sets their local directory for /gcs/."""
    task = Path(options.gcp_resources).parent
    run = RunDirectory(Path(os.environ.get(RunDirectory.VARIABLE, task)))
    os.environ.setdefault(files.GCS_ROOT_VARIABLE, str(run.buckets))
    return run.replicas / task.name


def _print_line(name: str, line: str) -> None:
    print(f"{name} | {line}", flush=True)


def _leave_out(options: argparse.Namespace) -> None:
    request = read_request(options.payload or "{}", options.name)
    name = str(request.get("display_name") or mapping_at(request, "deployed_model").get("display_name") or "")
    of = f" of {name!r}" if name else ""
    report(STUBS[options.name][0], f"a local run leaves out {options.name}{of}; on Vertex AI it would run")
    if artifact := _ARTIFACTS.get(options.name):
        from google_cloud_pipeline_components.container.utils import artifact_utils

        # Without a resourceName: later tasks see that there is no such resource.
        artifact_utils.update_output_artifact(options.executor_input, artifact, f"local:no-{artifact}", {})


#: Output artifacts of launchers that create a resource.
_ARTIFACTS = {"UploadModel": "model", "CreateEndpoint": "endpoint"}
#: Topic and function of each stub, by the launcher's --type.
STUBS: dict[str, tuple[str, Callable[[argparse.Namespace], Resources | None]]] = {
    "CustomJob": ("train", _custom_job),
    "HyperparameterTuningJob": ("tune", _tuning_job),
    "UploadModel": ("register", _leave_out),
    "VertexNotificationEmail": ("exit-handler", _leave_out),
    **dict.fromkeys(("CreateEndpoint", "DeployModel", "BatchPredictionJob"), ("deploy", _leave_out)),
}


def _exec_container(executor_input: str, *command: str) -> None:
    outputs = json.loads(executor_input).get("outputs", {})
    artifacts = outputs.get("artifacts", {})
    paths = [item["uri"] for listed in artifacts.values() for item in listed["artifacts"]]
    paths += [item["outputFile"] for item in outputs.get("parameters", {}).values()]
    if artifacts:
        paths.append(outputs["outputFile"])
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if artifacts:  # kfp.local reads them
        files.write_json(Path(outputs["outputFile"]), {"artifacts": artifacts})
    report("container", f"runs {command[0]} of this machine, without an image")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise RunError(f"cannot run {command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    if sys.argv[1:2] == ["Container"]:
        with exit_on_error("container"):
            _exec_container(*sys.argv[3:])  # after the marker
    else:
        main()
