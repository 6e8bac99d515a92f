"""Causes of failures: the lines of a log that matter, exit codes explained, likely causes, next steps.

Pure functions, used for notifications and on the terminal.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardline.trainer.base import errors

#: The number of last lines that explain a failure.
_LAST_LINES = 12

_REPLICA = re.compile(r"((?:chief|worker|ps|evaluator)-\d+) \| (.*)", re.DOTALL)
#: An error as `shardline.trainer.base.progress` renders it; "pipeline:" repeats a task's.
_ERROR = re.compile(r"(?!pipeline:)(\w+): error: (.*)")
_KFP = re.compile(r"\[KFP Executor [^]]*\]: ")
#: Beginnings of lines that continue one of KFP's: a JSON document.
_JSON = ("{", "}", " ")


class KfpLines:
    """Recognizes KFP's own lines in the interleaved output of several processes."""

    def __init__(self) -> None:
        self._in_kfp: set[str] = set()

    def has(self, text: str, source: str = "") -> bool:
        """Whether the next line of a process is KFP's own, or empty; `source` identifies the process."""
        if _KFP.match(text):
            self._in_kfp.add(source)
            return True
        if source in self._in_kfp and text.startswith(_JSON):
            return True
        self._in_kfp.discard(source)
        return not text.strip()


