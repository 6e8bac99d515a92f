"""What commonly makes a run fail: what it looks like, why it happens, and what helps.

Why a run failed, in words that help: pure, and the same in a notification as on a terminal.

What is known of a failed task.

Exit codes in words.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardline.trainer import errors
from shardline.trainer.errors import EXIT_BAD_INPUT


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


@dataclass(frozen=True)
class Cause:
    """One known cause.

    Attributes:
        looks: What a message or a line of a log looks like; its first group, if any, goes into the words.
        words: Likely cause; {0} is the group.
        remedy: What to do next; {0} is the group.
    """

    looks: re.Pattern[str]
    words: str
    remedy: str


def _cause(looks: str, words: str, remedy: str) -> Cause:
    return Cause(re.compile(looks), words, remedy)


#: Known causes, the more specific ones first. What comes from the platform stands before what any program
#: may print, and a crash before what other replicas say once it has happened.
CAUSES = (
    _cause(
        r"quota metrics? exceed.*?([\w.-]+\.googleapis\.com/\w+)|[Qq]uota exceeded for.*?metric '([^']+)'",
        "the quota {0} is used up",
        "ask for more of it (console: IAM and admin, quotas), wait for other jobs to end, or choose other "
        "machines or another region",
    ),
    _cause(
        r"Resources are insufficient in region:? ?([\w-]+)|stockout|ZONE_RESOURCE_POOL_EXHAUSTED",
        "the region has no such machine free at present",
        "try again later, choose another machine or region, or use strategy FLEX_START, which waits",
    ),
    _cause(
        r"ImagePull|[Ff]ailed to pull image|[Uu]nable to pull|"
        r"[Ii]mage \S+ (?:is not found|not found|does not exist)|manifest unknown",
        "the container image cannot be pulled",
        "look whether its name and tag exist in Artifact Registry, and grant the service agents of Vertex AI "
        "roles/artifactregistry.reader on it; 'shardline doctor' checks both",
    ),
    _cause(
        r"[Pp]ermission '?([a-z]+(?:\.[a-zA-Z]+){2,})'? denied"
        r"|does not have ([a-z]+(?:\.[a-zA-Z]+){2,}) access",
        "the service account lacks the permission {0}",
        "grant the run's service account a role that has it; 'shardline doctor' checks the usual ones",
    ),
    _cause(
        r"PERMISSION_DENIED|PermissionDenied|403 Forbidden|Error 403|Permission denied",
        "permission denied",
        "grant the run's service account (on this machine: your user) access to what the message names; "
        "'shardline doctor' checks the usual roles",
    ),
    _cause(
        r"ran out.of.memory|OOMKilled|Out of memory|MemoryError|Cannot allocate memory",
        "out of memory",
        "lower per_replica_batch_size or the size of the images, use fewer processes, or a machine with more "
        "memory (machine_type, n1-highmem-8)",
    ),
    _cause(
        r"CUDA_ERROR_OUT_OF_MEMORY|OOM when allocating|ResourceExhaustedError|RESOURCE_EXHAUSTED: Out of",
        "the accelerator or the machine is out of memory: a tensor could not be allocated",
        "lower per_replica_batch_size, set mixed precision in train_options, or choose an accelerator with "
        "more memory",
    ),
    _cause(
        r"No space left on device|ENOSPC",
        "the disk is full",
        "raise boot_disk_size_gb (on this machine: free space in the run directory and in TMPDIR)",
    ),
    _cause(
        r"[Ll]oss is not finite|[Ll]oss is (?:nan|inf)\b|: (?:Inf|NaN) (?:and (?:Inf|NaN) )?values",
        "training has diverged",
        "lower learning_rate, clip gradients (the optimizer's clipnorm), or look for broken examples and "
        "labels in the shards that the message names; the same again would come to the same end",
    ),
    _cause(
        r"model '([^']+)' failed: ",
        "the model function {0} itself raises an error",
        "correct the line that the message names; 'shardline train --model {0}' is the quickest way to try",
    ),
    _cause(
        r"No module named '?([\w.]+)",
        "the Python module {0} is not there",
        "install it in the image (on this machine: in this environment), or correct the name",
    ),
    _cause(
        r"no file matches|[Nn]o such file or directory: ?'?([^'\s]*)|NoSuchKey|No such object|404.*\bb/",
        "data that is missing",
        "look whether the path exists and is readable from where the task runs; gs:// paths need the service "
        "account's access to the bucket",
    ),
    _cause(
        r"[Aa]ddress already in use",
        "a port was taken",
        "start the run again",
    ),
    _cause(
        r"DEADLINE_EXCEEDED|[Tt]imed out|its timeout of [\d.]+ s has passed",
        "something took longer than it was given",
        "raise the timeout ([train.job] timeout) if the work is that long, else look for what was waited for",
    ),
    _cause(
        r"UNAVAILABLE|UnavailableError|[Cc]onnection reset|Socket closed",
        "another replica went away",
        "look at the log of the replica that ended first; with restart_job_on_worker_restart all start again",
    ),
)

_KILLED = Cause(
    re.compile(""),
    "most likely out of memory: the kernel kills what takes the last of it, and leaves no message",
    "lower per_replica_batch_size, image_size or preprocess_processes, or use a machine with more memory",
)
_NATIVE = Cause(
    re.compile(""),
    "a crash in native code: a library that does not fit the others or the machine, or damaged data",
    "compare the installed versions with constraints.txt ('shardline doctor --local' does), then look at the "
    "last lines of the log",
)
_STOPPED = Cause(
    re.compile(""),
    "it was stopped from outside: a preemption, a cancellation or a timeout",
    "start the run again; training goes on from its last checkpoint where it has one",
)
_MISSING = Cause(
    re.compile(""),
    "the command of the container is not there",
    "look at the image and its entry point",
)
_BY_EXIT = {137: _KILLED, 139: _NATIVE, 134: _NATIVE, 132: _NATIVE, 135: _NATIVE, 143: _STOPPED}
_BY_EXIT |= {130: _STOPPED, 126: _MISSING, 127: _MISSING}


def find_cause(failure: Failure) -> tuple[str, str]:
    """Returns the likely cause of a failure and what to do next; "" for what nobody can say.

    What the task or the platform itself has said counts before how a process ended, and that before what
    stands in the log: a process that was killed says nothing, and the others complain of it.
    """
    if found := _match([failure.error]):
        return found
    if failure.exit_code in _BY_EXIT:
        cause = _BY_EXIT[failure.exit_code]
        return cause.words, cause.remedy
    return _match(failure.lines[::-1]) or ("", "")


def _match(lines: Sequence[str]) -> tuple[str, str] | None:
    for cause in CAUSES:
        for line in lines:
            if found := cause.looks.search(line):
                group = next((item for item in found.groups() if item), "")
                return cause.words.format(group), cause.remedy.format(group)
    return None


_SIGNALS = {
    signal.SIGKILL: "most likely out of memory, else somebody killed it",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or a full /dev/shm",
    signal.SIGABRT: "native code gave up: a failed check, or no memory",
    signal.SIGILL: "the processor lacks an instruction that the program was built for",
    signal.SIGTERM: "asked to stop: preempted, cancelled, or past its timeout",
    signal.SIGINT: "interrupted",
    signal.SIGHUP: "its terminal was closed",
}
_CODES = {
    errors.EXIT_FAILED: "the program failed",
    errors.EXIT_BAD_INPUT: "a mistake in what was given; trying again cannot help",
    errors.EXIT_PLATFORM: "a service refused, failed or was not reached",
    errors.EXIT_CANCELLED: "cancelled",
    errors.EXIT_RESTART: "asked to be started again",
    126: "the command is not executable",
    127: "the command was not found",
}
_BY_NAME = {item.name: 128 + item for item in signal.Signals}


def exit_code(value: int | str) -> int:
    """Returns an exit status as a shell has it.

    Args:
        value: Exit status, negative for a signal as Python's subprocess has it, or a signal's name.
    """
    if isinstance(value, str):
        return _BY_NAME[value]
    return 128 - value if value < 0 else value


def in_words(code: int) -> str:
    """Returns what an exit status means: "SIGKILL (exit code 137): most likely out of memory, ..."."""
    number = code - 128
    if number in {int(item) for item in signal.Signals}:
        name = signal.Signals(number)
        meaning = _SIGNALS.get(name, "")
        return f"{name.name} (exit code {code})" + (f": {meaning}" if meaning else "")
    meaning = _CODES.get(code, "the program's own; its log says more")
    return f"exit code {code}: {meaning}"


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
