"""Stands for the platform between kfp.local and the launcher: `python -m tests.contract.fake.launch`.

kfp.local starts it where the compiled pipeline has the launcher. It does to the payload what the backend
does and kfp.local does not, and then becomes the launcher, as it is, with the launcher's own arguments.
"""

from __future__ import annotations

import json
import os
import sys

from shardline.pipelines.local.job import EXECUTOR_INPUT_MARKER
from shardline.trainer.base.deserialize import restore_integers
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import BUCKET, LOCATION

#: Launchers by the --type that GCPC gives them, and what they take beside what all take.
_LAUNCHERS = {
    "CustomJob": ("custom_job", ()),
    "UploadModel": ("model.upload_model", ("--executor_input",)),
}
_PASSED = ("--type", "--payload", "--project", "--location", "--gcp_resources")
_OPTIONAL = ("--parent_model_name",)


def main(arguments: list[str]) -> None:
    """Becomes the launcher."""
    options = {
        name: arguments[index + 1] for index, name in enumerate(arguments[:-1]) if name.startswith("--")
    }
    # Launchers that give no artifacts are not told of any.
    options.setdefault("--executor_input", "{}")
    executor_input = json.dumps(options["--executor_input"])[1:-1]
    # Protobuf's numbers are doubles; the backend writes whole ones without a point.
    payload = json.dumps(restore_integers(json.loads(options["--payload"])))
    options |= {
        "--executor_input": _stored(options["--executor_input"]),
        "--payload": payload.replace(EXECUTOR_INPUT_MARKER, executor_input),
        "--project": PROJECT,
        "--location": LOCATION,
    }
    launcher, own = _LAUNCHERS[options["--type"]]
    passed = [*_PASSED, *own, *(name for name in _OPTIONAL if name in options)]
    module = f"google_cloud_pipeline_components.container.v1.{launcher}.launcher"
    command = [sys.executable, "-u", "-m", module]
    os.makedirs(os.path.dirname(options["--gcp_resources"]), exist_ok=True)
    os.execv(sys.executable, [*command, *(item for name in passed for item in (name, options[name]))])


def _stored(executor_input: str) -> str:
    """Returns a task's executor input with its input artifacts in Cloud Storage instead of here."""
    content = json.loads(executor_input)
    for artifacts in content.get("inputs", {}).get("artifacts", {}).values():
        for artifact in artifacts["artifacts"]:
            if artifact["uri"].startswith("/"):
                artifact["uri"] = f"gs://{BUCKET}{artifact['uri']}"
    return json.dumps(content)


if __name__ == "__main__":
    main(sys.argv[1:])
