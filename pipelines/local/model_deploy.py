"""Stand-in for GCPC's launchers after an upload: `python -m shardline.pipelines.local.model_deploy`.

`localize` puts it into the pipeline in the place of those that make an endpoint, deploy a model and predict a
batch, with the launcher's own arguments. It says what would be done; nothing leaves this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google_cloud_pipeline_components.container.utils.artifact_utils import update_output_artifact

from shardline.components.vertex.payload import read_payload
from shardline.trainer import files
from shardline.trainer.errors import PipelineError
from shardline.trainer.progress import errors_end_the_process, say

_TOPIC = "deploy"


def main(argv: list[str] | None = None) -> None:
    """Checks the request of the launcher's arguments and says what it is."""
    options = _parse(argv)
    with errors_end_the_process(_TOPIC):
        try:
            request = read_payload(options.payload)
        except ValueError as error:
            raise PipelineError(
                f"the payload of {options.type} is not JSON: {error}; is there a quote in a text?"
            ) from None
        say(_TOPIC, f"a local run: {_WORDS[options.type](request)}")
        resources = Path(options.gcp_resources)
        resources.parent.mkdir(parents=True, exist_ok=True)
        # What the real launchers write when they have created nothing in the cloud.
        files.write_json(resources, {"resources": []})
        if options.type == "CreateEndpoint":
            name = {"resourceName": f"a new endpoint {request['display_name']!r}"}
            update_output_artifact(options.executor_input, "endpoint", "local:not-made", name)


def _endpoint(request: Mapping[str, Any]) -> str:
    return f"no endpoint {request['display_name']!r} is made; on Vertex AI it would be"


def _deployment(request: Mapping[str, Any]) -> str:
    machines = request["deployed_model"]["dedicated_resources"]
    count = f"{machines['min_replica_count']} to {machines['max_replica_count']}"
    where = f"to {request['endpoint']}, on {count} {machines['machine_spec']['machine_type']}"
    return f"the model is not deployed; on Vertex AI it would be, {where}"


def _prediction(request: Mapping[str, Any]) -> str:
    sources = ", ".join(request["input_config"]["gcs_source"]["uris"])
    target = request["output_config"]["gcs_destination"]["output_uri_prefix"]
    return f"nothing is predicted; on Vertex AI {sources} would be, into {target}"


#: What is said of a request, by the launcher's --type.
_WORDS = {"CreateEndpoint": _endpoint, "DeployModel": _deployment, "BatchPredictionJob": _prediction}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--executor_input", required=True)
    parser.add_argument("--payload", required=True)
    parser.add_argument("--gcp_resources", required=True)
    parser.add_argument("--type", required=True, choices=tuple(_WORDS))
    for ignored in ("--marker", "--project", "--location"):
        parser.add_argument(ignored)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
