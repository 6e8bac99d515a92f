"""How many steps run between two looks at the metrics."""

from __future__ import annotations

# Long enough that looking, which makes all replicas meet, costs nothing; short enough for a person, and for
# a machine that is about to be taken away.
_SECONDS = 1.0

# What the first steps cost, which trace and warm up, says little: growth is bounded.
_GROWTH = 8


class Pace:
    """Adapts the number of steps to about a second.

    Attributes:
        steps: Steps to run next.
    """

    def __init__(self, fixed: int = 0):
        """Starts with one step.

        Args:
            fixed: Steps to run every time; 0 adapts them.
        """
        self._fixed = fixed
        self.steps = fixed or 1

    def learn(self, steps: int, seconds: float) -> None:
        """Takes notice of how long some steps took."""
        if not self._fixed:
            wanted = int(steps * _SECONDS / max(seconds, 1e-6))
            self.steps = max(1, min(wanted, _GROWTH * max(steps, self.steps)))
