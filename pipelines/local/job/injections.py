"""Fault injection (--inject): kills replicas of a running job, and preempts them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from shardline.components.vertex.payload import ROLES
from shardline.pipelines.local.job.replica import Replica
from shardline.trainer.base import progress
from shardline.trainer.base.errors import PipelineError, SettingsError

#: Seconds between the notice and the end of a preempted SPOT machine.
PREEMPTION_GRACE_S = 30.0
_TEXT = re.compile(rf"(preempt|kill):({'|'.join(ROLES)})(?::(\d+))?@(?:step=(\d+)|t=(\d+(?:\.\d+)?)s)")


class Injection(NamedTuple):
    """A failure of a replica, kill or preempt, at a training step or seconds after the start of the job."""

    action: str
    replica: str
    step: float = inf
    seconds: float = inf


def parse_injection(text: str) -> Injection:
    """Parses the text of --inject; raises SettingsError for another form."""
    if (match := _TEXT.fullmatch(text)) is None:
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
