"""Container component on this machine: its command becomes a process of whoever runs the pipeline.

`python -m shardline.pipelines.local.container` is that process. No image is involved, and nothing shields
this machine from the command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardline.pipelines.local.kfp_internals import MARKER
from shardline.trainer import files
from shardline.trainer.errors import RunError, SettingsError
from shardline.trainer.progress import errors_end_the_process, say


def as_process(command: Sequence[str]) -> list[str]:
    """Returns the command that runs a container's command here, once KFP has filled in its placeholders."""
    return ["python3", "-u", "-m", __name__, MARKER, "{{$}}", *command]


def main(executor_input: str, *command: str) -> None:
    """Makes the directories of the outputs, as the platform does, and becomes the command."""
    with errors_end_the_process("container"):
        if not command:
            raise SettingsError("takes MARKER EXECUTOR_INPUT COMMAND ..., as 'shardline run' gives them")
        _prepare_outputs(json.loads(executor_input).get("outputs", {}))
        say("container", f"runs {command[0]} of this machine, in no image")
        try:
            os.execvp(command[0], command)
        except OSError as error:
            raise RunError(f"cannot run {command[0]}: {error.strerror}") from None


def _prepare_outputs(outputs: Mapping[str, Any]) -> None:
    """Makes the directories for what the command writes, and tells kfp.local of the artifacts among it."""
    artifacts = outputs.get("artifacts", {})
    made = [item["uri"] for listed in artifacts.values() for item in listed["artifacts"]]
    made += [item["outputFile"] for item in outputs.get("parameters", {}).values()]
    for path in map(Path, made):
        path.parent.mkdir(parents=True, exist_ok=True)
    if artifacts:
        file = Path(outputs["outputFile"])
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(file, {"artifacts": artifacts})


if __name__ == "__main__":
    main(*sys.argv[2:])
