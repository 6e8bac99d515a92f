"""Run: what is fixed before the first step, wherever the data comes from: settings, cluster, strategy."""

from __future__ import annotations

import abc
import faulthandler
import importlib.metadata
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import EXIT_FAILED, DatasetError, RunError, SettingsError
from shardline.trainer.base.settings import SETTINGS_FILE, OutputDirs, TrainSettings
from shardline.trainer.checkpoint.state import Position
from shardline.trainer.data import examples, transforms
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import DatasetInfo, Manifest
from shardline.trainer.data.pipeline import InputPipeline
from shardline.trainer.data.sharding import EpochPlan, ShardPolicy, shard_policy
from shardline.trainer.data.transforms import DEFAULT_FORMS, class_weights, load_augmentation, load_transform
from shardline.trainer.loop.process import Process
from shardline.trainer.models.interface import Interface, unwrap_single_label


class RunPlan(NamedTuple):
    """Remaining steps of an epoch.

    Attributes:
        start: Examples of the epoch that are trained already.
        first_step: Number of the first remaining step within the epoch, from 0.
        step_sizes: Examples of each remaining step, over all replicas.
    """

    start: int
    first_step: int
    step_sizes: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Process, abc.ABC):
    """One run, as one process sees it; `checkpoints` is their directory, None to keep none."""

    checkpoints: Path | None
    watchdog: Watchdog

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch."""

    @abc.abstractmethod
    def epoch(self, at: Position) -> RunPlan:
        """Returns what is left of the epoch of a position."""

    @abc.abstractmethod
    def step_source(self, plan: RunPlan, step: int, process: int) -> str:
        """Names the place of one process's examples of a step of the plan."""

    # Whether the validation data is evaluated at the end, since callbacks may have put other weights back.
    judges_end: ClassVar[bool] = True

    def validates(self, epoch: int) -> bool:
        """Whether the validation data is evaluated after an epoch, from 0."""
        return True


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
        """Ends the process from this thread: the main thread waits in TensorFlow and never comes back."""
        while not self._over.wait(min(1.0, self._timeout / 4)):
            place, since = self._state
            if time.monotonic() - since <= self._timeout:
                continue
            text = (
                f"{self._name} has made no progress for {self._timeout:g} s (stall_timeout), {place}; "
                "compare where the other replicas stand: a callback that runs on one of them only, or code "
                "that takes another way there, makes the others wait"
            )
            progress.fail("train", RunError(text))
            faulthandler.dump_traceback(file=sys.stderr)
            sys.stderr.flush()
            self._over.wait(_LAST_WORDS_S)
            os._exit(EXIT_FAILED)


_NAMED_SHARDS = 4


@dataclass(frozen=True, kw_only=True)
class DatasetRun(TrainingRun):
    """A run on a dataset directory, which leaves a model directory.

    The chief writes into `dirs`, any other process into `scratch`, which is None on the chief.
    """

    dirs: OutputDirs
    manifest: Manifest
    scratch: Path | None

    @property
    def shard_policy(self) -> ShardPolicy:
        """How the training data reaches the workers, and why."""
        if self.strategy_name == "parameter_server":
            return ShardPolicy("chief", "the chief reads all shards and hands each batch to a free worker")
        return shard_policy(len(self.manifest.splits["train"].shards), self.cluster.num_workers)

    def plan(self, split: str, start: int = 0) -> EpochPlan:
        """Returns the steps of one pass over a split, from example `start` on."""
        records, batch_size = self.manifest.splits[split].records, self.settings.per_replica_batch_size
        return EpochPlan(records, self.replicas, batch_size, start)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch."""
        return self.plan("train").steps

    def epoch(self, at: Position) -> RunPlan:
        """Returns what is left of the epoch of a position."""
        plan = self.plan("train", at.examples)
        return RunPlan(plan.start, plan.first_step, plan.step_sizes)

    def feed(self, split: str) -> InputPipeline:
        """Returns the input pipeline of a split; the training split is shuffled, augmented and weighted."""
        settings, manifest = self.settings, self.manifest
        # Whether this process keeps its examples of the split in memory.
        fits = settings.cache == "memory"
        if settings.cache == "auto" and self.strategy_name != "parameter_server" and settings.epochs > 1:
            size = self.memory(split)
            fits = size is not None and size <= examples.memory_budget()
        feed = InputPipeline(
            files.local_path(settings.dataset),
            manifest,
            split,
            self.plan(split),
            transform=load_transform(settings.transform) if settings.transform else None,
            in_memory=fits,
        )
        if split != "train":
            return replace(feed, epochs=1)
        return replace(
            feed,
            epochs=settings.epochs,
            shuffle_seed=settings.seed,
            augmentation=load_augmentation(settings.augment, manifest.info()) if settings.augment else None,
            class_weights=class_weights(settings.class_weights, manifest),
        )

    def preparation(self) -> tf.Module | None:
        """Returns what the transformation does to inputs, if anything: the export will do it too."""
        exported = not self.settings.allow_unexportable
        return transforms.trace_for_training(self.settings.transform, self.manifest.info(), exported=exported)

    def info(self) -> DatasetInfo:
        """Returns what a model function is told about the dataset, with its training examples."""
        return examples.describe(files.local_path(self.settings.dataset), self.manifest)

    def memory(self, split: str) -> int | None:
        """Returns the bytes that one process's examples of a split take decoded; None if it is not known."""
        shared = self.shard_policy.name == "file"
        records = self.manifest.splits[split].records // (self.cluster.num_workers if shared else 1)
        features = [*self.manifest.inputs.values(), *(label.feature for label in self.manifest.labels)]
        return examples.decoded_bytes(features, records)

    def step_source(self, plan: RunPlan, step: int, process: int) -> str:
        """Names the shards that one process's examples of a step of the plan come from."""
        files = [shard.file for shard in self.manifest.splits["train"].shards]
        first = plan.start + sum(plan.step_sizes[:step])
        positions = range(first, first + plan.step_sizes[step])
        used = sorted({p % len(files) for p in positions if p % len(self.processes) == process})
        names = ", ".join(files[index] for index in used[:_NAMED_SHARDS])
        return names + (f" and {len(used) - _NAMED_SHARDS} more shards" if len(used) > _NAMED_SHARDS else "")


