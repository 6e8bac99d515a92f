"""Why a run failed, in words that help: pure, and the same in a notification as on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardline.components.conclude.causes import find_cause
from shardline.components.conclude.exits import in_words
from shardline.components.conclude.failure import Failure
from shardline.trainer.errors import EXIT_BAD_INPUT

_UNKNOWN = "look at the whole log of the task"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A failure, explained.

    Attributes:
        failed: Task and replica: "train, replica worker-0".
        exit: Exit code in words, and what was measured; "" where it is not known.
        error: What the task has said of its end, or the platform; "" where neither has.
        cause: Likely cause; "" where none is known.
        next_step: What to do.
        lines: The last lines of the log.
    """

    failed: str
    exit: str
    error: str
    cause: str
    next_step: str
    lines: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Returns names and values, without the lines of the log and without what is not known."""
        rows = [
            ("failed step", self.failed),
            ("exit", self.exit),
            ("error", self.error),
            ("likely cause", self.cause),
            ("next step", self.next_step),
        ]
        return [(name, value) for name, value in rows if value]


def explain(failure: Failure) -> Explanation:
    """Judges what is known of a failure."""
    cause, remedy = find_cause(failure)
    if failure.own_words:
        # Shardline's own messages end with what to do; only where one does not, the known cause helps.
        cause, remedy = _from_message(failure, cause, remedy)
    return Explanation(
        failed=", replica ".join(item for item in (failure.task, failure.replica) if item) or "unknown",
        exit=_exit(failure),
        error=failure.error,
        cause=cause,
        next_step=remedy or _UNKNOWN,
        lines=failure.lines,
    )


def _from_message(failure: Failure, cause: str, remedy: str) -> tuple[str, str]:
    _, _, told = failure.error.rpartition("; ")
    if failure.exit_code == EXIT_BAD_INPUT and not cause:
        cause = "a mistake in what was given to the run; the same again would fail again"
    if not remedy and told != failure.error:
        remedy = told
    return cause, remedy or "correct what the message names and start the run again"


def _exit(failure: Failure) -> str:
    return "; ".join(_exit_parts(failure))


def _exit_parts(failure: Failure) -> Iterator[str]:
    if failure.exit_code is not None:
        yield in_words(failure.exit_code)
    if failure.restarts:
        yield f"after {failure.restarts} restart{'s' if failure.restarts > 1 else ''}"
    if failure.peak_memory:
        yield f"peak memory {failure.peak_memory / 2**20:,.0f} MiB"
