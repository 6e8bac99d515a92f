"""The process that stands in for GCPC's upload launcher: `python -m shardline.pipelines.local.model_upload`.

`localize` puts it into the pipeline in the launcher's place, with the launcher's own arguments. It says
what would be uploaded; nothing leaves this machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from google_cloud_pipeline_components.container.utils.artifact_utils import update_output_artifact

from shardline.trainer import files
from shardline.trainer.errors import PipelineError
from shardline.trainer.progress import errors_end_the_process, say

_TOPIC = "register"


def main(argv: list[str] | None = None) -> None:
    """Checks the request of the launcher's arguments and says what it is."""
    options = _parse(argv)
    with errors_end_the_process(_TOPIC):
        try:
            model = json.loads(options.payload, strict=False)
        except ValueError as error:
            raise PipelineError(
                f"the payload of the upload is not JSON: {error}; is there a quote in a text?"
            ) from None
        parent = options.parent_model_name
        what = f"as a new version of {parent}" if parent else "as a new model"
        say(
            _TOPIC,
            f"a local run: {model['display_name']!r} is not uploaded; on Vertex AI it would be, {what}",
        )
        resources = Path(options.gcp_resources)
        resources.parent.mkdir(parents=True, exist_ok=True)
        # What the real launcher writes when it has created nothing in the cloud.
        files.write_json(resources, {"resources": []})
        # Without a resourceName: what follows can tell that there is no such model.
        update_output_artifact(options.executor_input, "model", "local:not-uploaded")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--executor_input", required=True)
    parser.add_argument("--payload", required=True)
    parser.add_argument("--gcp_resources", required=True)
    parser.add_argument("--parent_model_name", default="")
    for ignored in ("--marker", "--type", "--project", "--location"):
        parser.add_argument(ignored)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
