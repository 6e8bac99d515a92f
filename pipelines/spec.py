"""A compiled pipeline, as it is read from its file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shardline.trainer.errors import PipelineError

#: Names of our own pipelines.
RETRAIN, TUNE = "retrain", "tune"

#: The parser's C code ends the process where a file is nested some 10,000 times; pipelines are 10 deep.
_DEEPEST = 200
#: Nodes of a file, aliases followed: some lines of YAML can stand for billions.
_MOST_NODES = 2_000_000


def load_pipeline(path: Path) -> dict[str, Any]:
    """Reads a compiled pipeline.

    Returns:
        The pipeline spec (IR) with root, components, deploymentSpec and pipelineInfo.

    Raises:
        PipelineError: When the file cannot be read or is no compiled pipeline.
    """
    return parse_pipeline(read_pipeline(path), path)


def read_pipeline(path: Path) -> bytes:
    """Returns the content of a pipeline's file.

    Raises:
        PipelineError: When it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise PipelineError(f"no pipeline {path}; write it with 'shardline compile'") from None
    except OSError as error:
        raise PipelineError(f"cannot read the pipeline {path}: {error.strerror}") from None


def read_documents(content: bytes | str, path: Path) -> list[Any]:
    """Returns the YAML documents in the content of the file `path`.

    Raises:
        PipelineError: When it is no YAML, or nested or expanded beyond any pipeline.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        for event in yaml.parse(content, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise PipelineError(f"{path} is not a pipeline: it is nested more than {_DEEPEST} times")
        documents = list(yaml.load_all(content, Loader=loader))
    except (yaml.YAMLError, ValueError) as error:
        raise PipelineError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if _nodes(documents) >= _MOST_NODES:
        raise PipelineError(f"{path} is too large for a pipeline: more than {_MOST_NODES:,} values")
    return documents


def _nodes(documents: list[Any]) -> int:
    """Counts the values in YAML documents up to `_MOST_NODES`, each alias as often as it is used."""
    count = 0
    waiting = list(documents)
    while waiting and count < _MOST_NODES:
        count += 1
        node = waiting.pop()
        if isinstance(node, dict):
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return count


def parse_pipeline(content: bytes, path: Path) -> dict[str, Any]:
    """Returns the pipeline spec in the content of the file `path`; raises as `load_pipeline` does."""
    documents = read_documents(content, path)
    spec = documents[0] if documents else None
    if not isinstance(spec, dict) or not _is_pipeline(spec):
        raise PipelineError(f"{path} is not a compiled pipeline; write one with 'shardline compile'")
    if len(documents) > 1:
        raise PipelineError(
            f"{path} holds {len(documents)} YAML documents; platform-specific settings after the first one "
            "(Kubernetes) have no meaning on Vertex or on this machine, compile without them"
        )
    if artifacts := spec["root"].get("inputDefinitions", {}).get("artifacts"):
        raise PipelineError(
            f"{path} takes artifacts as inputs ({', '.join(artifacts)}); only parameters can be given"
        )
    return spec


def _is_pipeline(spec: dict[Any, Any]) -> bool:
    return (
        _has(spec, "pipelineInfo", "name")
        and _has(spec, "root", "dag", "tasks")
        and _has(spec, "deploymentSpec", "executors")
        and isinstance(spec.get("components"), dict)
    )


def _has(node: Any, *keys: str) -> bool:
    for key in keys:
        if not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return bool(node)


def declared(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the declarations of a pipeline's parameters by name."""
    return dict(spec["root"].get("inputDefinitions", {}).get("parameters", {}))


def defaults(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of the parameters that have one, whole numbers as int (the IR has 3.0)."""
    return {
        name: int(item["defaultValue"])
        if item.get("parameterType") == "NUMBER_INTEGER"
        else item["defaultValue"]
        for name, item in declared(spec).items()
        if item.get("defaultValue") is not None
    }


def has_exit_tasks(spec: Mapping[str, Any]) -> bool:
    """Whether some task runs although others have failed (exit handlers, ignore_upstream_failure)."""
    return any(
        task.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
        for component in (spec["root"], *spec["components"].values())
        for task in component.get("dag", {}).get("tasks", {}).values()
    )
