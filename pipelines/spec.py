"""A compiled pipeline: its file, read and refused in one place, and what its spec (IR) declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardline.components.vertex.payload import at
from shardline.trainer.errors import PipelineError

#: Names of our own pipelines.
RETRAIN, TUNE = "retrain", "tune"

#: Larger than any pipeline that was seen (0.6 MB), and read in two seconds.
_LARGEST = 4 * 2**20
#: The parser's C code ends the process where a file is nested some 10,000 times; pipelines are 10 deep.
_DEEPEST = 200
#: Nodes of a file, aliases followed: some lines of YAML can stand for billions.
_MOST_NODES = 2_000_000


@dataclass(frozen=True)
class PipelineFile:
    """File with a compiled pipeline.

    Attributes:
        spec: The pipeline spec (IR) with root, components, deploymentSpec and pipelineInfo.
        job: The PipelineJob around it, as the SDK submits it and KFP 1.8 compiled it; empty for none.
        others: The YAML documents behind the first, with settings for other platforms.
    """

    spec: dict[str, Any]
    job: dict[str, Any]
    others: tuple[Any, ...] = ()


def load_pipeline(path: Path) -> dict[str, Any]:
    """Returns the pipeline spec (IR) of a file that is to run.

    Raises PipelineError when the file cannot be read, is no compiled pipeline, or none that can run alone.
    """
    return parse_pipeline(read_pipeline(path), path)


def read_pipeline(path: Path) -> bytes:
    """Returns the content of a pipeline's file; PipelineError when it cannot be read, or is too large."""
    try:
        if path.is_file() and (size := path.stat().st_size) > _LARGEST:
            raise PipelineError(
                f"{path} is too large for a pipeline: {size:,} bytes, at most {_LARGEST:,}; "
                "is it the right file?"
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise PipelineError(f"no pipeline {path}; write it with 'shardline compile'") from None
    except OSError as error:
        raise PipelineError(f"cannot read the pipeline {path}: {error.strerror}") from None


def parse_pipeline(content: bytes, path: Path) -> dict[str, Any]:
    """Returns the pipeline spec in the content of the file `path`; raises as `load_pipeline` does."""
    file = parse_file(content, path)
    if file.job:
        raise PipelineError(f"{path} is a PipelineJob; take the pipeline alone, which is its pipelineSpec")
    if file.others:
        raise PipelineError(
            f"{path} holds {len(file.others) + 1} YAML documents; platform-specific settings after the first "
            "one (Kubernetes) have no meaning on Vertex or on this machine, compile without them"
        )
    if artifacts := at(file.spec, "root", "inputDefinitions", "artifacts"):
        raise PipelineError(
            f"{path} takes artifacts as inputs ({', '.join(artifacts)}); only parameters can be given"
        )
    return file.spec


def parse_file(content: bytes | str, path: Path) -> PipelineFile:
    """Returns the content of the file `path`, of whatever pipeline, as its documents.

    Raises PipelineError when it is no compiled pipeline, or not built as the compiler builds it.
    """
    documents = _documents(content, path)
    first = documents[0] if documents else None
    if not isinstance(first, dict):
        raise PipelineError(f"{path} is not a compiled pipeline; write one with 'shardline compile'")
    wrapped = at(first, "pipelineSpec")
    spec = wrapped or first
    missing = [key for key in ("pipelineInfo", "root", "deploymentSpec") if not at(spec, key)]
    if missing:
        kind = f" but a {first['kind']}" if "kind" in first else ""
        raise PipelineError(
            f"{path} is not a compiled pipeline{kind}: it has no {', '.join(missing)}; "
            "write one with 'shardline compile', or is it cut off?"
        )
    try:
        check_shape(spec)
    except PipelineError as error:
        raise PipelineError(f"{path} is not a compiled pipeline: {error}") from None
    return PipelineFile(spec, first if wrapped else {}, tuple(documents[1:]))


def _documents(content: bytes | str, path: Path) -> list[Any]:
    """Returns the YAML documents of a file; refuses what is nested or expanded beyond any pipeline."""
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


#: For every key of a mapping, whatever it is called.
_EACH = "*"

_TASK = {
    "componentRef": {"name": str},
    "inputs": {"parameters": {_EACH: {}}, "artifacts": {_EACH: {}}},
    "dependentTasks": [str],
    "triggerPolicy": {"condition": str, "strategy": str},
    "retryPolicy": {},
    "cachingOptions": {"enableCache": bool},
    "taskInfo": {},
    "parameterIterator": {"itemInput": str, "items": {}},
    "artifactIterator": {"itemInput": str, "items": {}},
}
_DECLARATIONS: dict[str, Any] = {"parameters": {_EACH: {}}, "artifacts": {_EACH: {}}}
_COMPONENT = {
    "executorLabel": str,
    "dag": {"tasks": {_EACH: _TASK}, "outputs": {}},
    "inputDefinitions": _DECLARATIONS,
    "outputDefinitions": _DECLARATIONS,
}
_EXECUTOR = {
    "container": {
        "image": str,
        "command": [str],
        "args": [str],
        "env": [{"name": str, "value": str}],
        "resources": {},
    },
    "importer": {},
}
_SPEC = {
    "pipelineInfo": {"name": str},
    "schemaVersion": str,
    "root": _COMPONENT,
    "components": {_EACH: _COMPONENT},
    "deploymentSpec": {"executors": {_EACH: _EXECUTOR}},
}
_NAMES: dict[Any, str] = {dict: "a mapping", list: "a list", str: "a text", bool: "true or false"}


def check_shape(spec: Any) -> None:
    """Checks that a pipeline spec is built as the compiler builds it, as far as rules rely on it.

    Raises PipelineError with the first place where it is not.
    """
    for place, wanted, found in _faults(spec, _SPEC, ""):
        raise PipelineError(f"{place} must be {_NAMES[wanted]}, not {found}")


def _faults(node: Any, shape: Any, place: str) -> Iterator[tuple[str, Any, str]]:
    """Yields each place that has another shape: place, wanted type, what is there."""
    wanted: Any = shape if isinstance(shape, type) else type(shape)
    # Protobuf reads null as "not set".
    if node is None:
        return
    if not isinstance(node, wanted):
        yield place or "the pipeline", wanted, repr(node)[:40]
    elif isinstance(shape, dict):
        for key, below in node.items():
            if not isinstance(key, str):
                yield f"the key {key!r} of {place or 'the pipeline'}", str, type(key).__name__
            elif key in shape or _EACH in shape:
                yield from _faults(below, shape.get(key, shape.get(_EACH)), f"{place}.{key}".lstrip("."))
    elif isinstance(shape, list):
        for index, below in enumerate(node):
            if below is None:
                yield f"{place}[{index}]", shape[0] if isinstance(shape[0], type) else dict, "null"
            yield from _faults(below, shape[0], f"{place}[{index}]")
