"""The launcher's payload as it is compiled: JSON with placeholders that the platform fills in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardline.pipelines.check.ir import PARAMETER, UNKNOWN, UNKNOWN_TEXT, as_text, at, list_at, without_unknown
from shardline.pipelines.check.pipeline import Task

_LAUNCHERS = "google_cloud_pipeline_components.container."
_TYPES = ("CustomJob", "HyperparameterTuningJob")


def fill(template: str, task: Task) -> str:
    """Returns a text with what is known of the task's parameters, as the platform fills it in.

    A text goes into the template as it is, whatever characters it has; everything else goes in as JSON.
    """
    filled = []
    position = 0
    quoted = False
    for match in PARAMETER.finditer(template):
        before = template[position : match.start()]
        quoted ^= before.replace("\\\\", "").replace('\\"', "").count('"') % 2 == 1
        filled += [before, _written(task.value(match[1]), int(match[2] or 0), quoted)]
        position = match.end()
    return "".join([*filled, template[position:]])


def _written(value: Any, escapes: int, quoted: bool) -> str:
    if quoted or escapes:
        text = as_text(value)
        for _ in range(escapes):
            text = json.dumps(text)[1:-1]
        return text
    if isinstance(value, str):
        return value
    return json.dumps(UNKNOWN_TEXT if value is UNKNOWN else without_unknown(value))


def payload_of(container: Mapping[str, Any]) -> str:
    """Returns the --payload of a container that launches a custom job; "" for any other container."""
    args = list_at(container, "args")
    launches = any(_LAUNCHERS in part for part in [*list_at(container, "command"), *args])
    if not launches or "--payload" not in args[:-1] or not set(_TYPES) & set(args):
        return ""
    return str(args[args.index("--payload") + 1])


def flatten(argument: str, task: Task) -> str:
    """Returns an argument with KFP's Concat and IfPresent, which are JSON in a text, written out."""
    if not argument.startswith(('{"Concat"', '{"IfPresent"')):
        return argument
    try:
        return _written_out(json.loads(argument), task)
    except ValueError:
        return argument


def _written_out(node: Any, task: Task) -> str:
    if isinstance(node, list):
        return "".join(_written_out(item, task) for item in node)
    if isinstance(node, dict) and "Concat" in node:
        return _written_out(node["Concat"], task)
    if isinstance(node, dict) and "IfPresent" in node:
        condition = at(node, "IfPresent")
        present = task.value(str(condition.get("InputName"))) is not None
        return _written_out(condition.get("Then" if present else "Else", ""), task)
    return str(node)
