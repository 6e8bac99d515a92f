"""What a declared schedule asks of the platform, as JSON, and how drift from it is recognized."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardline.pipelines.vertex.environment import Environment
from shardline.pipelines.vertex.job_request import job_request
from shardline.pipelines.vertex.schedules.declared import Declared

#: Labels of the runs that a schedule starts. A schedule has no labels of its own; the API keeps these with
#: its request, so that a later look needs no copy of what was sent.
TEMPLATE_LABEL = "shardline-template"
REQUEST_LABEL = "shardline-request"

#: Hexadecimal digits of a digest; a label's value has 63 characters at most.
_DIGITS = 32

#: What of a run is said by name when it differs, by its place in the request.
_PARTS = {
    "pipeline_root": ("runtimeConfig", "gcsOutputDirectory"),
    "service_account": ("serviceAccount",),
    "network": ("network",),
    "encryption_spec_key_name": ("encryptionSpec", "kmsKeyName"),
    "template_uri": ("templateUri",),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that is not as it is declared.

    Attributes:
        what: Its name in the declaration.
        before: As it is on the platform.
        after: As it is declared.
    """

    what: str
    before: str
    after: str


def run_request(
    environment: Environment,
    declared: Declared,
    spec: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    template_uri: str = "",
) -> dict[str, Any]:
    """Returns the CreatePipelineJobRequest of each run, with labels that tell it from any other.

    Args:
        environment: Where, in whose name, and with which labels.
        declared: The schedule.
        spec: Its pipeline (IR).
        parameters: Its parameters, checked.
        template_uri: Where in the registry the pipeline came from.

    Raises:
        SettingsError: When there is no pipeline root.
        PipelineError: When the pipeline is of a form that cannot be submitted.
    """
    request = job_request(
        environment,
        spec,
        parameters,
        enable_caching=declared.enable_caching,
        template_uri=template_uri,
    )
    job = request["pipelineJob"]
    job["labels"] = {
        **job.get("labels", {}),
        TEMPLATE_LABEL: _digest(job["pipelineSpec"]),
        REQUEST_LABEL: _digest(request),
    }
    return request


def same_request(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether a schedule starts the runs that are wanted.

    The label says what was sent; the parameters are compared as well, since they can be edited elsewhere.
    """
    return _label(wanted, REQUEST_LABEL) == _label(found, REQUEST_LABEL) and not list(
        _parameter_differences(wanted, found)
    )


def request_differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[Difference]:
    """Returns in what the runs that a schedule starts differ from those that are wanted."""
    if same_request(wanted, found):
        return []
    differences = list(_parameter_differences(wanted, found))
    template = [_label(request, TEMPLATE_LABEL) for request in (found, wanted)]
    if template[0] != template[1]:
        before, after = (_short_digest(text) for text in template)
        differences.append(Difference("pipeline", before, after))
    for what, place in _PARTS.items():
        before, after = (_at(request["pipelineJob"], place) for request in (found, wanted))
        if before != after:
            differences.append(Difference(what, before, after))
    labels = [_own_labels(request) for request in (found, wanted)]
    if labels[0] != labels[1]:
        differences.append(Difference("labels", _text(labels[0]), _text(labels[1])))
    return differences or [Difference("request", "something else", "as declared")]


def _parameter_differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Difference]:
    before, after = (_parameters(request) for request in (found, wanted))
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield Difference(
                f"parameters.{name}",
                _text(before[name]) if name in before else "its default",
                _text(after[name]) if name in after else "its default",
            )


def _parameters(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a request; 3 and 3.0 are equal here, as they are in the API."""
    return dict(request["pipelineJob"].get("runtimeConfig", {}).get("parameterValues", {}))


def _own_labels(request: Mapping[str, Any]) -> dict[str, str]:
    labels = request["pipelineJob"].get("labels", {})
    return {name: labels[name] for name in labels if name not in (TEMPLATE_LABEL, REQUEST_LABEL)}


def _label(request: Mapping[str, Any], name: str) -> str:
    return str(request["pipelineJob"].get("labels", {}).get(name, ""))


def _at(job: Mapping[str, Any], place: tuple[str, ...]) -> str:
    node: Any = job
    for key in place:
        node = node.get(key, {})
    return str(node or "")


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _short_digest(digest: str) -> str:
    return digest[:12] or "unknown"


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
