"""When a replica that has ended is started again, and when the whole job is; no processes here."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Literal

Scope = Literal["replica", "job"]


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """How often something is started again within one job.

    Attributes:
        replica: After failures of one replica, in its place.
        job: After failures, all replicas together.
        preemption: After preemptions of any replica, which are no failures; the platform's own limit for
            SPOT machines.
    """

    replica: int = 1
    job: int = 1
    preemption: int = 6


class Restarts:
    """Decides, failure by failure, and counts.

    Args:
        limits: How often.
        whole_job: Whether a replica never restarts alone (restart_job_on_worker_restart).
    """

    def __init__(self, limits: RestartLimits, *, whole_job: bool) -> None:
        self._limits = limits
        self._whole_job = whole_job
        self._replicas: collections.Counter[str] = collections.Counter()
        self._jobs = 0
        self._preemptions = 0

    def after_preemption(self) -> tuple[Scope, str] | None:
        """Returns what starts again and which time this is, in words; None where it was one too many."""
        if self._preemptions == self._limits.preemption:
            return None
        self._preemptions += 1
        scope: Scope = "job" if self._whole_job else "replica"
        return scope, f"preemption {self._preemptions} of {self._limits.preemption}"

    def after_failure(self, replica: str) -> tuple[Scope, str] | None:
        """Returns what starts again and which time this is, in words; None where nothing does."""
        if not self._whole_job and self._replicas[replica] < self._limits.replica:
            self._replicas[replica] += 1
            return "replica", f"restart {self._replicas[replica]} of {self._limits.replica}"
        if self._jobs < self._limits.job:
            self._jobs += 1
            return "job", f"restart {self._jobs} of {self._limits.job}"
        return None
