"""Preemption: SIGTERM, sent some seconds before the machine is taken away.

After the next chunk of steps the loop (`loop.Training`) sees `requested` on any process; all save a
checkpoint and end with a RestartError, exit code 75.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Self

from shardline.trainer.base import progress
from shardline.trainer.base.errors import EXIT_RESTART, RestartError
from shardline.trainer.base.settings import TrainSettings


class Preemption:
    """Waits for SIGTERM in a thread, and ends the process within a grace period in seconds.

    A Python signal handler alone is too late: it runs in the main thread between two calls into TensorFlow,
    and one call may train for seconds or wait for a lost peer. So the signal also writes a byte to a pipe,
    which wakes the waiting thread at once. SIGTERM ends the process with `EXIT_RESTART`: at once before
    `ready`, later when the run has not ended within the grace period.
    """

    def __init__(self, grace_period: float = math.inf):
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
        """Installs the handler and starts to wait, as `current`; must be called in the main thread."""
        global current
        self._outer, current = current, self
        _reset_forked_processes()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.signal(signal.SIGTERM, self._wake)
        self._set_wakeup(self._writer)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Restores the previous handling of SIGTERM; a process that it ends ignores it from now on."""
        global current
        current = self._outer
        with self._lock:
            self._over.set()
        self._wake(0)
        self._thread.join()
        if signal.getsignal(signal.SIGTERM) == self._wake:
            # A process that ends for it is often told again, as by srun for the other tasks of one that has
            # ended; that would replace its exit code.
            ends = self.requested and self.grace_period < math.inf
            signal.signal(signal.SIGTERM, signal.SIG_IGN if ends else self._before or signal.SIG_DFL)
        self._set_wakeup(-1)
        os.close(self._reader)
        os.close(self._writer)

    def _set_wakeup(self, descriptor: int) -> None:
        before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        if before not in (-1, self._writer):  # asyncio's
            signal.set_wakeup_fd(before)

    def _wake(self, number: int, frame: object = None) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it has been awake for long
            os.write(self._writer, bytes([number]))

    def _watch(self) -> None:
        asked = False
        while not (asked or self._over.is_set()):  # but by another signal, or the program has its own handler
            asked = signal.SIGTERM in os.read(self._reader, 64)
            asked &= signal.getsignal(signal.SIGTERM) == self._wake
        with self._lock:
            if self._over.is_set():
                return
            if not self._ready.is_set():
                _exit("asked to stop (SIGTERM) before training began; start the same command again")
            limit = f", for at most {self.grace_period:g} s" if self.grace_period < math.inf else ""
            progress.report("train", f"asked to stop (SIGTERM): saving{limit}")
            self._requested.set()
        if not self._over.wait(self.grace_period if limit else None):
            newest = f"checkpoint of step {self.saved_step:,}" if self.saved_step else "newest checkpoint"
            _exit(
                f"asked to stop (SIGTERM), and not done within the grace_period of {self.grace_period:g} s; "
                f"started again, the run continues from the {newest}"
            )


#: The Preemption that handles SIGTERM in this process now; None where others end the process.
current: Preemption | None = None


def handle_sigterm() -> None:
    """Handles SIGTERM from now on, unless the program does, or runs in a notebook, a test or a thread."""
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive or "pytest" in sys.modules
    is_main = threading.current_thread() is threading.main_thread()
    is_free = current is None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_free and is_main and not is_interactive:
        Preemption(TrainSettings.grace_period).__enter__()


@functools.cache
def _reset_forked_processes() -> None:
    """Lets SIGTERM end a forked process, such as one of a pool, as by default; at once, too."""
    held = threading.local()

    def block() -> None:
        held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)

    def reset() -> None:
        global current
        own = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if isinstance(own, Preemption):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            own._set_wakeup(-1)
        current = None
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


@contextlib.contextmanager
def during_a_run(grace_period: float, *, ends_program: bool = False) -> Iterator[Preemption]:
    """Yields the Preemption of this process, if it has one, else one for this run.

    Without one only the platform limits the time to end, and a thread is not told. With `ends_program` a
    program that leaves SIGTERM to Shardline ends with `EXIT_RESTART`, so that its scheduler starts it again.
    """
    if current is not None:
        current.grace_period = grace_period
        try:
            yield current
        except RestartError as error:
            if not ends_program:
                raise
            progress.fail("train", error)
            sys.last_value = error  # exit handlers then do not wait for peers
            raise SystemExit(error.exit_code) from None
        return
    own = Preemption()
    own.ready()
    is_main = threading.current_thread() is threading.main_thread()
    with own if is_main else contextlib.nullcontext():
        yield own


def _exit(text: str) -> None:
    """Ends the process from any thread; the main thread may never return from TensorFlow."""
    progress.fail("train", RestartError(text))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_RESTART)
