"""How far a pass over many records has come."""

from __future__ import annotations

import time

from shardline.trainer import progress

_INTERVAL_SECONDS = 2.0


class Meter:
    """Reports records, bytes, rates and what is left about every two seconds; nothing of a shorter pass.

    Args:
        verb: What happens to the records, in the past tense.
        total: Number of records, or 0 where it is not known.
        rejected: Number of examples left out so far.
    """

    def __init__(self, verb: str, total: int, *, rejected: int = 0) -> None:
        self._verb = verb
        self._total = total
        self._done = self._bytes = 0
        self._rejected = rejected
        self._started = self._reported = time.monotonic()

    def advance(self, records: int, size: int = 0, *, rejected: int = 0) -> None:
        """Counts records, their bytes, and those left out."""
        self._done += records
        self._bytes += size
        self._rejected += rejected
        now = time.monotonic()
        if now - self._reported >= _INTERVAL_SECONDS:
            self._reported = now
            # A source need not know its length: then there is no total but what has come so far.
            total = max(self._total, self._done)
            progress.advance("preprocess", self._done, total, "records", self._text(now - self._started))

    def _text(self, seconds: float) -> str:
        rate = self._done / max(seconds, 1e-9)
        parts = [f"{self._verb}, {rate:,.0f}/s"]
        if self._bytes:
            parts.append(f"{self._bytes / 1e6 / max(seconds, 1e-9):,.0f} MB/s")
        if self._total:
            left = max(0, self._total - self._done) / max(rate, 1e-9)
            parts.append(f"{self._done / max(self._total, self._done):.0%}, {_clock(left)} left")
        if self._rejected:
            parts.append(f"{self._rejected:,} rejected")
        return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
