"""Causes of failures: what is known of a failed task, exit codes in words, likely causes and what helps.

Pure, and the same in a notification as on a terminal.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardline.trainer.base import errors


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is known of a failed task; "", None and 0 stand for what is not known.

    Attributes:
        replica: Name of the replica that failed first, "worker-0" or "workerpool1-0".
        exit_code: As a shell has it, 137 for SIGKILL.
        error: The last message of the task, or of the platform, in one line.
        own_words: Whether `error` is one of Shardline's own messages, which say what to do as well.
        lines: The last lines of the log, without KFP's own.
        peak_memory: Peak memory of the replica, in bytes.
        restarts: How often the replica had been restarted.
    """

    task: str = ""
    replica: str = ""
    exit_code: int | None = None
    error: str = ""
    own_words: bool = False
    lines: tuple[str, ...] = ()
    peak_memory: int = 0
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A failure, explained; `failed` names task and replica, "" stands for what is not known."""

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


class Cause(NamedTuple):
    """One known cause: a regular expression of a message or log line, likely cause, and what to do next.

    The expression's first group takes the place of {0} in the other two.
    """

    looks: str
    words: str
    remedy: str


#: Known causes, the more specific ones first. What comes from the platform stands before what any program
#: may print, and a crash before what other replicas say once it has happened.
CAUSES = (
    Cause(
        r"quota metrics? exceed.*?([\w.-]+\.googleapis\.com/\w+)|[Qq]uota exceeded for.*?metric '([^']+)'",
        "the quota {0} is used up",
        "ask for more of it (console: IAM and admin, quotas), wait for other jobs to end, or choose other "
        "machines or another region",
    ),
    Cause(
        r"Resources are insufficient in region:? ?([\w-]+)|stockout|ZONE_RESOURCE_POOL_EXHAUSTED",
        "the region has no such machine free at present",
        "try again later, choose another machine or region, or use strategy FLEX_START, which waits",
    ),
    Cause(
        r"ImagePull|[Ff]ailed to pull image|[Uu]nable to pull|"
        r"[Ii]mage \S+ (?:is not found|not found|does not exist)|manifest unknown",
        "the container image cannot be pulled",
        "check that its name and tag exist in Artifact Registry, and grant the service agents of Vertex AI "
        "roles/artifactregistry.reader on it; 'shardline doctor' checks both",
    ),
    Cause(
        r"[Pp]ermission '?([a-z]+(?:\.[a-zA-Z]+){2,})'? denied"
        r"|does not have ([a-z]+(?:\.[a-zA-Z]+){2,}) access",
        "the service account lacks the permission {0}",
        "grant the run's service account a role that has it; 'shardline doctor' checks the usual ones",
    ),
    Cause(
        r"PERMISSION_DENIED|PermissionDenied|403 Forbidden|Error 403|Permission denied",
        "permission denied",
        "grant the run's service account (on this machine: your user) access to what the message names; "
        "'shardline doctor' checks the usual roles",
    ),
    Cause(
        r"ran out.of.memory|OOMKilled|Out of memory|MemoryError|Cannot allocate memory",
        "out of memory",
        "lower per_replica_batch_size or the size of the images, use fewer processes, or a machine with more "
        "memory (machine_type, n1-highmem-8)",
    ),
    Cause(
        r"CUDA_ERROR_OUT_OF_MEMORY|OOM when allocating|ResourceExhaustedError|RESOURCE_EXHAUSTED: Out of",
        "the accelerator or the machine is out of memory: a tensor could not be allocated",
        "lower per_replica_batch_size, set mixed precision in train_options, or choose an accelerator with "
        "more memory",
    ),
    Cause(
        r"No space left on device|ENOSPC",
        "the disk is full",
        "raise boot_disk_size_gb (on this machine: free space in the run directory and in TMPDIR)",
    ),
    Cause(
        r"[Ll]oss is not finite|[Ll]oss is (?:nan|inf)\b|: (?:Inf|NaN) (?:and (?:Inf|NaN) )?values",
        "training has diverged",
        "lower learning_rate, clip gradients (the optimizer's clipnorm), or look for broken examples and "
        "labels in the shards that the message names; the same again would come to the same end",
    ),
    Cause(
        r"model '([^']+)' failed: ",
        "the model function {0} itself raises an error",
        "correct the line that the message names; 'shardline train --model {0}' is the quickest way to try",
    ),
    Cause(
        r"No module named '?([\w.]+)",
        "the Python module {0} is not there",
        "install it in the image (on this machine: in this environment), or correct the name",
    ),
    Cause(
        r"no file matches|[Nn]o such file or directory: ?'?([^'\s]*)|NoSuchKey|No such object|404.*\bb/",
        "data is missing",
        "check that the path exists and is readable from where the task runs; gs:// paths need the service "
        "account's access to the bucket",
    ),
    Cause(r"[Aa]ddress already in use", "a port was taken", "start the run again"),
    Cause(
        r"DEADLINE_EXCEEDED|[Tt]imed out|its timeout of [\d.]+ s has passed",
        "something took longer than its timeout",
        "raise the timeout ([train.job] timeout) if the work is that long, else look for what was waited for",
    ),
    Cause(
        r"UNAVAILABLE|UnavailableError|[Cc]onnection reset|Socket closed",
        "another replica went away",
        "look at the log of the replica that ended first; with restart_job_on_worker_restart all start again",
    ),
)

_CRASH = (
    "a crash in native code: a library that does not fit the others or the machine, or damaged data",
    "compare the installed versions with constraints.txt ('shardline doctor --local' does), then look at the "
    "last lines of the log",
)
_RESTART = "start the run again; training goes on from its last checkpoint where it has one"
_IMAGE = "look at the image and its entry point"
#: What exit codes mean, of signals as a shell has them, and what to do where a process left no message.
_EXITS = {
    137: (
        "most likely out of memory, or killed by hand",
        "lower per_replica_batch_size, image_size or preprocess_processes, or use a machine with more memory",
    ),
    **dict.fromkeys((132, 134, 135, 139), _CRASH),
    143: ("asked to stop: preempted, cancelled, or past its timeout", _RESTART),
    130: ("interrupted", _RESTART),
    126: ("the command is not executable", _IMAGE),
    127: ("the command was not found", _IMAGE),
    errors.EXIT_FAILED: ("the program failed", ""),
    errors.EXIT_BAD_INPUT: ("a mistake in what was given; trying again cannot help", ""),
    errors.EXIT_PLATFORM: ("a service refused, failed or was not reached", ""),
    errors.EXIT_CANCELLED: ("cancelled", ""),
    errors.EXIT_CRASH: ("an error that nobody foresaw; its crash file says more", ""),
    errors.EXIT_RESTART: ("asked to be started again", ""),
}


def exit_code(value: int | str) -> int:
    """Returns an exit status, negative for a signal or a signal's name, as a shell has it."""
    if isinstance(value, str):
        value = -signal.Signals[value]
    return 128 - value if value < 0 else value


