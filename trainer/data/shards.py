"""Shards: a split of a dataset directory as a stream of batches, of which each process reads its part."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.pipeline import Feed
from shardline.trainer.data.sharding import EpochPlan
from shardline.trainer.errors import DatasetError, SettingsError

#: Split that an argument of `fit` or `evaluate` takes of a dataset directory.
SPLITS = {"train_data": "train", "validation_data": "validation", "data": "test"}
# More epochs than anybody trains.
_MANY = 2**40


class ShardStream:
    """A split's batches, epoch after epoch without end, as the trainer reads them (`Feed`).

    It has what `Stream` has; an epoch is a pass, in an order of its own if there is a seed.
    """

    #: Whether the batches are each process's own.
    is_own = False
    #: Whether what `distribute` gives can name the examples of the whole.
    gives_sizes = False

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        replicas: int,
        batch_size: int,
        seed: int | None,
        class_weight: Mapping[int, float] | None = None,
    ) -> None:
        """Opens the split that the argument `name` takes of a directory.

        Args:
            directory: Dataset directory.
            name: The argument's name.
            replicas: How many share a batch.
            batch_size: Examples of a batch over all replicas.
            seed: Of the shuffling; None keeps the order of the shards.
            class_weight: Weight of each class in the loss, by its number.

        Raises:
            DatasetError: There is no dataset, or it lacks the split or a shard.
            SettingsError: The batch size or the weights do not fit.
        """
        if batch_size % replicas:
            raise SettingsError(
                f"batch_size must be a multiple of {replicas}, the number of replicas, where {name} is a "
                f"dataset directory, not {batch_size}"
            )
        manifest, split = manifests.load(directory), SPLITS[name]
        manifest.info()  # images that differ in size are refused
        if split not in manifest.splits:
            raise DatasetError(
                f"{name} takes the {split} split of {directory}, which has only {', '.join(manifest.splits)}"
            )
        self._plan = EpochPlan(manifest.splits[split].records, replicas, batch_size // replicas)
        weights: tuple[float, ...] = ()
        if class_weight is not None:
            if not manifest.is_classes:
                raise SettingsError("class_weight needs one label of kind class; weigh in the model's loss")
            weights = tuple(class_weight.get(index, 1.0) for index in range(len(manifest.class_names)))
        self._feed = Feed(directory, manifest, split, self._plan, shuffle_seed=seed, class_weights=weights)
        self.steps = self._plan.steps

    @property
    def element_spec(self) -> Any:
        """Types and shapes of a batch."""
        return self._feed.element_spec

    @functools.cached_property
    def first(self) -> Any:
        """The first batch."""
        return next(iter(self.batches().take(1)))

    @property
    def described(self) -> str:
        """What the data is: the split and the dataset's fingerprint."""
        return f"{self._feed.split} of {self._feed.manifest.fingerprint}"

    @property
    def digest(self) -> tuple[str, str]:
        """What is the same on all processes."""
        return self.described, ""

    def sizes(self, epoch: int) -> Sequence[int]:
        """Returns the examples of each step of an epoch over all replicas."""
        return self._plan.step_sizes

    def batches(self, start: int = 0) -> tf.data.Dataset:
        """Returns the batches from a number on, counted over all passes, without end."""
        epoch, examples = self._at(start)
        return self._feed.raw_dataset(epoch, _MANY, examples).map(
            tf.autograph.experimental.do_not_convert(self._feed.decode)
        )

    def distribute(
        self,
        strategy: tf.distribute.Strategy,
        worker: int,
        workers: int,
        start: int = 0,
        *,
        sized: bool = False,
    ) -> tf.data.Dataset:
        """Returns what the replicas of a process take in each step from a number on, distributed."""
        epoch, examples = self._at(start)
        return self._feed.distribute(strategy, worker, epoch, _MANY, examples)

    def _at(self, step: int) -> tuple[int, int]:
        epoch, done = divmod(step, self.steps)
        return epoch, done * self._plan.global_batch_size
