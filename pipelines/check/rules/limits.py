"""Rules about sizes and numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator

from shardline.pipelines.check.ir import at, list_at, without_unknown
from shardline.pipelines.check.job import Pool
from shardline.pipelines.check.pipeline import Executor, Task
from shardline.pipelines.check.registry import error

#: Linux: bytes of one argument of a process, with its final NUL.
ARGUMENT_BYTES = 128 * 1024
_TASK_BYTES = 131_072
_ARTIFACTS = 100
_VARIABLES = 100


@error("SL310", Executor, fix="move the source into the image and import it")
def argument_fits(executor: Executor) -> Iterator[str]:
    """Each argument of a container, a component's source among them, has less than 128 KiB.

    Source: execve(2), MAX_ARG_STRLEN: 131,072 bytes with the final NUL.
    """
    parts = [*list_at(executor.container, "command"), *list_at(executor.container, "args")]
    yield from _too_long(parts)


@error("SL311", Pool, fix="move the source into the image and import it")
def replica_argument_fits(pool: Pool) -> Iterator[str]:
    """Each argument of a replica has less than 128 KiB.

    Source: execve(2), MAX_ARG_STRLEN: 131,072 bytes with the final NUL.
    """
    yield from _too_long(pool.argv)


@error("SL312", Task, fix="pass files or artifacts instead of long values")
def task_inputs_fit(task: Task) -> Iterator[str]:
    """A task's parameters and artifacts have at most 131,072 bytes as JSON.

    Only what is known before the run is counted.

    Source: docs.cloud.google.com, Vertex AI quotas and limits, pipelines.
    """
    if not task.container:
        return
    known = {name: without_unknown(value) for name, value in task.values().items()}
    size = len(json.dumps(known, default=str).encode())
    if size > _TASK_BYTES:
        longest = max(known, key=lambda name: len(json.dumps(known[name], default=str)))
        yield f"the parameters have {size:,} bytes as JSON, most of them in {longest}"


@error("SL313", Task, fix="gather the artifacts in one directory, or split the task")
def task_artifacts_are_few(task: Task) -> Iterator[str]:
    """A task has at most 100 input and output artifacts.

    Source: docs.cloud.google.com, Vertex AI quotas and limits, pipelines.
    """
    count = len(task.declared("artifacts")) + len(at(task.component, "outputDefinitions", "artifacts"))
    if task.container and count > _ARTIFACTS:
        yield f"the task has {count} artifacts"


@error("SL314", Pool, fix="pass settings as arguments or in a file")
def variables_are_few(pool: Pool) -> Iterator[str]:
    """A container has at most 100 environment variables.

    Source: google.cloud.aiplatform_v1.types.ContainerSpec: env, "Maximum limit is 100".
    """
    if len(pool.env) > _VARIABLES:
        yield f"the pool sets {len(pool.env)} environment variables"


def _too_long(parts: list[str]) -> Iterator[str]:
    for part in parts:
        size = len(part.encode(errors="replace"))
        if size >= ARGUMENT_BYTES:
            yield f"an argument has {size:,} bytes: {part.strip()[:40]!r}..."
