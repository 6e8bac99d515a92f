"""Run: what is fixed before the first step, wherever the data comes from: settings, cluster, strategy."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import tensorflow as tf

from shardline.trainer.checkpoint.state import Position
from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.collectives import Collectives
from shardline.trainer.settings import TrainSettings
from shardline.trainer.watchdog import Watchdog


class Plan(Protocol):
    """Steps of an epoch, of whose examples the first `start` are trained already."""

    @property
    def start(self) -> int:
        """Examples of the epoch that are trained already."""

    @property
    def first(self) -> int:
        """Number within the epoch, from 0, of the first step that is left."""

    @property
    def step_sizes(self) -> Sequence[int]:
        """Examples of each step that is left, over all replicas."""


@dataclass(frozen=True, kw_only=True)
class Run(abc.ABC):
    """One run, as one process sees it.

    Attributes:
        checkpoints: Directory of checkpoints; None to keep none.
        strategy_name: Strategy's name in the settings, with "auto" resolved.
        replicas: Replicas that share each step; 1 where workers take whole steps each.
        watchdog: Knows what the process is at.
    """

    settings: TrainSettings
    cluster: Cluster
    checkpoints: Path | None
    strategy: tf.distribute.Strategy
    strategy_name: str
    replicas: int
    watchdog: Watchdog

    @functools.cached_property
    def collectives(self) -> Collectives:
        """Sums over the processes that train."""
        return Collectives(self.strategy, self.process, len(self.processes))

    @property
    def processes(self) -> tuple[str, ...]:
        """Names of the processes that train, in TensorFlow's order: "chief-0", "worker-0"."""
        return tuple(self.cluster.addresses)[: self.cluster.num_workers] or (self.cluster.name,)

    @property
    def process(self) -> int:
        """Number of this process among those that train; of any other, 0."""
        return self.processes.index(self.cluster.name) if self.cluster.name in self.processes else 0

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch."""

    @abc.abstractmethod
    def epoch(self, at: Position) -> Plan:
        """Returns what is left of the epoch of a position."""

    @abc.abstractmethod
    def step_source(self, plan: Plan, step: int, process: int) -> str:
        """Names the place of one process's examples of a step of the plan."""

    def validates(self, epoch: int) -> bool:
        """Whether the validation data is evaluated after an epoch, from 0."""
        return True

    @property
    def judges_end(self) -> bool:
        """Whether it is evaluated once more at the end, since callbacks may have put other weights back."""
        return True
