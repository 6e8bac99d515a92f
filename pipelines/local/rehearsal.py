"""Makes injected failures happen to the replicas of a running job.

A failure that is made to happen, as a plain value.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardline.pipelines.local.job import ROLES
from shardline.pipelines.local.replica import Replica
from shardline.trainer import progress
from shardline.trainer.errors import PipelineError, SettingsError

_FORMS = "preempt:worker:0@step=30, kill:chief@t=5s or slow:worker:1=2x"
_TEXT = re.compile(
    rf"(?P<replica>({'|'.join(ROLES)})(:\d+)?)"
    r"(@(step=(?P<step>\d+)|t=(?P<seconds>\d+(\.\d+)?)s)|=(?P<factor>\d+(\.\d+)?)x)"
)


@dataclass(frozen=True)
class Injection:
    """What happens to one replica, and when.

    Attributes:
        action: "preempt" takes its machine away as the platform does with a SPOT machine, "kill" kills
            it, "slow" has it run slower from the start.
        replica: Name of the replica, as in "worker-0".
        step: Training step at which it happens, or None.
        seconds: Time since the start of the job at which it happens, or None.
        factor: How many times slower.
    """

    action: Literal["preempt", "kill", "slow"]
    replica: str
    step: int | None = None
    seconds: float | None = None
    factor: float = 1.0


def parse_injection(text: str) -> Injection:
    """Reads an injection as users write it.

    Raises:
        SettingsError: When the text has another form than preempt:worker:0@step=30, kill:chief@t=5s
            or slow:worker:1=2x.
    """
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
#: Seconds of one turn of running and standing still.
_TURN_S = 0.2


class Rehearsal:
    """The injections of one job.

    Args:
        injections: What is to happen.
        names: Names of the job's replicas.
        topic: Name under which to report.

    Raises:
        PipelineError: When an injection names a replica that the job does not have.
    """

    def __init__(self, injections: Sequence[Injection], names: Sequence[str], topic: str) -> None:
        for injection in injections:
            if injection.replica not in names:
                raise PipelineError(
                    f"--inject names {injection.replica}, but the job's replicas are {', '.join(names)}"
                )
        self._topic = topic
        self._waiting = [injection for injection in injections if injection.action != "slow"]
        self._slow = {item.replica: item.factor for item in injections if item.action == "slow"}
        self._turns = dict.fromkeys(self._slow, (0.0, False))
        self._ends: dict[str, float] = {}
        self._started = math.inf
        self._step = 0

    def start(self) -> None:
        """Starts the clock: the replicas are about to start."""
        self._started = time.monotonic()

    def note_step(self, step: int) -> None:
        """Hears how many steps a replica has trained."""
        self._step = max(self._step, step)

    @property
    def next_time(self) -> float:
        """When `act` has to be called next, by the monotonic clock."""
        times = [self._started + item.seconds for item in self._waiting if item.seconds is not None]
        times += self._ends.values()
        times += [time for time, _ in self._turns.values()]
        return min(times, default=math.inf)

    def act(self, replicas: Mapping[str, Replica]) -> None:
        """Does all that is due."""
        now = time.monotonic()
        for injection in [item for item in self._waiting if self._is_due(item, now)]:
            self._waiting.remove(injection)
            self._inject(injection, replicas, now)
        for name, end in list(self._ends.items()):
            replica = replicas.get(name)
            if replica is None or not replica.preempted:
                del self._ends[name]
            elif now >= end:
                del self._ends[name]
                replica.kill()
        for name, (turn, standing) in self._turns.items():
            if now >= turn:
                self._turns[name] = self._turn(name, standing, replicas, now)

    def end(self) -> None:
        """Reports what has not happened."""
        for injection in self._waiting:
            when = f"step {injection.step}" if injection.step is not None else f"{injection.seconds:g} s"
            progress.say(
                self._topic,
                f"not injected: {injection.action} {injection.replica} at {when}; the job ended first",
            )

    def _is_due(self, injection: Injection, now: float) -> bool:
        if injection.step is not None:
            return self._step >= injection.step
        return injection.seconds is not None and now >= self._started + injection.seconds

    def _inject(self, injection: Injection, replicas: Mapping[str, Replica], now: float) -> None:
        replica = replicas.get(injection.replica)
        if replica is None:
            progress.say(
                self._topic, f"not injected: {injection.action} {injection.replica}, which has ended"
            )
            return
        progress.say(self._topic, f"injected: {injection.action} {injection.replica}")
        if injection.action == "kill":
            replica.kill()
        else:
            replica.preempted = True
            replica.stop()
            self._ends[replica.name] = now + PREEMPTION_GRACE_S

    def _turn(
        self, name: str, standing: bool, replicas: Mapping[str, Replica], now: float
    ) -> tuple[float, bool]:
        """Lets a slow replica run for its share of the next turn, or stand still for the rest of it."""
        running = _TURN_S / self._slow[name]
        if (replica := replicas.get(name)) is None:
            return now + _TURN_S, False
        if standing:
            replica.resume()
            return now + running, False
        replica.pause()
        return now + _TURN_S - running, True
