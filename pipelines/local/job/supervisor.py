"""Supervisor of a custom job on this machine: starts, watches, restarts and stops its replicas."""

from __future__ import annotations

import collections
import contextlib
import datetime
import math
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardline.components.text import table, timestamp
from shardline.pipelines.local.job import custom_job as cluster
from shardline.pipelines.local.job.custom_job import CustomJob, ShowLine
from shardline.pipelines.local.job.injections import PREEMPTION_GRACE_S, FaultInjector, Injection
from shardline.pipelines.local.job.replica import Replica, make_launches
from shardline.pipelines.local.process import processes, start
from shardline.pipelines.local.process.network import NO_NETWORK, job_network
from shardline.pipelines.local.process.processes import ProcessFailedError
from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_RESTART, RunError
from shardline.trainer.base.progress import Event

#: Seconds that workers have to end by themselves after the chief has succeeded.
_WORKERS_END_S = 2.0
#: Seconds between SIGTERM and SIGKILL for replicas that have nothing left to save.
_BRIEF_GRACE_S = 1.0
#: Exit codes of user errors, without a retry: the last two are a command that cannot be executed. The
#: trainer's fail-fast marker would end the next attempt, too; here the error of any program ends the job.
_USER_ERRORS = (EXIT_BAD_INPUT, 126, 127)

#: Replicas that have ended, with their exit status.
Ended = list[tuple[Replica, int]]
#: Starts the replica of that name, which reports its events to the function.
Start = Callable[[str, Callable[[Event], None]], Replica]


def run_job(
    job: CustomJob,
    log_directory: Path,
    *,
    topic: str = "train",
    show_line: ShowLine = lambda name, line: None,
    injections: Sequence[Injection] = (),
    network: str = "auto",
) -> None:
    """Runs the job and returns when it has succeeded and no process of it is left.

    It succeeds with its chief, or with all workers where `all_succeed` is set. Replicas report through
    `shardline.trainer.base.progress`; this process reports their events again. A signal that stops this
    process (SIGINT, SIGTERM, SIGHUP) stops the replicas first.

    The commands run in the current directory and Python environment. The log directory, which need not exist,
    gets a log file per replica, and job.json with their starts and ends. `topic` is that of the job's own
    lines; `show_line` gets the replica's name and each line of output that is not an event. `network` is one
    of `network.CHOICES`.

    Raises:
        ProcessFailedError: When a replica failed; its exit_code is EXIT_BAD_INPUT after a user error, which
            is not retried.
        RunError: When the job's timeout has passed.
        PipelineError: When there is no such command, or an injection names no replica of the job.
        processes.Stopped: When a signal stopped this process.
    """
    names = [member.name for member in cluster.replicas(job)]
    injector = FaultInjector(injections, names, topic)
    with (
        processes.stop_on_signals(),
        job_network(len(names), topic, network) as shared,
        processes.scratch_directory() as temporary,
    ):
        launches = make_launches(job, shared, temporary, log_directory)
        log_directory.mkdir(parents=True, exist_ok=True)
        history = History(job.display_name, names)
        progress.report(topic, f"starting {', '.join(names)}")
        with history.recorded(log_directory, topic), start.fork_server_for(list(launches.values())) as forks:

            def start_replica(name: str, report: Callable[[Event], None]) -> Replica:
                return Replica(name, launches[name], log_directory / f"{name}.log", show_line, report, forks)

            _RunningJob(job, injector, history, start_replica, topic).run()
        injector.end()


