"""Preemption: SIGTERM, which a machine that is taken away sends some seconds before."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from shardline.trainer.base import progress
from shardline.trainer.base.errors import EXIT_RESTART, RestartError


class Preemption:
    """Notices SIGTERM in a thread of its own, and ends the process within a grace period in seconds.

    A Python signal handler would not do: it runs in the main thread, between two calls into TensorFlow, and
    one call may train for seconds or wait for a lost peer. Enter it before TensorFlow is imported: a thread
    from before would take the signal and end the process. SIGTERM ends the process with `EXIT_RESTART`:
    before `ready` at once; after that when the grace period is over and the run has not ended by itself.
    """

    def __init__(self, grace_period: float):
        #: Seconds; it may be changed until the signal comes.
        self.grace_period = grace_period
        #: Step of the newest checkpoint that this process has put on disk; 0 for none.
        self.saved_step = 0
        self._requested, self._ready, self._over = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)

    @property
    def requested(self) -> bool:
        """Whether SIGTERM has come: save a checkpoint, and end."""
        return self._requested.is_set()

    def ready(self) -> None:
        """Says that from now on there is something to save, and that `requested` is looked at."""
        self._ready.set()

    def __enter__(self) -> Preemption:
        """Starts to wait for the signal; for the main thread."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Lets SIGTERM do again what it did before."""
        with self._lock:
            self._over.set()
            if not self.requested and self._thread.ident is not None:
                signal.pthread_kill(self._thread.ident, signal.SIGTERM)  # wakes it
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
                f"asked to stop (SIGTERM), and not done with it within the grace_period of "
                f"{self.grace_period:g} s; started again, the run goes on from the {newest}"
            )


#: That of the program that has started this one in its own process, if there is one.
current: Preemption | None = None


class Termination:
    """Notices SIGTERM by a handler, in a program whose TensorFlow runs already; for the main thread.

    It is seen between two calls into TensorFlow, and the process has whatever time the platform gives it.
    """

    def __init__(self) -> None:
        self.requested = False
        self.saved_step = 0

    def ready(self) -> None:
        """Does nothing: whatever is asked for early is looked at after the first steps."""

    def __enter__(self) -> Termination:
        """Takes the signal, in a thread other than the main one not."""
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        """Lets SIGTERM do again what it did before."""
        if self._main:
            signal.signal(signal.SIGTERM, self._before)
        if not isinstance(error[1], RestartError):  # of this process, or of another that was asked
            return
        before = sys.excepthook

        def end(kind: type[BaseException], uncaught: BaseException, trace: Any) -> None:
            """Ends a program that does not catch its RestartError with a line, and no traceback."""
            if not isinstance(uncaught, RestartError):
                before(kind, uncaught, trace)
                return
            progress.fail("train", uncaught)
            raise SystemExit(uncaught.exit_code)

        sys.excepthook = end

    def _handle(self, number: int, frame: object) -> None:
        self.requested = True


def _exit(text: str) -> None:
    """Ends the process from any thread; the main thread may be in TensorFlow and never come back."""
    progress.fail("train", RestartError(text))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_RESTART)
