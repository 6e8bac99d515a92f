"""Rules about how tasks are retried, gated and cached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardline.pipelines.check.ir import UNKNOWN, whole
from shardline.pipelines.check.pipeline import Task
from shardline.pipelines.check.registry import error, warning

_SECONDS = re.compile(r"\d+(\.\d+)?s")
_VALUE = r"inputs\.parameter_values\['([^']+)'\]"
#: A parameter that is compared with a text, but for 'true' and 'false', which are as good as a bool.
_TEXT_COMPARED = re.compile(
    rf"{_VALUE}\s*[=!]=\s*'(?!(?i:true|false)')|(?<![Tt]rue)(?<![Ff]alse)'\s*[=!]=\s*{_VALUE}"
)
#: A location or a query: it stays the same while what it stands for changes.
_LOCATION = re.compile(
    r"(?:[a-z]+:)?(?:gs|bq|s3|https?|hdfs)://|(?:[a-z]+:)?/gcs/"
    r"|(?is:\s*(?:--|(?:select|with|create|insert|merge)\b).*\bfrom\b)"
)
_TABLE = re.compile(r"[\w-]+[.:]\w+\.\w+")
#: Names of inputs that change when the data does.
_FINGERPRINT = re.compile(r"(^|[_-])(time|timestamp|date|day|version|fingerprint|digest|hash|run_id)([_-]|$)")
#: Names of inputs that say where something is written, not read.
_WRITTEN = re.compile(
    r"(^|_)(out|output|outputs|dest|destination|target|root|staging|tmp|temp|log|logs|export)(_|$)"
)
_OWN_PLACEHOLDERS = re.compile(r"\{\{\$\.pipeline_(job|task)_")


@error("SL511", Task, fix="write numbers: retries are fixed when the pipeline is compiled")
def retries_are_constant(task: Task) -> Iterator[str]:
    """A task's retries are constants.

    Source: docs.cloud.google.com, pipelines/configure-retries: "These values must be available when you
    compile the pipeline".
    """
    policy = task.spec.get("retryPolicy") or {}
    count = policy.get("maxRetryCount")
    if count is not None and (whole(count) is None or (whole(count) or 0) < 0):
        yield f"the number of retries is {count!r}"
    factor = policy.get("backoffFactor")
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, int | float)):
        yield f"the backoff factor is {factor!r}"
    for key in ("backoffDuration", "backoffMaxDuration"):
        found = policy.get(key)
        if found is not None and not _SECONDS.fullmatch(str(found)):
            yield f"{key} is {found!r}"


@warning("SL512", Task, fix="let the task before it return a bool or a number, and compare that")
def condition_is_no_text(task: Task) -> Iterator[str]:
    """A condition compares numbers or booleans, not free text.

    A text with an apostrophe makes it an expression that cannot be evaluated; kfp.local then takes it for
    false, and the run succeeds without the tasks behind it.

    Source: kfp 2.17, local/orchestrator.
    """
    condition = (task.spec.get("triggerPolicy") or {}).get("condition") or ""
    for match in _TEXT_COMPARED.finditer(condition):
        name = match[1] or match[2]
        yield f"the condition compares the text {name.removeprefix('pipelinechannel--')}"


@warning("SL513", Task, fix="set_caching_options(False), or pass a fingerprint of the data as an input")
def changing_data_is_not_cached(task: Task) -> Iterator[str]:
    """A task that reads a location is not cached, unless an input changes when the data does.

    Source: docs.cloud.google.com, pipelines/configure-caching: the cache key is the inputs' values, the
    image and the command; what a location holds is not part of it.
    """
    if not task.container or not (task.spec.get("cachingOptions") or {}).get("enableCache"):
        return
    if task.inputs("artifacts") or _may_change(task):
        return
    for name, value in task.values().items():
        if isinstance(value, str) and _is_location(name, value) and not _WRITTEN.search(name):
            yield f"cached with {name} = {_short(value)}: a later run on new data reuses the old result"
            return


def _may_change(task: Task) -> bool:
    """Whether some input is computed in the run, is the run's own name or time, or a fingerprint."""
    passed: dict[str, Any] = task.inputs("parameters")
    return any(
        _FINGERPRINT.search(name)
        or (task.value(name) is UNKNOWN and not _is_passed_down(task, name))
        or _OWN_PLACEHOLDERS.search(str(task.value(name)))
        for name in passed
    )


def _is_location(name: str, value: str) -> bool:
    return bool(_LOCATION.match(value) or ("table" in name and _TABLE.fullmatch(value)))


def _is_passed_down(task: Task, name: str) -> bool:
    """Whether an input is a parameter of the pipeline, through however many DAGs."""
    outer = (task.inputs("parameters").get(name) or {}).get("componentInputParameter")
    if not isinstance(outer, str):
        return False
    return _is_passed_down(task.parent, outer) if task.parent else True


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:57]}...")
