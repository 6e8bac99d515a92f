"""Preemption: SIGTERM, sent some seconds before the machine is taken away."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from shardline.trainer.base import progress
from shardline.trainer.base.errors import EXIT_RESTART, RestartError


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

    def __enter__(self) -> Preemption:
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

    def _watch(self) -> None:
        signal.sigwait({signal.SIGTERM})
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


#: The active Preemption of `shardline.trainer.program`, which runs a user's program in its process; or None.
current: Preemption | None = None


class Termination:
    """Handles SIGTERM in a program that has already loaded TensorFlow; for the main thread.

    The handler runs between two calls into TensorFlow; only the platform limits the time to end.
    """

    def __init__(self) -> None:
        self.requested = False
        self.saved_step = 0

    def ready(self) -> None:
        """Does nothing: an early request is handled after the first steps."""

    def __enter__(self) -> Termination:
        """Installs the handler, in the main thread only."""
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        """Restores the previous handler."""
        if self._main:
            signal.signal(signal.SIGTERM, self._before)
        if not isinstance(error[1], RestartError):  # after SIGTERM here or in another process
            return
        before = sys.excepthook

        def report_restart(kind: type[BaseException], uncaught: BaseException, trace: Any) -> None:
            """Ends a program that does not catch its RestartError with one line and no traceback."""
            if not isinstance(uncaught, RestartError):
                before(kind, uncaught, trace)
                return
            progress.fail("train", uncaught)
            raise SystemExit(uncaught.exit_code)

        sys.excepthook = report_restart

    def _handle(self, number: int, frame: object) -> None:
        self.requested = True


def _exit(text: str) -> None:
    """Ends the process from any thread; the main thread may never return from TensorFlow."""
    progress.fail("train", RestartError(text))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_RESTART)
