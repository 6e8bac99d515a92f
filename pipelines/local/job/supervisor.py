"""Supervisor of a custom job on this machine: starts, watches, restarts and stops its replicas.

It injects the failures of --inject, too: kills and preemptions of replicas of a running job.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import re
import secrets
import selectors
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from shardline.components.custom_job import ROLES
from shardline.components.text import table, timestamp
from shardline.pipelines.local import process
from shardline.pipelines.local.job import custom_job as cluster
from shardline.pipelines.local.job.custom_job import CustomJob, ShowLine
from shardline.trainer.base import crash, files, progress
from shardline.trainer.base.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_RESTART,
    PipelineError,
    RunError,
    SettingsError,
)
from shardline.trainer.base.progress import Event
from shardline.trainer.cluster import ACCELERATORS_VARIABLE, SECRET_VARIABLE, without_proxy

#: Seconds that workers have to end by themselves after the chief has succeeded.
_WORKERS_END_S = 2.0
#: Seconds between SIGTERM and SIGKILL for replicas that have nothing left to save.
_BRIEF_GRACE_S = 1.0
#: Exit codes of user errors, without a retry: the last two are a command that cannot be executed. The
#: trainer's fail-fast marker would end the next attempt, too; here the error of any program ends the job.
_USER_ERRORS = (EXIT_BAD_INPUT, 126, 127)
#: Seconds between the notice and the end of a preempted SPOT machine.
PREEMPTION_GRACE_S = 30.0
#: Form of --inject.
_INJECTION = re.compile(rf"(preempt|kill):({'|'.join(ROLES)})(?::(\d+))?@(?:step=(\d+)|t=(\d+(?:\.\d+)?)s)")

#: Replicas that have ended, with their exit status.
Ended = list[tuple["Replica", int]]
#: Starts the replica of that name, which reports its events to the function.
Start = Callable[[str, Callable[[Event], None]], "Replica"]


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
    of `network.NETWORKS`.

    Raises:
        ProcessFailedError: When a replica failed; its exit_code is EXIT_BAD_INPUT after a user error, which
            is not retried.
        RunError: When the job's timeout has passed.
        PipelineError: When there is no such command, or an injection names no replica of the job.
        Stopped: When a signal stopped this process.
    """
    names = [member.name for member in cluster.replicas(job)]
    injector = FaultInjector(injections, names, topic)
    with (
        process.stop_on_signals(),
        process.job_network(len(names), topic, network) as shared,
        process.scratch_directory() as temporary,
    ):
        launches = make_launches(job, shared, temporary, log_directory)
        log_directory.mkdir(parents=True, exist_ok=True)
        history = History(job.display_name, names)
        progress.report(topic, f"starting {', '.join(names)}")
        with history.recorded(log_directory, topic), process.fork_server_of_job([*launches.values()]):
            _RunningJob(
                job,
                injector,
                history,
                lambda name, report: Replica(name, launches[name], log_directory, show_line, report),
                topic,
            ).run_to_end()
        injector.end()


class History:
    """Content of job.json: starts and ends of every replica of a job, in seconds since the job's start."""

    def __init__(self, display_name: str, names: Sequence[str]) -> None:
        self._display_name = display_name
        self._created = timestamp(datetime.datetime.now(datetime.UTC).replace(microsecond=0))
        self._began = time.monotonic()
        self._starts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def add(self, replica: Replica, code: int) -> None:
        """Adds a replica that has ended, with its exit status; a muted one was stopped by the job."""
        self._starts[replica.name].append(
            {
                "start_s": round(replica.started - self._began, 3),
                "end_s": self._now(),
                "exit": process.signal_name(code) or code,
                "stopped": replica.muted,
                "peak_memory_bytes": replica.peak_memory,
            }
        )

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
        except process.Stopped as error:
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
        self._deadline = time.monotonic() + (inf if job.timeout is None else job.timeout)

    def run_to_end(self) -> None:
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
        except process.ProcessFailedError:
            grace = _BRIEF_GRACE_S
            raise
        except (RunError, process.Stopped):
            grace = process.GRACE_S
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
        preemption are counted separately. Raises process.ProcessFailedError when no restart is left.
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
            ended = self._wait_for_all(process.GRACE_S)
            self._awaited -= {replica.name for replica, code in ended if code == 0}
            if not self._awaited:
                return True
            self._ask_to_end()
            self._wait_for_all(PREEMPTION_GRACE_S - process.GRACE_S)
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
            if what == "output" and not replica.read_output():
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
        with process.ignore_stop_signals():
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
        self._history.add(replica, code)
        return code


