"""The tree of errors that Shardline raises on purpose.

    ShardlineError
    ├── SettingsError, DatasetError, ModelError, ClusterError, PipelineError
    ├── SourceError, with BadRecordError below it
    ├── RepeatedError, a mistake that an earlier attempt has found
    ├── RunError (exit code 1), with DivergedError (2) below it
    └── PlatformError (3), CancelledRunError (4), CrashError (70), RestartError (75)

Every message says what was wrong, what was found, and what to do, in one line.
"""

from __future__ import annotations

# Exit codes of a process:
EXIT_FAILED = 1  # a run that failed after it had been started correctly
EXIT_BAD_INPUT = 2  # a mistake of the user: trying again cannot help, so a job is not restarted on it
EXIT_PLATFORM = 3  # a service that refused, failed or was not reached: it may work later, or for others
EXIT_CANCELLED = 4  # a run that somebody cancelled
EXIT_CRASH = 70  # an exception that nobody raised on purpose (EX_SOFTWARE of sysexits.h)
EXIT_RESTART = 75  # a run that was asked to stop (EX_TEMPFAIL of sysexits.h): started again, it goes on


class ShardlineError(Exception):
    """Base of all errors raised on purpose; a process that ends with one has its exit code."""

    exit_code = EXIT_BAD_INPUT

    @property
    def line(self) -> str:
        """The message in one line, of characters that can be seen: names in it may be anybody's."""
        return printable(" ".join(str(self).split()))


def printable(text: str) -> str:
    """Returns a text in which characters that a terminal would obey are written out, as in Python."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


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

    def __reduce__(self) -> tuple[type[BadRecordError], tuple[str, str]]:
        """Survives the way from one process to another."""
        return type(self), (self.name, self.reason)


class DatasetError(ShardlineError):
    """A dataset directory cannot be used: no manifest, damaged shard, empty split."""


class ModelError(ShardlineError):
    """A model function or a model file cannot be used."""


class ClusterError(ShardlineError):
    """The cluster description (TF_CONFIG) or one of its hosts is wrong."""


class PipelineError(ShardlineError):
    """A compiled pipeline, or a parameter given to it, is wrong."""


class RepeatedError(ShardlineError):
    """A mistake ended an earlier attempt of this job, in these words, and nothing has changed since."""


class RunError(ShardlineError):
    """Something was started correctly and then failed."""

    exit_code = EXIT_FAILED


class RestartError(ShardlineError):
    """A run was asked to stop before it was done; started again, it goes on."""

    exit_code = EXIT_RESTART


class CrashError(ShardlineError):
    """An exception that nobody raised on purpose, at the end of a process: its last resort."""

    exit_code = EXIT_CRASH


class PlatformError(ShardlineError):
    """Vertex AI, or another service, refused or failed or was not reached."""

    exit_code = EXIT_PLATFORM


class CancelledRunError(ShardlineError):
    """A run on the platform was cancelled before it was done."""

    exit_code = EXIT_CANCELLED


class DivergedError(RunError):
    """Loss or weights are not finite, or replicas no longer agree: training would end in the same way."""

    exit_code = EXIT_BAD_INPUT