def exit_meaning(code: int) -> str:
    """Returns what an exit status means: "SIGKILL (exit code 137): most likely out of memory, ..."."""
    if code - 128 in set(signal.Signals):
        meaning, _ = _EXITS.get(code, ("", ""))
        return f"{signal.Signals(code - 128).name} (exit code {code})" + (f": {meaning}" if meaning else "")
    meaning, _ = _EXITS.get(code, ("the program's own; its log says more", ""))
    return f"exit code {code}: {meaning}"


def explain(failure: Failure) -> Explanation:
    """Judges what is known of a failure.

    The message of the task or of the platform counts before how a process ended, and that before the log: a
    process that was killed says nothing, and the others complain of it.
    """
    ended = _EXITS.get(failure.exit_code or 0, ("", ""))
    cause, remedy = (
        _match([failure.error]) or (ended if ended[1] else None) or _match(failure.lines[::-1]) or ("", "")
    )
    if failure.own_words:
        # Shardline's own messages end with what to do; only where one does not, the known cause helps.
        _, semicolon, told = failure.error.rpartition("; ")
        if failure.exit_code == errors.EXIT_BAD_INPUT and not cause:
            cause = "a mistake in what was given to the run; the same again would fail again"
        remedy = remedy or (told if semicolon else "correct what the message names and start the run again")
    exit_parts = [] if failure.exit_code is None else [exit_meaning(failure.exit_code)]
    if failure.restarts:
        exit_parts.append(f"after {failure.restarts} restart{'s' if failure.restarts > 1 else ''}")
    if failure.peak_memory:
        exit_parts.append(f"peak memory {failure.peak_memory / 2**20:,.0f} MiB")
    return Explanation(
        failed=", replica ".join(item for item in (failure.task, failure.replica) if item) or "unknown",
        exit="; ".join(exit_parts),
        error=failure.error,
        cause=cause,
        next_step=remedy or "look at the whole log of the task",
        lines=failure.lines,
    )


def _match(lines: Sequence[str]) -> tuple[str, str] | None:
    for cause in CAUSES:
        for line in lines:
            if found := re.search(cause.looks, line):
                group = next((item for item in found.groups() if item), "")
                return cause.words.format(group), cause.remedy.format(group)
    return None
