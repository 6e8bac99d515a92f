"""What is known of a failed task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The evidence, before anybody has judged it.

    Attributes:
        task: Name of the task; "" where not even that is known.
        replica: Name of the replica that failed first, "worker-0" or "workerpool1-0"; "" for a task that is
            one process.
        exit_code: As a shell has it, 137 for SIGKILL; None where it is not known.
        error: What the task has said of its end, or the platform, in one line.
        own_words: Whether `error` is one of Shardline's own messages, which say what to do as well.
        lines: The last lines of the log, without what KFP itself has written there.
        peak_memory: Of the replica, in bytes; 0 where nobody has measured it.
        restarts: How often the replica had been started again.
    """

    task: str = ""
    replica: str = ""
    exit_code: int | None = None
    error: str = ""
    own_words: bool = False
    lines: tuple[str, ...] = ()
    peak_memory: int = 0
    restarts: int = 0
