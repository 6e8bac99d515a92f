"""Log lines of tasks, here and in Cloud Logging, and the record and failure of a run on the platform."""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from shardline.components.runs.causes import Failure, explain
from shardline.components.runs.platform_run import PlatformRun, read_run
from shardline.components.runs.record import FAILED, RUNNING, RunRecord, State, collect_results
from shardline.components.vertex.client import Platform, call_api, list_all
from shardline.trainer.base import progress
from shardline.trainer.base.errors import PlatformError, SettingsError

#: The number of last lines that explain a failure.
LAST_LINES = 12

_REPLICA = re.compile(r"((?:chief|worker|ps|evaluator)-\d+) \| (.*)", re.DOTALL)
#: An error as `shardline.trainer.base.progress` renders it; "pipeline:" repeats a task's.
_ERROR = re.compile(r"(?!pipeline:)(\w+): error: (.*)")
_KFP = re.compile(r"\[KFP Executor [^]]*\]: ")
#: Beginnings of lines that continue one of KFP's: a JSON document.
_JSON = ("{", "}", " ")
_FAILED_REPLICA = re.compile(r"replica (workerpool\d+-\d+)")
_STATUS = re.compile(r"non-zero status of (\d+)(\(SIG)?")

#: Largest number of entries that `logs` shows, the newest.
_LIMIT = 5000
#: Seconds between two reads; Cloud Logging has a line some seconds after it was printed.
_PAUSE_S = 5.0
#: Lines may arrive out of order by this much.
_OVERLAP = datetime.timedelta(seconds=30)


class KfpLines:
    """Recognizes KFP's own lines in the interleaved output of several processes."""

    def __init__(self) -> None:
        self._in_kfp: set[str] = set()

    def has(self, text: str, source: str = "") -> bool:
        """Whether the next line of a process is KFP's own, or empty; `source` identifies the process."""
        if _KFP.match(text):
            self._in_kfp.add(source)
            return True
        if source in self._in_kfp and text.startswith(_JSON):
            return True
        self._in_kfp.discard(source)
        return not text.strip()


