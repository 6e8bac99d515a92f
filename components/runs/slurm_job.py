"""Job of Slurm: its state, why it waits or has failed, and its end on request, by Slurm's own commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job as Slurm sees it now.

    Attributes:
        id: Id, "1234".
        state: "waiting", "running", "succeeded", "failed" or "cancelled".
        word: Slurm's own word, such as OUT_OF_MEMORY.
        reason: Slurm's reason of waiting or of a failure, such as Resources or NodeDown; "" for none.
        exit_code: Exit code of the script; None while it has none.
        restarts: How often Slurm has started it again.
        nodes: Its nodes, as in "n[1-2]"; "" where it has none.
        seconds: Seconds since its start; None before.
        elements: State of each element of an array, by its number; empty for any other job.
    """

    id: str
    state: str
    word: str
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    nodes: str = ""
    seconds: float | None = None
    elements: Mapping[int, str] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether its state is final."""
        return self.state in ("succeeded", "failed", "cancelled")


def read_job(job_id: str) -> SlurmJob:
    """Reads the state of a job.

    Raises:
        SettingsError: When Slurm knows no such job, or is not installed here.
        PlatformError: When Slurm is not reached.
    """
    raise NotImplementedError


def cancel_job(job_id: str) -> None:
    """Asks Slurm to end a job, or all elements of an array; raises as `read_job`."""
    raise NotImplementedError
