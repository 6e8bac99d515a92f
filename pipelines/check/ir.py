"""Reading the nodes of a compiled pipeline (IR), which may lack anything.

The shape that the view relies on: what must be a mapping, a list or a text in a pipeline spec.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from typing import Any, Final

from shardline.trainer.errors import PipelineError


class _Unknown(enum.Enum):
    UNKNOWN = "known at run time only"


#: A value that is known at run time only: another task's output, a loop's item, a required parameter.
UNKNOWN: Final = _Unknown.UNKNOWN

#: What stands for such a value inside a text; as the platform's own placeholders, it begins with "{{$".
UNKNOWN_TEXT = "{{$.unknown}}"

#: Any placeholder.
PLACEHOLDER = re.compile(r"\{\{\$(.*?)\}\}")

#: The value of an input parameter, as JSON inside JSON inside JSON ... as many times as the level says.
PARAMETER = re.compile(r"\{\{\$\.inputs\.parameters\['([^']+)'\](?:\.json_escape\[(\d)\])?\}\}")


def as_text(value: Any) -> str:
    """Returns a value as the platform writes it into a text."""
    if value is UNKNOWN:
        return UNKNOWN_TEXT
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(without_unknown(value))


def without_unknown(value: Any) -> Any:
    """Returns a JSON value with a text in place of everything that is not known."""
    if value is UNKNOWN:
        return UNKNOWN_TEXT
    if isinstance(value, list):
        return [without_unknown(item) for item in value]
    if isinstance(value, dict):
        return {key: without_unknown(item) for key, item in value.items()}
    return value


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
