"""A failure that is made to happen, as a plain value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from shardline.pipelines.local.job import ROLES
from shardline.trainer.errors import SettingsError

_FORMS = "preempt:worker:0@step=30, kill:chief@t=5s or slow:worker:1=2x"
_TEXT = re.compile(
    rf"(?P<replica>({'|'.join(ROLES)})(:\d+)?)"
    r"(@(step=(?P<step>\d+)|t=(?P<seconds>\d+(\.\d+)?)s)|=(?P<factor>\d+(\.\d+)?)x)"
)


@dataclass(frozen=True)
class Injection:
    """What happens to one replica, and when.

    Attributes:
        action: "preempt" takes its machine away as the platform does with a SPOT machine, "kill" kills
            it, "slow" has it run slower from the start.
        replica: Name of the replica, as in "worker-0".
        step: Training step at which it happens, or None.
        seconds: Time since the start of the job at which it happens, or None.
        factor: How many times slower.
    """

    action: Literal["preempt", "kill", "slow"]
    replica: str
    step: int | None = None
    seconds: float | None = None
    factor: float = 1.0


def parse_injection(text: str) -> Injection:
    """Reads an injection as users write it.

    Raises:
        SettingsError: When the text has another form than preempt:worker:0@step=30, kill:chief@t=5s
            or slow:worker:1=2x.
    """
    action, _, rest = text.partition(":")
    match = _TEXT.fullmatch(rest)
    if match is None or action not in ("preempt", "kill", "slow"):
        raise SettingsError(f"--inject takes {_FORMS}, got {text!r}")
    step, seconds, factor = match["step"], match["seconds"], match["factor"]
    if (action == "slow") != (factor is not None):
        raise SettingsError(
            f"--inject {action} takes {'=2x' if action == 'slow' else '@step=30 or @t=5s'}, got {text!r}"
        )
    if factor is not None and not 1 < float(factor) <= 100:
        raise SettingsError(f"--inject slow takes a factor above 1 and up to 100, got {text!r}")
    role, _, index = match["replica"].partition(":")
    return Injection(
        action,  # type: ignore[arg-type]  # one of the three
        f"{role}-{int(index or 0)}",
        step=int(step) if step else None,
        seconds=float(seconds) if seconds else None,
        factor=float(factor or 1),
    )