def load_data(settings: TrainSettings, sharing: int, *, evaluator: bool) -> Manifest:
    """Loads the manifest of a dataset that can be shared out to so many workers, and has what is needed."""
    manifest = manifests.load(files.local_path(settings.dataset))
    manifest.info()  # images that differ in size are refused
    check_splits(settings, manifest, sharing, evaluator=settings.evaluator or evaluator)
    return manifest


def check_splits(settings: TrainSettings, manifest: Manifest, workers: int, *, evaluator: bool) -> None:
    """Refuses a dataset that cannot be shared out to some number of workers, or that the evaluator lacks."""
    if "train" not in manifest.splits:
        raise DatasetError(f"the dataset has no train split, only {sorted(manifest.splits)}")
    records = manifest.splits["train"].records
    if settings.per_replica_batch_size > records // workers:
        share = f", of which each of {workers} workers has {records // workers}" if workers > 1 else ""
        raise SettingsError(
            f"per_replica_batch_size {settings.per_replica_batch_size} is larger than the training split of "
            f"{records} examples{share}; choose at most {records // workers}"
        )
    if evaluator and "validation" not in manifest.splits:
        raise SettingsError(
            f"the evaluator needs a validation split; the dataset has {sorted(manifest.splits)}: "
            "preprocess with one, or train without an evaluator"
        )
    for name in ("train", "validation"):
        if name in manifest.splits and manifest.splits[name].records < workers:
            raise SettingsError(
                f"the {name} split has {manifest.splits[name].records} examples for {workers} "
                "replicas, and each needs one: use fewer replicas or more data"
            )


def announce(run: DatasetRun, interface: Interface) -> None:
    """Says once what will run, with the arithmetic of batches and shards. For the chief."""
    settings, plan, policy = run.settings, run.plan("train"), run.shard_policy
    updates = settings.gradient_accumulation_steps
    progress.fact("replicas", run.cluster.num_workers, f"{run.cluster.num_workers} ({run.cluster})")
    progress.fact("strategy", run.strategy_name)
    progress.report(
        "train",
        f"{settings.model} on {run.cluster}, strategy {run.strategy_name}: global batch "
        f"{plan.global_batch_size} = {plan.replicas} x {plan.per_replica_batch_size}"
        + (f", {updates} of them to an update" if updates > 1 else "")
        + f"; {plan.steps:,} steps an epoch over {plan.records:,} examples",
    )
    progress.report("train", f"shard policy {policy.name}: {policy.reason}")
    for description in interface.descriptions:
        progress.report("train", f"labels: {description}")
    size = run.memory("train")
    if run.feed("train").in_memory and size is not None:
        kept = f"{size / 1e6:,.1f} MB"
        progress.report("train", f"input: each worker keeps its examples decoded in memory, {kept}")
    if settings.scale_learning_rate or settings.warmup_steps:
        factor = plan.replicas if settings.scale_learning_rate else 1
        progress.report("train", f"learning rate x {factor}, reached over {settings.warmup_steps} updates")
    if settings.deterministic and settings.checkpoint_minutes:
        progress.report("train", "deterministic: checkpoints by checkpoint_steps and epoch, not by time")


def write_settings(run: DatasetRun, interface: Interface, changes: Sequence[Mapping[str, Any]]) -> None:
    """Records what runs, and which settings have changed on the way, in settings.json. For the chief."""
    settings, plan, policy = run.settings, run.plan("train"), run.shard_policy
    labels = run.manifest.labels
    files.write_json(
        run.dirs.model / SETTINGS_FILE,
        {
            "model": settings.model,
            "fingerprint": run.manifest.fingerprint,
            "class_names": run.manifest.class_names,
            "labels": unwrap_single_label(
                {one.name: interface.forms.get(one.name, DEFAULT_FORMS[one.kind]) for one in labels}
            ),
            "head": unwrap_single_label(interface.heads),
            "seed": settings.seed,
            "settings": asdict(settings),
            "changes": list(changes),
            "strategy": run.strategy_name,
            "cluster": str(run.cluster),
            "replicas": plan.replicas,
            "global_batch_size": plan.global_batch_size,
            "examples_per_update": plan.global_batch_size * settings.gradient_accumulation_steps,
            "steps_per_epoch": plan.steps,
            "shard_policy": policy._asdict(),
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")},
            },
        },
    )
