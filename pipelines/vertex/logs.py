"""What the tasks of a run on the platform have printed."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardline.components.conclude import platform
from shardline.components.conclude.log_lines import KfpLines
from shardline.components.conclude.logging_query import LogLine, log_filter
from shardline.pipelines.local.job import ROLES
from shardline.pipelines.vertex.calls import clients, platform_errors
from shardline.pipelines.vertex.environment import Environment
from shardline.pipelines.vertex.status import read_run, read_status
from shardline.trainer.errors import SettingsError

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1.types import PipelineJob

#: Lines that are shown at most, the newest of them.
LIMIT = 5000
#: Seconds between two looks; Cloud Logging has a line some seconds after it was printed.
_PAUSE_S = 5.0
#: Lines may arrive out of order by about so many seconds.
_OVERLAP = datetime.timedelta(seconds=30)

_REPLICA = re.compile(rf"({'|'.join(ROLES)})-(\d+)")


def read_log(
    environment: Environment,
    run: str,
    task: str = "",
    replica: str = "",
    *,
    since: datetime.datetime | None = None,
    follow: bool = False,
    pause: float = _PAUSE_S,
) -> Iterator[str]:
    """Yields what tasks have printed, each line after the names of its task and replica.

    Args:
        environment: Where the run is.
        run: Its id, or its resource name.
        task: Only of this task; "" for all.
        replica: Only of this replica, "worker-0" or "workerpool1-0"; "" for all.
        since: Only what came at or after this time.
        follow: Whether to wait for more until the run has ended.
        pause: Seconds between two looks.

    Raises:
        SettingsError: When there is no such task.
        PlatformError: When there is no such run, or the platform refuses or is not reached.
    """
    connected = clients(environment)
    source = platform.connect(environment.project, environment.location, environment.api_endpoint)
    seen: set[str] = set()
    kfp = KfpLines()
    while True:
        job = read_run(connected, run)
        ended = read_status(job).has_ended
        names = _task_names(job, task, wait=follow and not ended)
        lines = _ask(source, list(names), pool_name(replica), since) if names else []
        fresh = [line for line in lines if line.key not in seen]
        seen.update(line.key for line in fresh)
        for line in fresh:
            where = f"{names[line.job]} {line.replica}".rstrip()
            if not kfp.has(line.text, where):
                yield f"{where} | {line.text}"
        if ended or not follow:
            return
        if lines:
            since = max(lines[-1].time - _OVERLAP, since or lines[0].time)
        time.sleep(pause)


def pool_name(replica: str) -> str:
    """Returns the platform's name of a replica: workerpool1-0 for worker-0."""
    found = _REPLICA.fullmatch(replica)
    return f"workerpool{ROLES.index(found[1])}-{found[2]}" if found else replica


def _task_names(job: PipelineJob, task: str, *, wait: bool) -> dict[str, str]:
    """Returns the names of tasks by the ids of their custom jobs."""
    details = [item for item in job.job_detail.task_details if platform.custom_jobs(item)]
    if task and not wait and task not in (known := [item.task_name for item in details]):
        raise SettingsError(f"no task {task!r} has run; there are {', '.join(known) or 'none'}")
    return {
        name.rpartition("/")[2]: item.task_name
        for item in details
        for name in platform.custom_jobs(item)
        if task in ("", item.task_name)
    }


def _ask(
    source: platform.Platform, jobs: Sequence[str], replica: str, since: datetime.datetime | None
) -> list[LogLine]:
    with platform_errors("read the logs"):
        return source.log(log_filter(jobs, replica, since=since), LIMIT)
