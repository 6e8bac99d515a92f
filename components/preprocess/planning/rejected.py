"""Examples that cannot be used: the first ends the run, or all are left out and named in a file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from shardline.trainer.errors import BadRecordError, SourceError


class Rejected:
    """Takes bad examples as the policy says.

    Args:
        policy: "fail" or "skip".
        path: The file that names those that are left out, one JSON object per line.
    """

    def __init__(self, policy: str, path: Path) -> None:
        self._policy = policy
        self._path = path
        self.reasons: Counter[str] = Counter()

    def add(self, error: BadRecordError) -> None:
        """Leaves an example out.

        Raises:
            BadRecordError: Under the policy "fail".
        """
        if self._policy == "fail":
            raise error
        self.reasons[error.reason] += 1
        with self._path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(json.dumps({"file": error.name, "reason": error.reason}) + "\n")

    def check(self, records_in: int, largest_fraction: float) -> None:
        """Ends the run if too many were left out.

        Raises:
            SourceError: With the most frequent reason and an example of it.
        """
        total = self.reasons.total()
        if total <= largest_fraction * records_in:
            return
        reason, count = self.reasons.most_common(1)[0]
        with self._path.open(encoding="utf-8") as file:
            name = next(found["file"] for found in map(json.loads, file) if found["reason"] == reason)
        raise SourceError(
            f"{total:,} of {records_in:,} examples cannot be used, more than max_bad_fraction "
            f"{largest_fraction:g} allows; {count:,} of them: {reason} ({name!r})"
        )
