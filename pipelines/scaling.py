"""What training on N workers costs: a model of one step, from its time on one worker and the network.

A synchronous step is the computation, which N workers do side by side on a batch each, and the exchange of
gradients. In a ring every worker sends and receives 2 (N - 1) / N times the gradients, in 2 (N - 1) turns
(Patarasuk and Yuan, 2009), and handles each byte: lays it out, adds it up.

    exchange(N) = 2 (N - 1) / N bytes / bandwidth + 2 (N - 1) latency + handling bytes
    t(N) = crowd(N) (t(1) + exchange(N) / accumulation)

benchmarks/RESULTS.md holds it against measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardline.trainer.errors import SettingsError

#: Seconds to lay out and add up a byte of gradients, measured where RESULTS.md says.
HANDLING_S_PER_BYTE = 0.4e-9


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, as it is on one worker, and how gradients travel.

    Attributes:
        seconds: On one worker, whose batch each of N workers will have.
        gradient_bytes: What is exchanged: four bytes a trainable weight, two where it is compressed.
        bandwidth: Bytes a second from one worker to the next.
        latency: Seconds for a message without content.
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
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} must be above 0, got {getattr(self, name):g}")
        if self.latency < 0 or self.accumulation < 1 or self.machines < 0:
            raise SettingsError("latency and machines must not be negative, accumulation at least 1")

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
