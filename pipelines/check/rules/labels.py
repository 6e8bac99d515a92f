"""Rules about labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardline.pipelines.check.ir import at
from shardline.pipelines.check.job import Job
from shardline.pipelines.check.pipeline import Pipeline
from shardline.pipelines.check.registry import error, warning

_MOST = 64
_LONGEST = 64
_RESERVED = "vertex-ai-pipelines-run-billing-id"


@error("SL801", Job, fix="use lower-case letters, digits, _ and -, 64 characters at most")
def job_labels_are_valid(job: Job) -> Iterator[str]:
    """A custom job's labels are as the API wants them.

    Source: google.cloud.aiplatform_v1.types.CustomJob.labels; goo.gl/xmQnxf.
    """
    yield from _invalid(at(job.content, "labels"))


@error("SL802", Pipeline, fix="use lower-case letters, digits, _ and -, 64 characters at most")
def run_labels_are_valid(pipeline: Pipeline) -> Iterator[str]:
    """A run's labels are as the API wants them.

    Source: google.cloud.aiplatform_v1.types.PipelineJob.labels; goo.gl/xmQnxf.
    """
    yield from _invalid(pipeline.labels or {})


@warning("SL803", Pipeline, fix="leave it out")
def reserved_label_is_free(pipeline: Pipeline) -> Iterator[str]:
    """A run does not set the label that the platform sets.

    Source: google.cloud.aiplatform_v1.types.PipelineJob.labels: "user set value will get overrided".
    """
    if _RESERVED in (pipeline.labels or {}):
        yield f"the label {_RESERVED} is overwritten"


def _invalid(labels: Mapping[str, Any]) -> Iterator[str]:
    if len(labels) > _MOST:
        yield f"there are {len(labels)} labels, at most {_MOST} are allowed"
    for key, value in labels.items():
        if "{{$" in f"{key}{value}":
            continue
        if not isinstance(value, str):
            yield f"the label {key} is {value!r}, not a text"
        elif not key[:1].isalpha() or not _is_word(key):
            yield f"the label key {key[:80]!r} is not allowed"
        elif not _is_word(value):
            yield f"the value {value[:80]!r} of the label {key} is not allowed"


def _is_word(text: str) -> bool:
    """Whether a text has only what a label may have; letters of all alphabets that are not upper case."""
    return len(text) <= _LONGEST and all(
        character in "_-" or (character.isalnum() and character == character.lower()) for character in text
    )