class History:
    """Content of job.json: starts and ends of every replica of a job, in seconds since the job's start."""

    def __init__(self, display_name: str, names: Sequence[str]) -> None:
        self._display_name = display_name
        self._created = timestamp(datetime.datetime.now(datetime.UTC).replace(microsecond=0))
        self._began = time.monotonic()
        self._starts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def add(self, name: str, started: float, code: int, peak_memory: int, *, stopped: bool) -> None:
        """Adds a replica that has ended: exit status, peak memory in bytes, whether the job stopped it."""
        start = {
            "start_s": round(started - self._began, 3),
            "end_s": self._now(),
            "exit": processes.signal_name(code) or code,
            "stopped": stopped,
            "peak_memory_bytes": peak_memory,
        }
        self._starts[name].append(start)

    def _show(self, topic: str) -> None:
        """Shows a line per replica: first start, last end and exit, largest memory."""
        rows = [
            (
                name,
                f"{starts[0]['start_s']:.1f} s",
                f"{starts[-1]['end_s']:.1f} s",
                "stopped" if starts[-1]["stopped"] and starts[-1]["exit"] != 0 else str(starts[-1]["exit"]),
                str(len(starts) - 1),
                f"{max(start['peak_memory_bytes'] for start in starts) / 2**20:,.0f} MiB",
            )
            for name, starts in self._starts.items()
            if starts
        ]
        titles = ("replica", "start", "end", "exit", "restarts", "peak memory")
        for line in table(titles, rows, align="lrrlr").splitlines():
            progress.report(topic, line)

    @contextlib.contextmanager
    def recorded(self, directory: Path, topic: str) -> Iterator[None]:
        """Writes job.json when the job in this context has ended, and shows the table of replicas."""
        state, message, is_user_error = "stopped", None, False
        try:
            yield
            state = "succeeded"
        except RunError as error:
            state, message, is_user_error = "failed", str(error), error.exit_code == EXIT_BAD_INPUT
            raise
        except processes.Stopped as error:
            message = f"stopped by {error.signal_name}"
            raise
        finally:
            record = {
                "display_name": self._display_name,
                "state": state,
                "error": message,
                "created": self._created,
                "duration_s": self._now(),
                "replicas": [
                    {"name": name, "restarts": max(0, len(starts) - 1), "starts": starts}
                    for name, starts in self._starts.items()
                ],
            }
            files.write_json(directory / "job.json", record)
            if not is_user_error:
                self._show(topic)

    def _now(self) -> float:
        return round(time.monotonic() - self._began, 3)


