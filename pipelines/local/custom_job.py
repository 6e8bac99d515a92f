"""The process that stands in for the GCPC launcher: `python -m shardline.pipelines.local.custom_job`.

`localize` puts it into the pipeline in the launcher's place, with the launcher's own arguments.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from shardline.components.run_record import REPLICAS, RUN_VARIABLE
from shardline.pipelines.local import processes
from shardline.pipelines.local.job import parse_payload
from shardline.pipelines.local.rehearsal import parse_injection
from shardline.pipelines.local.supervisor import run_job
from shardline.trainer import files, progress

#: Process id of the process that executes the pipeline, in its environment.
EXECUTOR_VARIABLE = "SHARDLINE_EXECUTOR_PID"
#: Failures to rehearse, separated by spaces, in the environment.
INJECTIONS_VARIABLE = "SHARDLINE_INJECT"
#: In the run directory, what stands in for /gcs/.
GCS_DIRECTORY = "gcs"

_TOPIC = "train"


def main(argv: list[str] | None = None) -> None:
    """Runs the custom job of the launcher's arguments and ends as the job ends."""
    executor = os.environ.get(EXECUTOR_VARIABLE)
    processes.die_with_parent(int(executor) if executor else None)
    options = _parse(argv)
    resources = Path(options.gcp_resources)
    task_directory = resources.parent
    run = Path(os.environ.get(RUN_VARIABLE, task_directory))
    with processes.adopted_orphans(), progress.errors_end_the_process(_TOPIC):
        job = parse_payload(options.payload, options.executor_input)
        try:
            run_job(
                job,
                run / REPLICAS / task_directory.name,
                topic=_TOPIC,
                show_line=_print_line,
                injections=[
                    parse_injection(text) for text in os.environ.get(INJECTIONS_VARIABLE, "").split()
                ],
                gcs_root=run / GCS_DIRECTORY,
            )
        finally:
            processes.stop_descendants(0)  # of a replica whose guardian was killed
        resources.parent.mkdir(parents=True, exist_ok=True)
        # What the real launcher writes when it has created nothing in the cloud.
        files.write_json(resources, {"resources": []})


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--executor_input", required=True)
    parser.add_argument("--payload", required=True)
    parser.add_argument("--gcp_resources", required=True)
    for ignored in ("--marker", "--type", "--project", "--location"):
        parser.add_argument(ignored)
    return parser.parse_args(argv)


def _print_line(name: str, line: str) -> None:
    print(f"{name} | {line}", flush=True)


if __name__ == "__main__":
    main()
