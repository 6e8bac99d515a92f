"""Stands for the platform between kfp.local and the launcher: `python -m tests.contract.fake.launch`.

kfp.local starts it where the compiled pipeline has the launcher. It does to the payload what the backend
does and kfp.local does not, and then becomes the launcher, as it is, with the launcher's own arguments.
"""

from __future__ import annotations

import json
import os
import sys

from pipelines.local.job import EXECUTOR_INPUT_MARKER
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import LOCATION
from tests.helpers.payloads import whole

_LAUNCHER = "google_cloud_pipeline_components.container.v1.custom_job.launcher"


def main(arguments: list[str]) -> None:
    """Becomes the launcher."""
    options = {
        name: arguments[index + 1] for index, name in enumerate(arguments[:-1]) if name.startswith("--")
    }
    executor_input = json.dumps(options["--executor_input"])[1:-1]
    # Protobuf's numbers are doubles; the backend writes whole ones without a point.
    payload = json.dumps(whole(json.loads(options["--payload"])))
    options |= {
        "--payload": payload.replace(EXECUTOR_INPUT_MARKER, executor_input),
        "--project": PROJECT,
        "--location": LOCATION,
    }
    passed = ("--type", "--payload", "--project", "--location", "--gcp_resources")
    command = [sys.executable, "-u", "-m", _LAUNCHER]
    os.makedirs(os.path.dirname(options["--gcp_resources"]), exist_ok=True)
    os.execv(sys.executable, [*command, *(item for name in passed for item in (name, options[name]))])


if __name__ == "__main__":
    main(sys.argv[1:])
