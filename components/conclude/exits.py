"""Exit codes in words."""

from __future__ import annotations

import signal

from shardline.trainer import errors

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
