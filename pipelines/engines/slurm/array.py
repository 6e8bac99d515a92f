"""Array of custom jobs on Slurm: its elements run side by side, and each ends by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardline.components.runs.logs import own_error
from shardline.components.runs.slurm_job import SlurmJob, end_message, read_job, run_slurm
from shardline.pipelines.engines.custom_job import CustomJob
from shardline.pipelines.engines.slurm import engine
from shardline.pipelines.engines.slurm.engine import Logs
from shardline.pipelines.engines.slurm.replica import write_job
from shardline.pipelines.engines.slurm.script import POOLS_FILE
from shardline.pipelines.engines.slurm.settings import SlurmSettings

#: Seconds between two questions to Slurm.
_PAUSE_S = 2.0


def run_array(
    jobs: Sequence[CustomJob],
    directory: Path,
    settings: SlurmSettings,
    *,
    topic: str,
    show_line: Callable[[int, str, str], None],
    stops: Callable[[int], bool],
) -> Iterator[tuple[int, str]]:
    """Submits custom jobs of the same pools as one array; yields the number of each as it ends.

    With it comes why the job has failed; "" when it has succeeded, or was stopped. The logs of job N are in
    the directory N of the array's. `show_line` takes a number, the name of a replica, and a line of output.
    `stops` is called every few seconds for each job that runs, and returns whether to cancel it.
    """
    for number, job in enumerate(jobs):
        (directory / str(number)).mkdir(parents=True, exist_ok=True)
        write_job(job, directory / str(number) / POOLS_FILE)
    running = {n: Logs(directory / str(n), partial(show_line, n)) for n in range(len(jobs))}
    stopped = set()
    batch, settings = engine.pools_job(jobs[0], directory, len(jobs)), engine.limited(jobs[0], settings)
    with engine.submitted(batch, settings, topic) as job_id:
        while running:
            array = read_job(job_id, directory)
            for number, logs in list(running.items()):
                state = array.elements.get(number, array.state)
                element = replace(array, id=f"{job_id}_{number}", state=state)
                logs.read(at_end=element.has_ended)
                if element.has_ended:
                    del running[number]
                    is_failure = element.state != "succeeded" and number not in stopped
                    yield number, _why(directory / str(number), element) if is_failure else ""
                elif element.state == "running" and number not in stopped and stops(number):
                    stopped.add(number)
                    run_slurm(["scancel", element.id])
            time.sleep(_PAUSE_S if running else 0)


def _why(directory: Path, job: SlurmJob) -> str:
    """Returns why a job of an array has failed: the error in a replica's log, or what Slurm says."""
    logs = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(directory.glob("*.log")))
    errors = (own_error(log.splitlines()) for log in logs)
    return next(filter(None, errors), "") or end_message(job)
