"""Watchdog: ends a process that has made no progress for too long, and says where it stands.

A run hangs when replicas take different ways: one waits in an exchange for another that never comes there.
Each of them is alive, so that no look at peers finds anything.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time

from shardline.trainer import progress
from shardline.trainer.errors import EXIT_FAILED, RunError

# Seconds in which other replicas may say where they stand, before the end of this one ends them.
_LAST_WORDS_S = 5.0


class Watchdog:
    """Watches one process while the context lasts."""

    def __init__(self, name: str, timeout: float):
        """Takes the replica's name, and the seconds without progress after which it ends; 0 for no limit."""
        self._name = name
        self._timeout = timeout
        self._state = ("", time.monotonic())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def at(self, place: str) -> None:
        """Notes progress: the process is at another place now ("in step 41")."""
        self._state = (place, time.monotonic())

    def rest(self) -> None:
        """Notes that the process waits for something that has a limit of its own."""
        self._state = ("", math.inf)

    def __enter__(self) -> Watchdog:
        """Starts to watch."""
        self.at("at the beginning")
        if self._timeout:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the watch."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._timeout / 4)):
            place, since = self._state
            if time.monotonic() - since > self._timeout:
                self._end(place)

    def _end(self, place: str) -> None:
        """Ends the process from this thread: the main thread waits in TensorFlow and never comes back."""
        text = (
            f"{self._name} has made no progress for {self._timeout:g} s (stall_timeout), {place}; compare "
            "where the other replicas stand: a callback that runs on one of them only, or code that takes "
            "another way there, makes the others wait"
        )
        progress.fail("train", RunError(text))
        faulthandler.dump_traceback(file=sys.stderr)
        sys.stderr.flush()
        self._over.wait(_LAST_WORDS_S)
        os._exit(EXIT_FAILED)
