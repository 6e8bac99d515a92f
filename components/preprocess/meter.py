"""How far a pass over many records has come."""

from __future__ import annotations

import time

from trainer import progress

_INTERVAL_SECONDS = 2.0


class Meter:
    """Reports the records of a pass and their rate about every two seconds; nothing of a shorter pass."""

    def __init__(self, verb: str, total: int) -> None:
        self._verb = verb
        self._total = total
        self._done = 0
        self._started = self._reported = 0.0

    def tick(self) -> None:
        """Counts one record."""
        now = time.monotonic()
        if not self._done:  # a source may take seconds to load before its first record
            self._started = self._reported = now
        self._done += 1
        if now - self._reported >= _INTERVAL_SECONDS:
            self._reported = now
            rate = self._done / max(now - self._started, 1e-9)
            # A source need not know its length: then there is no total but what has come so far.
            total = max(self._total, self._done)
            progress.advance("preprocess", self._done, total, "records", f"{self._verb}, {rate:,.0f}/s")
