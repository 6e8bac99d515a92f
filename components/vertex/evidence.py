"""Evidence of a run on the platform: how it came out, why it failed, and what its tasks have printed."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterator
from typing import cast

from shardline.components.run_record import FAILED, RUNNING, RunRecord, State, results
from shardline.components.vertex.causes import Failure, explain
from shardline.components.vertex.client import Platform, ask
from shardline.components.vertex.logs import KfpLines, LogLine, last_lines, own_error, read_entries
from shardline.components.vertex.runs import Run, Task, read_run
from shardline.trainer import progress
from shardline.trainer.errors import PlatformError, SettingsError

_REPLICA = re.compile(r"replica (workerpool\d+-\d+)")
_STATUS = re.compile(r"non-zero status of (\d+)(\(SIG)?")

#: Entries that are read to find the last lines that say something.
_ENTRIES = 300
#: Entries that `logs` shows at most, the newest of them.
_LIMIT = 5000
#: Seconds between two looks; Cloud Logging has a line some seconds after it was printed.
_PAUSE_S = 5.0
#: Lines may arrive out of order by about so many seconds.
_OVERLAP = datetime.timedelta(seconds=30)


def read_record(platform: Platform, run: str, state: State | None = None) -> RunRecord:
    """Returns the record of a run, by id or resource name, as far as it has come; raises as `read_run` does.

    `state` is its state where the run cannot know it yet: "failed" to a task that runs at its end.
    """
    found = read_run(platform, run)
    state = state or (cast(State, found.state) if found.has_ended else RUNNING)
    made = results(task.outputs for task in found.tasks)
    return RunRecord(
        name=found.job_id,
        pipeline=found.pipeline or found.job_id,
        state=state,
        created=found.created,
        duration_s=found.seconds,
        error=found.error or None,
        parameters=found.parameters,
        explanation=explain(failure_of(platform, found)) if state == FAILED else None,
        **{**made, "links": {"run": found.link, **made["links"]}},
    )


def failure_of(platform: Platform, run: Run) -> Failure:
    """Returns what the platform and its logs tell of a failed run.

    What cannot be read is said, and the failure is told as well as it can be without it.
    """
    task = run.failed_task
    if task is None:
        return Failure(error=run.error)
    messages = [*_job_errors(platform, task), task.error]
    # The one that names an exit code, else the first.
    message = next(filter(_STATUS.search, messages), "") or next(filter(None, messages), "")
    replica, status = _REPLICA.search(message), _STATUS.search(message)
    pool = replica[1] if replica else ""
    lines: list[LogLine] = []
    if task.jobs:
        try:
            lines = read_entries(platform, map(_id, task.jobs), _ENTRIES, pool)
        except PlatformError as error:
            progress.say("vertex", str(error))
    log = [line.text for line in lines]
    own = own_error(log)
    return Failure(
        task=task.name,
        replica=pool,
        exit_code=int(status[1]) + (128 if status[2] and int(status[1]) < 128 else 0) if status else None,
        error=own or " ".join(message.split()),
        own_words=bool(own),
        lines=last_lines(log),
    )


def _job_errors(platform: Platform, task: Task) -> list[str]:
    """Returns what the custom jobs of a task say, up to the one that names an exit code."""
    messages: list[str] = []
    for name in reversed(task.jobs):
        try:
            job = ask(f"read the job {_id(name)}", platform.jobs.get_custom_job, {"name": name})
        except PlatformError as error:
            progress.say("vertex", str(error))
            continue
        messages.append(str(job.error.message))
        if _STATUS.search(messages[-1]):
            break
    return messages


def read_log(
    platform: Platform,
    run: str,
    task: str = "",
    replica: str = "",
    *,
    since: datetime.datetime | None = None,
    follow: bool = False,
) -> Iterator[str]:
    """Yields what tasks have printed, each line after the names of its task and replica.

    Args:
        platform: Where the run is.
        run: Its id, or its resource name.
        task: Only of this task; "" for all.
        replica: Only of this replica, "workerpool1-0"; "" for all.
        since: Only what came at or after this time.
        follow: Whether to wait for more until the run has ended.

    Raises:
        SettingsError: When there is no such task.
        PlatformError: When there is no such run, or the platform refuses or is not reached.
    """
    seen: set[str] = set()
    kfp = KfpLines()
    while True:
        found = read_run(platform, run)
        names = _task_names(found, task, wait=follow and not found.has_ended)
        lines = read_entries(platform, names, _LIMIT, replica, since) if names else []
        fresh = [line for line in lines if line.key not in seen]
        seen.update(line.key for line in fresh)
        for line in fresh:
            where = f"{names[line.job]} {line.replica}".rstrip()
            if not kfp.has(line.text, where):
                yield f"{where} | {line.text}"
        if found.has_ended or not follow:
            return
        if lines:
            since = max(lines[-1].time - _OVERLAP, since or lines[0].time)
        time.sleep(_PAUSE_S)


def _task_names(run: Run, task: str, *, wait: bool) -> dict[str, str]:
    """Returns the names of tasks by the ids of their custom jobs."""
    ran = [item for item in run.tasks if item.jobs]
    chosen = [item for item in ran if task in ("", item.name, item.path.rpartition(".")[2])]
    if task and not wait and not chosen:
        known = ", ".join(item.name for item in ran)
        raise SettingsError(f"no task {task!r} has run; these have: {known or 'none'}")
    return {_id(job): item.name for item in chosen for job in item.jobs}


def _id(name: str) -> str:
    return name.rpartition("/")[2]