def readable(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines that are neither KFP's own nor empty.

    Lines of several processes begin with the name of their replica: "worker-0 | ...".
    """
    kfp = KfpLines()
    for line in lines:
        replica, text = split_replica(line)
        if not kfp.has(text, replica):
            yield line


def split_replica(line: str) -> tuple[str, str]:
    """Returns the name of the replica at the beginning of a line, "" for none, and the rest."""
    match = _REPLICA.fullmatch(line)
    return (match[1], match[2]) if match else ("", line)


def own_error(lines: Iterable[str]) -> str:
    """Returns the message of Shardline's last error among lines; "" for none."""
    errors = [match[2] for line in lines if (match := _ERROR.fullmatch(line))]
    return errors[-1] if errors else ""


def last_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """Returns the last readable lines, without Shardline's own errors."""
    return tuple(line for line in readable(lines) if not _ERROR.fullmatch(line))[-_LAST_LINES:]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A failure, explained; `failed` names task and replica; "" for what is not known."""

    failed: str
    exit: str = ""
    error: str
    cause: str
    next_step: str
    lines: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, str]]:
        """Returns names and values of what is known, without the lines of the log."""
        rows = [
            ("failed step", self.failed),
            ("exit", self.exit),
            ("error", self.error),
            ("likely cause", self.cause),
            ("next step", self.next_step),
        ]
        return [(name, value) for name, value in rows if value]


class Cause(NamedTuple):
    """One known cause: a regular expression of a message or log line, a description, and what to do next.

    The expression's first group replaces {0} in the other two.
    """

    pattern: str
    description: str
    remedy: str


#: Known causes, the more specific ones first: messages of the platform before those of any program, and a
#: crash before the complaints of other replicas.
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
        "lower per_replica_batch_size, set precision=bfloat16, or choose an accelerator with more memory",
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
        "correct the line that the message names; 'shardline train DATASET OUT --model {0}' tries it",
    ),
    Cause(
        r"No module named '?([\w.]+)",
        "the Python module {0} is not installed",
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
        "raise the timeout ([train.job] timeout) if the work takes that long, else find what blocked it",
    ),
    Cause(
        r"UNAVAILABLE|UnavailableError|[Cc]onnection reset|Socket closed",
        "another replica ended",
        "look at the log of the replica that ended first; with restart_job_on_worker_restart all restart",
    ),
)

_CRASH = (
    "a crash in native code: incompatible libraries, a library built for another machine, or damaged data",
    "look at the versions that 'shardline doctor --local' shows, then at the last lines of the log",
)
_RESTART = "start the run again; training continues from its last checkpoint where it has one"
_IMAGE = "look at the image and its entry point"
#: Meanings of exit codes (of signals as a shell reports them), and the next step where there is no message.
_EXITS = {
    137: (
        "most likely out of memory, or killed by hand",
        "lower per_replica_batch_size, image_size or processes, or use a machine with more memory",
    ),
    **dict.fromkeys((132, 134, 135, 139), _CRASH),
    143: ("asked to stop: preempted, cancelled, or past its timeout", _RESTART),
    130: ("interrupted", _RESTART),
    126: ("the command is not executable", _IMAGE),
    127: ("the command was not found", _IMAGE),
    errors.EXIT_FAILED: ("the program failed", ""),
    errors.EXIT_BAD_INPUT: ("a mistake in the input; a retry cannot help", ""),
    errors.EXIT_PLATFORM: ("a service refused, failed or was not reached", ""),
    errors.EXIT_CANCELLED: ("cancelled", ""),
    errors.EXIT_CRASH: ("an unexpected error; its crash file says more", ""),
    errors.EXIT_RESTART: ("asked for a restart", ""),
}


def exit_code(value: int | str) -> int:
    """Returns an exit status as a shell reports it; `value` is negative, or a name, for a signal."""
    if isinstance(value, str):
        value = -signal.Signals[value]
    return 128 - value if value < 0 else value


def exit_meaning(code: int) -> str:
    """Returns the meaning of an exit status: "SIGKILL (exit code 137): most likely out of memory, ..."."""
    if code - 128 in set(signal.Signals):
        meaning, _ = _EXITS.get(code, ("", ""))
        return f"{signal.Signals(code - 128).name} (exit code {code})" + (f": {meaning}" if meaning else "")
    meaning, _ = _EXITS.get(code, ("the program's own; its log says more", ""))
    return f"exit code {code}: {meaning}"


def explain(
    *,
    task: str = "",
    replica: str = "",
    exit_code: int | None = None,
    error: str = "",
    own_message: str = "",
    log: Iterable[str] = (),
    peak_memory: int = 0,
    restarts: int = 0,
) -> Explanation:
    """Finds the likely cause of a failure, and what to do.

    The message of the task or of the platform comes first, then the exit code, then the log: a killed process
    prints nothing, and the log has the complaints of other replicas.

    Args:
        task: Name of the task; "" where it is not known, and so for the others.
        replica: Name of the replica that failed first, "worker-0" or "workerpool1-0".
        exit_code: As a shell reports it, 137 for SIGKILL.
        error: Message of the platform or of the job, in one line.
        own_message: One of Shardline's own messages instead, which also says what to do.
        log: Lines that the task or the replica has printed.
        peak_memory: Peak memory of the replica, in bytes.
        restarts: Restarts of the replica before the failure.
    """
    lines, error = last_lines(log), own_message or error
    ended = _EXITS.get(exit_code or 0, ("", ""))
    cause, remedy = _match([error]) or (ended if ended[1] else None) or _match(lines[::-1]) or ("", "")
    if own_message:
        # Shardline's own messages end with what to do; where one does not, the known cause does.
        _, semicolon, advice = error.rpartition("; ")
        if exit_code == errors.EXIT_BAD_INPUT and not cause:
            cause = "a mistake in the input of the run; the same input would fail again"
        remedy = remedy or (advice if semicolon else "correct what the message names and start the run again")
    exit_parts = [] if exit_code is None else [exit_meaning(exit_code)]
    if restarts:
        exit_parts.append(f"after {restarts} restart{'s' if restarts > 1 else ''}")
    if peak_memory:
        exit_parts.append(f"peak memory {peak_memory / 2**20:,.0f} MiB")
    return Explanation(
        failed=", replica ".join(item for item in (task, replica) if item) or "unknown",
        exit="; ".join(exit_parts),
        error=error,
        cause=cause,
        next_step=remedy or "look at the whole log of the task",
        lines=lines,
    )


def _match(lines: Sequence[str]) -> tuple[str, str] | None:
    for cause in CAUSES:
        for line in lines:
            if match := re.search(cause.pattern, line):
                group = next((item for item in match.groups() if item), "")
                return cause.description.format(group), cause.remedy.format(group)
    return None