def _describe_end(replica: Replica, code: int) -> str:
    if replica.preempted:
        return f"{replica.name} was preempted after {replica.age:.0f} s"
    if code == EXIT_RESTART:
        return f"{replica.name} asked for a restart after {replica.age:.0f} s"
    if replica.error is not None:
        return f"{replica.name} failed after {replica.age:.0f} s: {replica.error.text}"
    return f"{replica.name} {process.describe_exit(code)} after {replica.age:.0f} s"


def _job_failure(replica: Replica, code: int) -> process.ProcessFailedError:
    hint = f"; {process.NO_NETWORK}" if replica.isolated and replica.reports_no_network else ""
    if (error := replica.error) is not None:
        return process.ProcessFailedError(error.text + hint, error.exit_code)
    message = f"{_describe_end(replica, code)} (its log: {replica.log}){hint}"
    return process.ProcessFailedError(message, EXIT_BAD_INPUT if code in _USER_ERRORS else EXIT_FAILED)


class Injection(NamedTuple):
    """A failure of a replica, kill or preempt, at a training step or seconds after the start of the job."""

    action: str
    replica: str
    step: float = inf
    seconds: float = inf


def parse_injection(text: str) -> Injection:
    """Parses the text of --inject; raises SettingsError for another form."""
    if (match := _INJECTION.fullmatch(text)) is None:
        raise SettingsError(f"--inject takes preempt:worker:0@step=30 or kill:chief@t=5s, got {text!r}")
    action, role, index, step, seconds = match.groups()
    return Injection(action, f"{role}-{int(index or 0)}", float(step or inf), float(seconds or inf))


class FaultInjector:
    """The injections of one job that starts now; `step` is how many steps its replicas have trained.

    Raises PipelineError when an injection names a replica that is not among `names`.
    """

    def __init__(self, injections: Sequence[Injection], names: Sequence[str], topic: str) -> None:
        for each in injections:
            if each.replica not in names:
                known = ", ".join(names)
                raise PipelineError(f"--inject names {each.replica}, but the job's replicas are {known}")
        self.step = 0
        self._topic, self._waiting, self._began = topic, list(injections), time.monotonic()
        self._reclaimed: dict[Replica, float] = {}

    @property
    def next_time(self) -> float:
        """Time of the next call of `act`, by the monotonic clock."""
        return min([*(self._began + each.seconds for each in self._waiting), *self._reclaimed.values(), inf])

    def act(self, running: Mapping[str, Replica]) -> None:
        """Injects the failures that are due into the running replicas."""
        now = time.monotonic()
        seconds = now - self._began
        for each in [it for it in self._waiting if self.step >= it.step or seconds >= it.seconds]:
            self._waiting.remove(each)
            replica, words = running.get(each.replica), f"injected: {each.action} {each.replica}"
            progress.report(self._topic, words if replica else f"not {words}, which has ended")
            if replica and each.action == "kill":
                replica.kill()
            elif replica:
                replica.preempted = True
                replica.stop()
                self._reclaimed[replica] = now + PREEMPTION_GRACE_S
        for replica in [replica for replica, end in self._reclaimed.items() if end <= now]:
            del self._reclaimed[replica]
            if running.get(replica.name) is replica:  # otherwise it has ended in time
                replica.kill()

    def end(self) -> None:
        """Reports the failures that were not injected."""
        for each in self._waiting:
            when = f"step {each.step:g}" if each.step < inf else f"{each.seconds:g} s"
            what = f"{each.action} {each.replica} at {when}"
            progress.report(self._topic, f"not injected: {what}; the job ended first")


