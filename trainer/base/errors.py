"""Errors: the exceptions that Shardline raises on purpose, and the exit codes of its processes.

    ShardlineError
    ├── SettingsError, DatasetError, ModelError, ClusterError, PipelineError
    ├── SourceError, with BadRecordError below it
    ├── RunError (exit code 1), with DivergedError and DamagedError (2) below it
    └── PlatformError (3), CancelledRunError (4), CrashError (70), RestartError (75)

Every message says what was wrong, what was found, and what to do, in one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Exit codes of a process:
EXIT_FAILED = 1  # a run that failed after it had been started correctly
EXIT_BAD_INPUT = 2  # a mistake of the user: trying again cannot help, so a job is not restarted on it
EXIT_PLATFORM = 3  # a service that refused, failed or was not reached: it may work later, or for others
EXIT_CANCELLED = 4  # a run that a user cancelled
EXIT_CRASH = 70  # an unexpected exception (EX_SOFTWARE of sysexits.h)
EXIT_INTERRUPTED = 130  # Ctrl-C, as a shell reports it
EXIT_RESTART = 75  # a run that was asked to stop (EX_TEMPFAIL of sysexits.h) and continues when restarted


class ShardlineError(Exception):
    """Base of all errors raised on purpose; a process that ends with one has its exit code."""

    exit_code = EXIT_BAD_INPUT

    @property
    def line(self) -> str:
        """The message in one line of printable characters: names in it may hold control characters."""
        return printable(" ".join(str(self).split()))


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Prefixes the message of an error with the file, table or key."""
    try:
        yield
    except ShardlineError as error:
        raise type(error)(f"{prefix}{error}") from None


def page(name: str) -> str:
    """Returns the address of a page of the documentation, such as "gate".

    Its base is the project URL "Documentation" of the installed package (setup.cfg), or else docs.
    """
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        urls = metadata("shardline").get_all("Project-URL") or []
    except PackageNotFoundError:
        urls = []
    bases = (url.partition(", ")[2] for url in urls if url.startswith("Documentation, "))
    return f"{next(bases, 'docs')}/{name}.md"


def printable(text: str) -> str:
    """Returns a text with its control characters escaped as in Python: a terminal would act on them."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def short(value: object) -> str:
    """Returns the beginning of a value as Python writes it, for a message."""
    return printable(repr(value))[:60]


class SettingsError(ShardlineError):
    """A setting, flag or parameter is missing, mistyped or out of range."""


class SourceError(ShardlineError):
    """The raw data cannot be used: unknown source, unreadable or unusable example."""


class BadRecordError(SourceError):
    """One example (`name`, its key or file) cannot be used; with on_bad_record=skip it is left out."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name!r}: {reason}")
        self.name = name
        self.reason = reason


class DatasetError(ShardlineError):
    """A dataset directory cannot be used: no manifest, damaged shard, empty split."""


class ModelError(ShardlineError):
    """A model function or a model file cannot be used."""


class ClusterError(ShardlineError):
    """The cluster description (TF_CONFIG) or one of its hosts is wrong."""


class PipelineError(ShardlineError):
    """A compiled pipeline, or one of its parameters, is wrong."""


class RunError(ShardlineError):
    """A run failed after it had started correctly."""

    exit_code = EXIT_FAILED


class RestartError(ShardlineError):
    """A run was asked to stop before its end; restarted, it continues."""

    exit_code = EXIT_RESTART


class CrashError(ShardlineError):
    """An unexpected exception ended the process."""

    exit_code = EXIT_CRASH


class PlatformError(ShardlineError):
    """Vertex AI or another service refused a call, failed, or was not reached."""

    exit_code = EXIT_PLATFORM


class CancelledRunError(ShardlineError):
    """A run on the platform was cancelled."""

    exit_code = EXIT_CANCELLED


class DivergedError(RunError):
    """Loss or weights are not finite, or replicas no longer agree: a restart would end the same way."""

    exit_code = EXIT_BAD_INPUT


class DamagedError(RunError):
    """The files of a checkpoint are not what was written, or one is missing: it stays like that."""

    exit_code = EXIT_BAD_INPUT
