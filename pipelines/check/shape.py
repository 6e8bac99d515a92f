"""The shape that the view relies on: what must be a mapping, a list or a text in a pipeline spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardline.trainer.errors import PipelineError

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

    Raises:
        PipelineError: With the first place where it is not.
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
