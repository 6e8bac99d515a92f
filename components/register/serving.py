"""A model as TensorFlow Serving takes it: its directory, its container, its description."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from shardline.components.export_validate import layout
from shardline.components.register.champion import read_part
from shardline.trainer.errors import ModelError, RunError

#: TensorFlow Serving serves only subdirectories whose name is a number.
VERSION_DIRECTORY = "1"

_NAME = "model"
_A_YEAR_S = 31_536_000


def lay_out(exported: Path, target: Path) -> None:
    """Copies an exported model to `target`/1.

    Args:
        exported: Output directory of a validation that ended with a blessing.
        target: Base path of the model for TensorFlow Serving; made if it is not there.

    Raises:
        ModelError: When `exported` holds no complete export.
        RunError: When copying fails.
    """
    read_part(exported, layout.EXPORT_FILE)
    saved_model = exported / layout.SAVED_MODEL
    if not saved_model.is_dir():
        raise ModelError(f"no {layout.SAVED_MODEL} in {exported}; validate the model again")
    try:
        # Contents only: a Cloud Storage mount keeps neither modes nor times.
        shutil.copytree(
            saved_model, target / VERSION_DIRECTORY, copy_function=shutil.copyfile, dirs_exist_ok=True
        )
    except OSError as error:
        raise RunError(
            f"cannot copy to {target}: {error.strerror or error}; upload the model again"
        ) from error


def container_spec(image_uri: str) -> dict[str, Any]:
    """Returns the ModelContainerSpec that serves a model over REST, in the API's camel case.

    The platform puts the directory of the model in AIP_STORAGE_URI, and sends requests to port 8080,
    which is its default. A deployed model never changes: the server need not look for a newer version.

    Source: https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements

    Args:
        image_uri: TensorFlow Serving.
    """
    return {
        "imageUri": image_uri,
        "command": ["/usr/bin/tensorflow_model_server"],
        "args": [
            "--port=8500",
            "--rest_api_port=8080",
            f"--model_name={_NAME}",
            "--model_base_path=$(AIP_STORAGE_URI)",
            f"--file_system_poll_wait_seconds={_A_YEAR_S}",
        ],
        "predictRoute": f"/v1/models/{_NAME}:predict",
        "healthRoute": f"/v1/models/{_NAME}",
    }


def describe(exported: Path, accuracy: float) -> str:
    """Returns one line on an exported model, for the registry.

    It is pasted between quotes into the launcher's payload, so it holds neither quotes nor backslashes.
    """
    export = read_part(exported, layout.EXPORT_FILE)
    return f"test accuracy {accuracy:.4f}, {export.get('parameters', 0):,} parameters, dataset " + str(
        export.get("fingerprint")
    )