def readable(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines that are neither KFP's own nor empty.

    Lines of several processes begin with the name of their replica: "worker-0 | ...".
    """
    kfp = KfpLines()
    for line in lines:
        replica, text = split_replica(line)
        if not kfp.has(text, replica):
            yield line


def split_replica(line: str) -> tuple[str, str]:
    """Returns the name of the replica at the beginning of a line, "" for none, and the rest."""
    match = _REPLICA.fullmatch(line)
    return (match[1], match[2]) if match else ("", line)


def own_error(lines: Iterable[str]) -> str:
    """Returns the message of Shardline's last error among lines; "" for none."""
    errors = [match[2] for line in lines if (match := _ERROR.fullmatch(line))]
    return errors[-1] if errors else ""


def last_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """Returns the last readable lines, without Shardline's own errors."""
    return tuple(line for line in readable(lines) if not _ERROR.fullmatch(line))[-LAST_LINES:]


@dataclass(frozen=True)
class LogLine:
    """One line of a replica's output, without line end, and when (UTC) Cloud Logging received it.

    `job` is the id of the custom job, `replica` "" for the platform's own lines, `key` the line's unique id.
    """

    time: datetime.datetime
    job: str
    replica: str
    text: str
    key: str


def read_entries(
    platform: Platform,
    jobs: Iterable[str],
    limit: int,
    replica: str = "",
    since: datetime.datetime | None = None,
) -> list[LogLine]:
    """Returns the newest lines of custom jobs by id, `limit` entries at most, oldest first.

    `replica` is a name as in workerpool0-0, "" for all; `since` is the time of the oldest entry. Source:
    https://cloud.google.com/vertex-ai/docs/training/monitor-training-logs
    """
    ids = " OR ".join(json.dumps(job) for job in jobs)
    parts = ['resource.type="ml_job"', f"resource.labels.job_id=({ids})"]
    if replica:
        parts.append(f'resource.labels.task_name="{replica}"')
    if since:
        parts.append(f'timestamp>="{since.astimezone(datetime.UTC).isoformat()}"')
    request = {
        "resource_names": [f"projects/{platform.project}"],
        "filter": " AND ".join(parts),
        "order_by": "timestamp desc",
        "page_size": min(limit, 1000),
    }
    found = list_all("read the logs", platform.logs.list_log_entries, request, limit=limit)
    return [
        LogLine(
            time=entry.timestamp,
            job=entry.resource.labels.get("job_id", ""),
            # "service" is the platform itself.
            replica=entry.resource.labels.get("task_name", "").removeprefix("service"),
            text=line,
            key=f"{entry.timestamp}{entry.insert_id}{number}",
        )
        for entry in found[::-1]
        for text in [str(entry.text_payload or (entry.json_payload or {}).get("message", ""))]
        for number, line in enumerate(text.splitlines() or [""])
    ]


def read_platform_record(platform: Platform, run: str, state: State | None = None) -> RunRecord:
    """Returns the record of a run by id or resource name, running or ended; raises as `read_run` does.

    `state` overrides the platform's, which an exit task of the run needs.
    """
    found = read_run(platform, run)
    state = state or (cast(State, found.state) if found.has_ended else RUNNING)
    outcome = collect_results(task.outputs for task in found.tasks)
    return RunRecord(
        name=found.job_id,
        pipeline=found.pipeline or found.job_id,
        state=state,
        created=found.created,
        duration_s=found.seconds,
        error=found.error or None,
        parameters=found.parameters,
        explanation=explain(failure_of(platform, found)) if state == FAILED else None,
        **{**outcome, "links": {"run": found.link, **outcome["links"]}},
    )


def failure_of(platform: Platform, run: PlatformRun) -> Failure:
    """Returns the failure of a run from the platform and its logs.

    What cannot be read is reported and left out.
    """
    task = run.failed_task
    if task is None:
        return Failure(error=run.error)
    messages: list[str] = []
    for name in reversed(task.jobs):  # until one names an exit code
        if any(map(_STATUS.search, messages)):
            break
        try:
            job = call_api(f"read the job {_id(name)}", platform.jobs.get_custom_job, {"name": name})
            messages.append(str(job.error.message))
        except PlatformError as error:
            progress.report("vertex", str(error))
    messages.append(task.error)
    # The one that names an exit code, else the first.
    message = next(filter(_STATUS.search, messages), "") or next(filter(None, messages), "")
    replica, status = _FAILED_REPLICA.search(message), _STATUS.search(message)
    pool = replica[1] if replica else ""
    lines: list[LogLine] = []
    if task.jobs:
        try:
            lines = read_entries(platform, map(_id, task.jobs), limit=300, replica=pool)
        except PlatformError as error:
            progress.report("vertex", str(error))
    log = [line.text for line in lines]
    own = own_error(log)
    return Failure(
        task=task.name,
        replica=pool,
        exit_code=int(status[1]) + (128 if status[2] and int(status[1]) < 128 else 0) if status else None,
        error=own or " ".join(message.split()),
        is_own_message=bool(own),
        lines=last_lines(log),
    )


def read_log(
    platform: Platform, run: str, task: str = "", replica: str = "", *, follow: bool = False
) -> Iterator[str]:
    """Yields the lines that tasks have printed, each after the names of its task and replica.

    `task` and `replica`, "workerpool1-0", choose some. With `follow`, waits for more lines until the run has
    ended. Raises SettingsError when there is no such task, PlatformError as `read_run` does.
    """
    seen: set[str] = set()
    since: datetime.datetime | None = None
    kfp = KfpLines()
    while True:
        found = read_run(platform, run)
        ran = [item for item in found.tasks if item.jobs]
        chosen = [item for item in ran if task in ("", item.name, item.path.rpartition(".")[2])]
        if task and not chosen and (found.has_ended or not follow):
            known = ", ".join(item.name for item in ran)
            raise SettingsError(f"no task {task!r} has run; these have: {known or 'none'}")
        names = {_id(job): item.name for item in chosen for job in item.jobs}
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


def _id(name: str) -> str:
    return name.rpartition("/")[2]
