"""`shardline scaling`: what training on N workers costs, from a step on one worker and the network.

A synchronous step is the computation, which N workers do side by side on a batch each, and the exchange of
gradients. In a ring every worker sends and receives 2 (N - 1) / N times the gradients, in 2 (N - 1) turns
(Patarasuk and Yuan, 2009), and handles each byte: lays it out, adds it up.

    exchange(N) = 2 (N - 1) / N bytes / bandwidth + 2 (N - 1) latency + handling bytes
    t(N) = crowd(N) (t(1) + exchange(N) / accumulation)

benchmarks/RESULTS.md holds it against measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import click

from shardline.components.text import short
from shardline.pipelines.cli.options import json_option, show
from shardline.trainer.errors import SettingsError

_WORKERS = "1,2,4,8,16,32"
_WANTED = (0.5, 0.8, 0.9)
#: Of workers, and of examples of a batch.
_LARGEST = 1_000_000


@click.command()
@click.option("--step-ms", type=float, required=True, help="A step on one worker, in milliseconds.")
@click.option("--batch", type=int, required=True, help="Examples of that step.")
@click.option("--gradient-mb", type=float, required=True, help="4 bytes a trainable weight; 2 if compressed.")
@click.option("--bandwidth-gbit", type=float, default=10.0, show_default=True, help="Between two workers.")
@click.option("--latency-ms", type=float, default=0.1, show_default=True, help="Between two workers.")
@click.option("--accumulation", type=int, default=1, show_default=True, help="Steps to an exchange.")
@click.option("--workers", default=_WORKERS, show_default=True, help="Numbers of workers.")
@json_option
def scaling(
    step_ms: float,
    batch: int,
    gradient_mb: float,
    bandwidth_gbit: float,
    latency_ms: float,
    accumulation: int,
    workers: str,
    as_json: bool,
) -> None:
    """Predict how training scales to more workers, from one worker's step and the network.

    Each worker keeps its batch. docs/performance.md explains the model and holds it against measurements.
    """
    if not 0 < batch <= _LARGEST:
        raise SettingsError(f"--batch must be within 1..{_LARGEST:,}, got {batch}")
    step = Step(
        seconds=step_ms / 1e3,
        gradient_bytes=gradient_mb * 1e6,
        bandwidth=bandwidth_gbit * 1e9 / 8,
        latency=latency_ms / 1e3,
        accumulation=accumulation,
    )
    rows: list[dict[str, Any]] = [
        {
            "workers": count,
            "step_ms": step.on(count) * 1e3,
            "exchange_ms": step.exchange(count) / accumulation * 1e3,
            "examples_per_second": count * batch / step.on(count),
            "efficiency": step.efficiency(count),
            "batch_for": {f"{wanted:g}": batch * step.batch_factor(count, wanted) for wanted in _WANTED},
        }
        for count in _counts(workers)
    ]
    wanted = "".join(f"{f'batch for {share:.0%}':>16}" for share in _WANTED)
    head = f"{'workers':>7}{'step':>12}{'exchange':>12}{'examples/s':>14}{'efficiency':>12}{wanted}"
    lines = (
        f"{row['workers']:>7}{row['step_ms']:>9,.1f} ms{row['exchange_ms']:>9,.1f} ms"
        f"{row['examples_per_second']:>14,.0f}{row['efficiency']:>12.2f}"
        + "".join(f"{batch:>16,.0f}" for batch in row["batch_for"].values())
        for row in rows
    )
    show(as_json, {"rows": rows}, head, *lines)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(item) for item in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > _LARGEST:
        raise SettingsError(
            f"--workers takes whole numbers within 1..{_LARGEST:,}, 1,2,4, got {short(text, 40)!r}"
        )
    return counts


#: Seconds to lay out and add up a byte of gradients, measured where RESULTS.md says.
HANDLING_S_PER_BYTE = 0.4e-9


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step on one worker, and the network that carries its gradients.

    Attributes:
        seconds: Time of the step on one worker; each of N workers keeps this worker's batch.
        gradient_bytes: Size of an exchange: four bytes a trainable weight, two where it is compressed.
        bandwidth: Bytes a second from one worker to the next.
        latency: Seconds for an empty message.
        accumulation: Steps whose gradients are exchanged together.
        machines: Machines that the workers share; 0 gives each its own.
    """

    seconds: float
    gradient_bytes: float
    bandwidth: float
    latency: float
    accumulation: int = 1
    machines: int = 0

    def __post_init__(self) -> None:
        for name in ("seconds", "gradient_bytes", "bandwidth"):
            if not 0 < getattr(self, name) < math.inf:  # NaN is neither
                raise SettingsError(f"{name} must be above 0 and finite, got {getattr(self, name):g}")
        if not 0 <= self.latency < math.inf:
            raise SettingsError(f"latency must be finite and not negative, got {self.latency:g}")
        if self.accumulation < 1 or self.machines < 0:
            raise SettingsError("accumulation must be at least 1, and machines not negative")

    def exchange(self, workers: int) -> float:
        """Returns the seconds that one exchange takes."""
        if workers == 1:
            return 0.0
        sent = 2 * (workers - 1) / workers * self.gradient_bytes
        turns = 2 * (workers - 1)
        return sent / self.bandwidth + turns * self.latency + self.gradient_bytes * HANDLING_S_PER_BYTE

    def on(self, workers: int) -> float:
        """Returns the seconds of a step on `workers` workers."""
        crowd = max(1.0, workers / self.machines) if self.machines else 1.0
        return self.seconds * crowd + self.exchange(workers) * crowd / self.accumulation

    def efficiency(self, workers: int) -> float:
        """Returns the share of `workers` times one worker's speed that is left."""
        return self.seconds / self.on(workers)

    def batch_factor(self, workers: int, efficiency: float) -> float:
        """Returns by how much a worker's batch would have to grow for an efficiency in 0..1, exclusive.

        The computation is taken to grow as the batch does; gradients do not grow.
        """
        wanted = self.exchange(workers) / self.accumulation * efficiency / (1 - efficiency)
        return wanted / self.seconds
