"""Preemption: SIGTERM, sent some seconds before the machine is taken away."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self

from shardline.trainer.base import progress
from shardline.trainer.base.errors import EXIT_RESTART, RestartError
from shardline.trainer.base.settings import TrainSettings


class Preemption:
    """Waits for SIGTERM in a thread, and ends the process within a grace period in seconds.

    A Python signal handler is too late: it runs in the main thread between two calls into TensorFlow, and one
    call may train for seconds or wait for a lost peer. Enter the context before TensorFlow is imported:
    threads started earlier would receive the signal and end the process. SIGTERM ends the process with
    `EXIT_RESTART`: at once before `ready`, later when the run has not ended within the grace period.
    """

    def __init__(self, grace_period: float):
        #: Grace period in seconds; may be changed until the signal comes.
        self.grace_period = grace_period
        #: Step of the newest checkpoint that this process has written; 0 for none.
        self.saved_step = 0
        self._requested, self._ready, self._over = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)

    @property
    def requested(self) -> bool:
        """Whether SIGTERM has come: the run should save a checkpoint and end."""
        return self._requested.is_set()

    def ready(self) -> None:
        """Declares that there is a state to save, and that the run checks `requested` from now on."""
        self._ready.set()

    def __enter__(self) -> Self:
        """Blocks SIGTERM and starts to wait for it; must be called in the main thread."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Restores the previous handling of SIGTERM."""
        with self._lock:
            self._over.set()
            if not self.requested and self._thread.ident is not None:
                signal.pthread_kill(self._thread.ident, signal.SIGTERM)  # wakes the thread
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _wait(self) -> None:
        signal.sigwait({signal.SIGTERM})

    def _watch(self) -> None:
        self._wait()
        with self._lock:
            if self._over.is_set():
                return
            if not self._ready.is_set():
                _exit("asked to stop (SIGTERM) before training began; start the same command again")
            progress.report("train", f"asked to stop (SIGTERM): saving, for at most {self.grace_period:g} s")
            self._requested.set()
        if not self._over.wait(self.grace_period):
            newest = f"checkpoint of step {self.saved_step:,}" if self.saved_step else "newest checkpoint"
            _exit(
                f"asked to stop (SIGTERM), and not done within the grace_period of {self.grace_period:g} s; "
                f"started again, the run continues from the {newest}"
            )


class ProgramPreemption(Preemption):
    """The same until the end of a program that has already loaded TensorFlow, with threads that take signals.

    Python's handler would run in the main thread between two calls into TensorFlow. So the signal also writes
    a byte to a pipe, which wakes the waiting thread at once.
    """

    def __enter__(self) -> Self:
        """Installs the handler and starts to wait; must be called in the main thread."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self.install()
        self._thread.start()
        return self

    def install(self) -> None:
        """Installs the handler."""
        signal.signal(signal.SIGTERM, self._wake)
        before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if before not in (-1, self._writer):  # asyncio's
            signal.set_wakeup_fd(before)

    def _wake(self, number: int, frame: object) -> None:
        os.write(self._writer, bytes([number]))

    def _wait(self) -> None:
        asked = False
        while not asked:  # but by another signal, or the program has set a handler of its own
            asked = signal.SIGTERM in os.read(self._reader, 64)
            asked &= signal.getsignal(signal.SIGTERM) == self._wake


#: The Preemption of this process from its first call of Shardline on; None where others end the process.
current: Preemption | None = None


def handle_sigterm() -> None:
    """Handles SIGTERM from now on, unless the program does, or runs in a notebook, a test or a thread."""
    global current
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive or "pytest" in sys.modules
    is_main = threading.current_thread() is threading.main_thread()
    is_free = current is None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_free and is_main and not is_interactive:
        current = ProgramPreemption(TrainSettings.grace_period).__enter__()


def restore_handler() -> None:
    """Restores the handler of a ProgramPreemption, which a strategy has replaced by TensorFlow's own."""
    if isinstance(current, ProgramPreemption):
        current.install()


def _forget() -> None:
    """Lets SIGTERM end a forked process, such as one of a pool, as by default."""
    global current
    if isinstance(current, ProgramPreemption):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    elif current is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    current = None


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def during_a_call(grace_period: float) -> Iterator[Any]:
    """Yields the Preemption of this process, if it has one, else what the loop needs of one for this call.

    In that case the main thread handles SIGTERM, and only the platform limits the time to end. A program that
    was started without a command ends with `EXIT_RESTART` too, so that its scheduler starts it again.
    """
    if current is not None:
        current.grace_period = grace_period
        try:
            yield current
        except RestartError as error:
            if not isinstance(current, ProgramPreemption):
                raise
            progress.fail("train", error)
            sys.last_value = error  # exit handlers then do not wait for peers
            raise SystemExit(error.exit_code) from None
        return
    state = SimpleNamespace(requested=False, saved_step=0, ready=lambda: None)
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: setattr(state, "requested", True))
    try:
        yield state
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(text: str) -> None:
    """Ends the process from any thread; the main thread may never return from TensorFlow."""
    progress.fail("train", RestartError(text))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_RESTART)
