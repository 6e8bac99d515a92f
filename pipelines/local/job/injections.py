"""Fault injection (--inject): failures in the replicas of a running job."""

from __future__ import annotations

import math
import re
import sched
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardline.pipelines.engines.custom_job import ROLES
from shardline.pipelines.local.job.replica import Replica
from shardline.trainer.base import progress
from shardline.trainer.base.errors import PipelineError, SettingsError

_FORMS = "preempt:worker:0@step=30, kill:chief@t=5s or slow:worker:1=2x"
_TEXT = re.compile(
    rf"(?P<replica>({'|'.join(ROLES)})(:\d+)?)"
    r"(@(step=(?P<step>\d+)|t=(?P<seconds>\d+(\.\d+)?)s)|=(?P<factor>\d+(\.\d+)?)x)"
)


@dataclass(frozen=True)
class Injection:
    """A failure of one replica, at a training step, or so many seconds after the start of the job.

    "preempt" ends it as the platform does with a SPOT machine, "kill" kills it, "slow" makes it so many times
    slower from the start.
    """

    action: Literal["preempt", "kill", "slow"]
    replica: str
    step: int | None = None
    seconds: float | None = None
    factor: float = 1.0


def parse_injection(text: str) -> Injection:
    """Parses the text of --inject; raises SettingsError for another form than those of `_FORMS`."""
    action, _, rest = text.partition(":")
    match = _TEXT.fullmatch(rest)
    if match is None or action not in ("preempt", "kill", "slow"):
        raise SettingsError(f"--inject takes {_FORMS}, got {text!r}")
    step, seconds, factor = match["step"], match["seconds"], match["factor"]
    if (action == "slow") != (factor is not None):
        raise SettingsError(
            f"--inject {action} takes {'=2x' if action == 'slow' else '@step=30 or @t=5s'}, got {text!r}"
        )
    if factor is not None and not 1 < float(factor) <= 100:
        raise SettingsError(f"--inject slow takes a factor above 1 and up to 100, got {text!r}")
    role, _, index = match["replica"].partition(":")
    return Injection(
        action,  # type: ignore[arg-type]  # one of the three
        f"{role}-{int(index or 0)}",
        step=int(step) if step else None,
        seconds=float(seconds) if seconds else None,
        factor=float(factor or 1),
    )


#: Seconds between the notice and the end of a preempted SPOT machine.
PREEMPTION_GRACE_S = 30.0


class FaultInjector:
    """The injections of one job, whose replicas have the names in `names`; reported under `topic`.

    Raises PipelineError when an injection names a replica that the job does not have.
    """

    def __init__(self, injections: Sequence[Injection], names: Sequence[str], topic: str) -> None:
        for injection in injections:
            if injection.replica not in names:
                raise PipelineError(
                    f"--inject names {injection.replica}, but the job's replicas are {', '.join(names)}"
                )
        self._topic = topic
        self._injections = injections
        self._waiting = [injection for injection in injections if injection.action != "slow"]
        self._scheduler = sched.scheduler(time.monotonic)
        self._replicas: Mapping[str, Replica] = {}
        self._step = 0

    def start(self, replicas: Mapping[str, Replica]) -> None:
        """Starts the clock; `replicas` has the running replicas by name, and is updated by the job."""
        self._replicas = replicas
        for injection in self._injections:
            if injection.action == "slow":
                self._cycle(injection, True)
            elif injection.seconds is not None:
                self._scheduler.enter(injection.seconds, 0, self._inject, (injection,))

    def record_step(self, step: int) -> None:
        """Records how many steps a replica has trained."""
        self._step = max(self._step, step)

    @property
    def next_time(self) -> float:
        """Time of the next call of `act`, by the monotonic clock."""
        return math.inf if self._scheduler.empty() else self._scheduler.queue[0].time

    def act(self) -> None:
        """Injects the failures that are due."""
        self._scheduler.run(blocking=False)
        for injection in list(self._waiting):
            if injection.step is not None and self._step >= injection.step:
                self._inject(injection)

    def end(self) -> None:
        """Reports the failures that were not injected."""
        for injection in self._waiting:
            when = f"step {injection.step}" if injection.step is not None else f"{injection.seconds:g} s"
            what = f"{injection.action} {injection.replica} at {when}"
            progress.report(self._topic, f"not injected: {what}; the job ended first")

    def _inject(self, injection: Injection) -> None:
        self._waiting.remove(injection)
        what, replica = f"{injection.action} {injection.replica}", self._replicas.get(injection.replica)
        if replica is None:
            progress.report(self._topic, f"not injected: {what}, which has ended")
            return
        progress.report(self._topic, f"injected: {what}")
        if injection.action == "kill":
            replica.kill()
        else:
            replica.preempted = True
            replica.stop()
            self._scheduler.enter(PREEMPTION_GRACE_S, 0, self._reclaim, (replica,))

    def _reclaim(self, replica: Replica) -> None:
        if self._replicas.get(replica.name) is replica:  # otherwise it has ended in time
            replica.kill()

    def _cycle(self, injection: Injection, pause: bool) -> None:
        """Pauses a slow replica for a part of a cycle of 0.2 s, then resumes it for the rest."""
        if replica := self._replicas.get(injection.replica):
            (replica.pause if pause else replica.resume)()
        share = 1 / injection.factor
        seconds = 0.2 * (1 - share if pause else share)
        self._scheduler.enter(seconds, 0, self._cycle, (injection, not pause))