def make_launches(
    job: CustomJob, network: tuple[Sequence[str], Sequence[int]], temporary: Path, log_directory: Path
) -> dict[str, process.Launch]:
    """Returns the launch of each replica by name, the chief first.

    Its environment is this process's, overridden by the pool's and the platform's. Temporary files go
    to the directory `temporary`, crash files next to the logs, unless the job is part of a run. Raises
    PipelineError when there is no such command on this machine.
    """
    addresses, namespaces = network
    job_id, secret = f"{time.time_ns()}", secrets.token_hex()
    crashes = os.environ.get(crash.DIRECTORY_VARIABLE, str(log_directory.absolute()))
    # "python3" in a replica's command is the Python of this environment.
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    shared = {"PATH": path, "TMPDIR": str(temporary), crash.DIRECTORY_VARIABLE: crashes}
    launches = {}
    for member in cluster.replicas(job):
        pool = job.worker_pools[member.pool]
        # Without what describes the platform's machines.
        own = {name: value for name, value in pool.variables.items() if name != ACCELERATORS_VARIABLE}
        env = {
            **process.child_environment(shared | own),
            **cluster.environment(job, member, addresses, job_id),
            **without_proxy(os.environ | own, addresses),
            SECRET_VARIABLE: secret,
        }
        if shutil.which(pool.argv[0], path=env["PATH"]) is None:
            raise PipelineError(
                f"{member.name} cannot be started: there is no command {pool.argv[0]!r} on this machine; "
                "install it, or correct the command in container_spec"
            )
        launches[member.name] = process.Launch(pool.argv, env, namespaces)
    return launches


class Replica(process.GuardedProcess):
    """A running replica, named by role and number, as in "worker-0".

    Every line goes to the log file, events (`trainer.base.progress`) as readable lines. Events are passed on,
    the first error is kept until the end of the job, and every other line is shown, unless `muted`. It is
    `preempted` once it has the notice of a preemption. `started` is a time of the monotonic clock.
    """

    def __init__(
        self,
        name: str,
        launch: process.Launch,
        logs: Path,
        show: ShowLine,
        report: Callable[[Event], None],
    ) -> None:
        """Starts the replica, and opens its log file in `logs` to append.

        `show` receives name and line, `report` all events but errors.
        """
        self.name = name
        self.log = logs / f"{name}.log"
        self.error: Event | None = None
        self.muted = False
        self.reports_no_network = False
        self.isolated = bool(launch.namespaces)  # in its job's own network
        self.preempted = False
        self._show = show
        self._report = report
        self._file = self.log.open("a", encoding="utf-8", buffering=1)
        self.started = time.monotonic()
        super().__init__(launch, self._handle_line)

    @property
    def is_user_error(self) -> bool:
        """Whether the replica has reported a user error."""
        return self.error is not None and self.error.exit_code == EXIT_BAD_INPUT

    @property
    def age(self) -> float:
        """Seconds since the replica was started."""
        return time.monotonic() - self.started

    def finish(self) -> int:
        """Ends it, and closes its log file; returns the exit status."""
        code = super().finish()
        self._file.close()
        return code

    def _handle_line(self, line: str) -> None:
        event = progress.parse(line)
        self.reports_no_network = self.reports_no_network or process.UNREACHABLE.search(line) is not None
        self._file.write((line if event is None else progress.render(event)) + "\n")
        if event is None:
            if not self.muted:
                self._show(self.name, line)
        elif event.kind != "error":
            self._report(event)
        elif self.error is None:
            self.error = event
