"""Parts of a pipeline that this machine does not have: found before anything runs, for any KFP pipeline."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardline.components.vertex.payload import at, list_at
from shardline.pipelines.check.pipeline import UNKNOWN_TEXT, Pipeline, Task
from shardline.pipelines.local.kfp_internals import EXECUTOR, local_artifact, split_installation
from shardline.pipelines.local.localize import stand_in
from shardline.trainer.errors import PipelineError

_GOOGLE = "google_cloud_pipeline_components.container"
_PYTHON = re.compile(r"(?:.*/)?python3?(?:\.\d+)?")
_SHELLS = ("sh", "bash", "dash", "zsh")


def require_parts(spec: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses a pipeline with tasks that cannot run here, in one line that names each and why.

    Args:
        spec: The compiled pipeline (IR).
        given: The pipeline parameters that will be passed.

    Raises:
        PipelineError: When there is such a task.
    """
    pipeline = Pipeline(spec, given)
    missing = [f"{item.where} {why}" for item in pipeline.executors if (why := _not_here(item.container))] + [
        f"{task.where} {why}" for task in pipeline.tasks for why in _not_imported(task)
    ]
    if missing:
        raise PipelineError(f"the pipeline cannot run here: {'; '.join(missing)}")


def _not_here(container: Mapping[str, Any]) -> str:
    """Returns why a container's command cannot run here; "" where it can."""
    image = container.get("image", "")
    if stand_in(container):
        return ""
    packages, command = split_installation(list_at(container, "command"))
    words = [*command, *list_at(container, "args")]
    if any(word.startswith(_GOOGLE) for word in words):
        return "asks the platform by way of a launcher of Google's without stand-in here"
    if command[:3] == ["python3", "-m", EXECUTOR]:
        return f"has its code in the image {image} only"
    if any(EXECUTOR in word for word in words):
        absent = [text for text in packages if not _is_installed(text)]
        return f"needs {', '.join(absent)}: pip install it first" if absent else ""
    if not command:
        return f"runs what the image {image} starts by itself, which only the image knows"
    program = _absent(words)
    return f"runs {program} of the image {image}, which is not on this machine" if program else ""


def _is_installed(requirement: str) -> bool:
    """Whether a requirement is met; KFP itself is, in the release that runs the pipeline."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(requirement)
        if wanted.name == "kfp" or (wanted.marker and not wanted.marker.evaluate()):
            return True
        return wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True)
    except (InvalidRequirement, importlib.metadata.PackageNotFoundError):
        return False


def _absent(words: Sequence[str]) -> str:
    """Returns what a command would look for in vain: its program, or the module or script given to it."""
    program, *rest = words
    if shutil.which(program) is None:
        return program
    python = _PYTHON.fullmatch(program) is not None
    for index, word in enumerate(rest):
        if word == "-c" or not (python or os.path.basename(program) in _SHELLS):
            return ""
        if word == "-m":
            module = "".join(rest[index + 1 : index + 2])
            return "" if _has_module(module) else f"{program} -m {module}"
        if not word.startswith("-"):
            return "" if "{{" in word or Path(word).is_file() else f"{program} {word}"
    return ""


def _has_module(name: str) -> bool:
    """Whether there is the package of a module; what is inside is not imported to look."""
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except ValueError:
        return False


def _not_imported(task: Task) -> Iterator[str]:
    """Yields why an importer's artifact cannot be read here; what only the run will know may be there."""
    label = str(task.component.get("executorLabel"))
    place = at(task.pipeline.spec, "deploymentSpec", "executors", label, "importer", "artifactUri")
    name = place.get("runtimeParameter")
    uri = task.value(str(name)) if name else place.get("constant")
    if isinstance(uri, str) and UNKNOWN_TEXT not in uri and "{{" not in uri:
        path = local_artifact(uri)
        if path and not path.exists() and not _follows(task) and _is_read(task):
            yield f"imports {uri}, which is not on this machine"


def _follows(task: Task) -> bool:
    """Whether other tasks end before a task begins, which may write what it reads."""
    return bool(task.spec.get("dependentTasks")) or (task.parent is not None and _follows(task.parent))


def _is_read(importer: Task) -> bool:
    """Whether a task may read what is imported: the stand-ins of launchers do not."""
    return any(
        at(item, "taskOutputArtifact").get("producerTask") == importer.name and not stand_in(task.container)
        for task in importer.pipeline.tasks
        if task.siblings is importer.siblings
        for item in task.inputs("artifacts").values()
    )
