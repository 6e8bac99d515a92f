"""Runs a custom job on this machine: every replica a process, watched from the first to the last moment."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipelines.local import cluster, ports, processes
from pipelines.local.cluster import ReplicaId
from pipelines.local.job import CustomJob
from pipelines.local.processes import ProcessFailedError
from pipelines.local.replica import Replica, ShowLine
from trainer import progress
from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, RunError

#: How often a job with restart_job_on_worker_restart is started again.
MAX_RESTARTS = 1

#: Seconds that the others have to end by themselves once the chief has succeeded.
_FAREWELL_S = 2.0


def run_job(
    job: CustomJob,
    log_directory: Path,
    *,
    topic: str = "train",
    show_line: ShowLine = lambda name, line: None,
    max_restarts: int = MAX_RESTARTS,
) -> None:
    """Runs the job and returns when its chief has succeeded and no other process of it is left.

    Replicas report through `trainer.progress`; their events are reported again in this process. A
    signal that stops this process (SIGINT, SIGTERM, SIGHUP) stops the replicas first.

    Args:
        job: What to run. Its commands run in the current directory and Python environment.
        log_directory: Gets one log file per replica; made where it does not exist.
        topic: Name under which the job itself reports.
        show_line: Called with the replica's name for each line of output that is no event.
        max_restarts: How often the whole job starts again after a failure, where the job asks for it.

    Raises:
        ProcessFailedError: When a replica failed; with EXIT_BAD_INPUT as its exit_code when the replica said
            that the mistake is the user's, and then nothing is tried again.
        RunError: When the job's timeout has passed.
        processes.Stopped: When a signal stopped this process.
    """
    log_directory.mkdir(parents=True, exist_ok=True)
    restarts = max_restarts if job.restart_job_on_worker_restart else 0
    deadline = time.monotonic() + (math.inf if job.timeout is None else job.timeout)
    members = cluster.replicas(job)
    job_id = f"{time.time_ns()}"
    with processes.stop_on_signals(), ports.reserve(len(members)) as addresses:
        progress.say(topic, f"starting {', '.join(member.name for member in members)}")
        environments = [cluster.environment(job, member, addresses, job_id) for member in members]
        for restart in range(1, restarts + 2):
            try:
                _attempt(job, members, environments, log_directory, topic, show_line, deadline)
                return
            except ProcessFailedError as failure:
                if failure.exit_code == EXIT_BAD_INPUT or restart > restarts:
                    raise
                progress.say(topic, f"{failure}; all replicas start again (restart {restart} of {restarts})")


def _attempt(
    job: CustomJob,
    members: Sequence[ReplicaId],
    environments: Sequence[dict[str, str]],
    log_directory: Path,
    topic: str,
    show_line: ShowLine,
    deadline: float,
) -> None:
    """Starts all replicas once and waits until the chief has succeeded or something has failed."""
    with contextlib.ExitStack() as stack:
        running: list[Replica] = []
        stack.callback(_stop, running)
        for member, variables in zip(members, environments, strict=True):
            pool = job.worker_pools[member.pool]
            replica = Replica(
                member.name,
                [*pool.command, *pool.args],
                _environment(pool.env, variables),
                log_directory / f"{member.name}.log",
                show_line,
            )
            running.append(replica)
        chief = running[0]
        for ended in _endings(running, deadline):
            code = ended.finish()
            if code != 0:
                raise _failure(ended, code, running, topic)
            if ended is chief:
                for _ in _endings(running, time.monotonic() + _FAREWELL_S):
                    pass
                return
        raise RunError(f"the job was stopped: its timeout of {job.timeout:g} s has passed")


def _endings(running: Iterable[Replica], deadline: float) -> Iterable[Replica]:
    """Passes on the replicas' output, and yields each replica as it ends; stops at the deadline."""
    with selectors.DefaultSelector() as selector:
        for replica in running:
            if not replica.finished:
                selector.register(replica.pidfd, selectors.EVENT_READ, (replica, "end"))
                selector.register(replica.output, selectors.EVENT_READ, (replica, "output"))
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            ready = [key.data for key, _ in selector.select(None if left == math.inf else left)]
            for replica, what in ready:
                if what == "output" and not replica.read():
                    selector.unregister(replica.output)
            for replica, what in ready:
                if what == "end":
                    selector.unregister(replica.pidfd)
                    with contextlib.suppress(KeyError):
                        selector.unregister(replica.output)
                    yield replica


def _environment(pool: Mapping[str, str], platform: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a replica: this process's, the pool's, and the platform's own on top."""
    inherited = {key: value for key, value in os.environ.items() if key not in cluster.PLATFORM_VARIABLES}
    here = os.path.dirname(sys.executable)
    return {
        **inherited,
        # "python3" in a replica's command is the Python of this environment.
        "PATH": f"{here}{os.pathsep}{inherited.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",
        **pool,
        **platform,
        progress.EVENTS_VARIABLE: "1",
    }


def _failure(ended: Replica, code: int, running: Sequence[Replica], topic: str) -> ProcessFailedError:
    """Says why the job failed, in the words of a replica where one has reported an error."""
    mistakes = [item.error for item in running if item.error and item.error.exit_code == EXIT_BAD_INPUT]
    event = mistakes[0] if mistakes else ended.error
    if event is not None:
        return ProcessFailedError(event.text, topic=event.topic, exit_code=event.exit_code)
    if code not in (-signal.SIGKILL, 128 + signal.SIGKILL):  # of which its output can know nothing
        for line in ended.tail:
            progress.say(topic, f"{ended.name} | {line}")
    return ProcessFailedError(
        f"{ended.name} {processes.describe_exit(code)} after {ended.age:.0f} s (its log: {ended.log})",
        topic=topic,
        exit_code=EXIT_BAD_INPUT if code == EXIT_BAD_INPUT else EXIT_FAILED,
    )


def _stop(running: Sequence[Replica]) -> None:
    """Stops what still runs: SIGTERM, a grace period, then SIGKILL."""
    with processes.undisturbed():
        for replica in running:
            replica.stop(signal.SIGTERM)
        for ended in _endings(running, time.monotonic() + processes.GRACE_S):
            ended.finish()
        for replica in running:
            replica.finish()