class _RunningJob:
    """A job in progress: its running replicas, watched together."""

    def __init__(
        self, job: CustomJob, injector: FaultInjector, history: History, start: Start, topic: str
    ) -> None:
        self._job = job
        self._injector = injector
        self._restarts: collections.Counter[str] = collections.Counter()
        self._history = history
        self._start_replica = start
        self._topic = topic
        members = cluster.replicas(job)
        self._names = [member.name for member in members]
        decisive = ("chief", "worker") if job.all_succeed else ("chief",)
        self._decisive = {member.name for member in members if member.role in decisive}
        self._awaited: set[str] = set()
        self._running: dict[str, Replica] = {}
        self._selector = selectors.DefaultSelector()
        self._deadline = time.monotonic() + (math.inf if job.timeout is None else job.timeout)

    def run(self) -> None:
        """Starts the replicas, returns when the job has succeeded, and stops all that still run."""
        grace = 0.0
        try:
            self._start_all()
            while not self._has_succeeded():
                pass
            pools = self._job.worker_pools
            if len(pools) <= 2 or not pools[2].replicas:  # workers that serve a chief never end by themselves
                self._wait_for_all(_WORKERS_END_S)
            grace = _BRIEF_GRACE_S
        except ProcessFailedError:
            grace = _BRIEF_GRACE_S
            raise
        except (RunError, processes.Stopped):
            grace = processes.GRACE_S
            raise
        finally:
            self._stop(grace)
            self._selector.close()

    def _has_succeeded(self) -> bool:
        ended = self._wait(min(self._deadline, self._injector.next_time))
        self._injector.act(self._running)
        self._awaited -= {replica.name for replica, code in ended if code == 0}
        if not self._awaited:
            return True
        for replica, code in ended:
            if code == 0:
                continue
            restarts_all, count = self._choose_restart(replica, code)
            if restarts_all:
                # Other replicas that have ended restart too.
                return self._restart_all(
                    code, f"{_describe_end(replica, code)}; all replicas restart ({count})"
                )
            progress.report(self._topic, f"{_describe_end(replica, code)}; it restarts ({count})")
            self._start(replica.name)
        if time.monotonic() >= self._deadline:
            raise RunError(f"the job was stopped: its timeout of {self._job.timeout:g} s has passed")
        return False

    def _choose_restart(self, replica: Replica, code: int) -> tuple[bool, str]:
        """Returns whether all replicas restart or only this one, and the count: "restart 1 of 2".

        A replica restarts once by itself, then all restart as often as the job allows; restarts after a
        preemption are counted separately. Raises ProcessFailedError when no restart is left.
        """
        mistaken = [item for item in (replica, *self._running.values()) if item.is_user_error]
        if mistaken or code in _USER_ERRORS:
            raise _job_failure(mistaken[0] if mistaken else replica, code)
        whole = self._job.restart_job_on_worker_restart
        limits = [(True, "restart", "job", self._job.job_restarts)]
        if code == EXIT_RESTART or replica.preempted:
            limits = [(whole, "preemption", "preemption", 6)]  # as the platform with SPOT machines
        elif not whole:
            limits.insert(0, (False, "restart", replica.name, 1))
        for restarts_all, word, counted, limit in limits:
            if self._restarts[counted] < limit and not self._job.disable_retries:
                self._restarts[counted] += 1
                return restarts_all, f"{word} {self._restarts[counted]} of {limit}"
        raise _job_failure(replica, code)

    def _restart_all(self, code: int, message: str) -> bool:
        if code == EXIT_RESTART:
            # The others will ask for a restart too, once they have saved their state.
            ended = self._wait_for_all(processes.GRACE_S)
            self._awaited -= {replica.name for replica, code in ended if code == 0}
            if not self._awaited:
                return True
            self._ask_to_end()
            self._wait_for_all(PREEMPTION_GRACE_S - processes.GRACE_S)
        others = list(self._running.values())
        self._stop(_BRIEF_GRACE_S)
        for other in others:
            if other.is_user_error:  # the cause of the first failure
                raise _job_failure(other, EXIT_BAD_INPUT)
        progress.report(self._topic, message)
        self._start_all()
        return False

    def _start_all(self) -> None:
        self._awaited = set(self._decisive)
        for name in self._names:
            self._start(name)

    def _start(self, name: str) -> None:
        replica = self._running[name] = self._start_replica(name, self._report)
        self._selector.register(replica.control, selectors.EVENT_READ, (replica, "end"))
        self._selector.register(replica.pipe, selectors.EVENT_READ, (replica, "output"))

    def _report(self, event: Event) -> None:
        if event.kind == "progress" and event.unit == "steps":
            self._injector.step = max(self._injector.step, event.done)
        progress.emit(event)

    def _wait(self, until: float) -> Ended:
        """Reads output until a replica prints or ends, or until the time `until`, for an hour at most.

        Each replica is read once, however much it prints. Returns those that have ended.
        """
        timeout = min(max(0, until - time.monotonic()), 3600)  # the system takes 24 days at most
        ready = [key.data for key, _ in self._selector.select(timeout)]
        for replica, what in ready:
            if what == "output" and not replica.read():
                self._selector.unregister(replica.pipe)
        return [(replica, self._finish(replica)) for replica, what in ready if what == "end"]

    def _wait_for_all(self, seconds: float) -> Ended:
        """Waits until all have ended by themselves, at most `seconds`; returns those that have."""
        ended: Ended = []
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            ended += self._wait(deadline)
        return ended

    def _ask_to_end(self) -> None:
        """Sends SIGTERM to all; from now on their output goes to their logs only."""
        for replica in self._running.values():
            replica.muted = True
            replica.stop()

    def _stop(self, grace: float) -> None:
        """Ends all: SIGTERM, a grace period in seconds, then SIGKILL."""
        with processes.ignore_stop_signals():
            if grace:
                self._ask_to_end()
                self._wait_for_all(grace)
            for replica in self._running.values():
                replica.kill()
            for replica in list(self._running.values()):
                self._finish(replica)

    def _finish(self, replica: Replica) -> int:
        del self._running[replica.name]
        self._selector.unregister(replica.control)
        with contextlib.suppress(KeyError):
            self._selector.unregister(replica.pipe)
        code = replica.finish()
        self._history.add(replica.name, replica.started, code, replica.peak_memory, stopped=replica.muted)
        return code


def _describe_end(replica: Replica, code: int) -> str:
    if replica.preempted:
        return f"{replica.name} was preempted after {replica.age:.0f} s"
    if code == EXIT_RESTART:
        return f"{replica.name} asked for a restart after {replica.age:.0f} s"
    if replica.error is not None:
        return f"{replica.name} failed after {replica.age:.0f} s: {replica.error.text}"
    return f"{replica.name} {processes.describe_exit(code)} after {replica.age:.0f} s"


def _job_failure(replica: Replica, code: int) -> ProcessFailedError:
    hint = f"; {NO_NETWORK}" if replica.isolated and replica.reports_no_network else ""
    if (error := replica.error) is not None:
        return ProcessFailedError(error.text + hint, error.exit_code)
    message = f"{_describe_end(replica, code)} (its log: {replica.log}){hint}"
    return ProcessFailedError(message, EXIT_BAD_INPUT if code in _USER_ERRORS else EXIT_FAILED)
