"""Run: settings, cluster, strategy and data that are fixed before the first step, and the watchdog."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardline.trainer.adapters import Batches
from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import EXIT_FAILED, DatasetError, RunError, SettingsError
from shardline.trainer.base.settings import SETTINGS_FILE, OutputDirs, TrainSettings
from shardline.trainer.data import examples
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import Manifest
from shardline.trainer.data.pipeline import InputPipeline
from shardline.trainer.data.sharding import EpochPlan, ShardPolicy, shard_policy
from shardline.trainer.data.transforms import DEFAULT_FORMS, class_weights, load_augmentation, load_transform
from shardline.trainer.loop.process import Process
from shardline.trainer.models.interface import Interface, unwrap_single_label


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Process):
    """One run on one process.

    Attributes:
        checkpoints: Directory of checkpoints; None for none.
        data: Training data.
        validation: Validation data; None for none.
        validation_freq: Epochs between validations, or the numbers, from 1, of the epochs to validate.
        evaluates_final_weights: Whether the validation data is evaluated at the end, as callbacks may have
            restored other weights.
    """

    checkpoints: Path | None
    watchdog: Watchdog
    data: Batches
    validation: Batches | None = None
    validation_freq: int | Collection[int] = 1
    evaluates_final_weights: bool = False

    def validates(self, epoch: int) -> bool:
        """Whether the validation data is evaluated after an epoch, from 0."""
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


# Seconds for other replicas to report their own stall, before the end of this one ends them.
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

    def at(self, activity: str) -> None:
        """Records progress: a new activity of the process ("in step 41")."""
        self._state = (activity, time.monotonic())

    def rest(self) -> None:
        """Records that the process waits for something with a time limit of its own."""
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
        """Ends the process from this thread: the main thread may wait in TensorFlow forever."""
        while not self._over.wait(min(1.0, self._timeout / 4)):
            activity, since = self._state
            if time.monotonic() - since <= self._timeout:
                continue
            text = (
                f"{self._name} has made no progress for {self._timeout:g} s (stall_timeout), {activity}; "
                "compare with the last lines of the other replicas: a callback that runs on one of them "
                "only, or code with another branch there, makes the others wait"
            )
            progress.fail("train", RunError(text))
            faulthandler.dump_traceback(file=sys.stderr)
            sys.stderr.flush()
            self._over.wait(_LAST_WORDS_S)
            os._exit(EXIT_FAILED)


@dataclass(frozen=True, kw_only=True)
class DatasetRun(TrainingRun):
    """A run on a dataset directory, which writes a model directory.

    The chief writes to `dirs`, other processes to `scratch`, which is None on the chief.
    """

    data: InputPipeline
    dirs: OutputDirs
    manifest: Manifest
    scratch: Path | None


def input_pipeline(process: Process, manifest: Manifest, split: str) -> InputPipeline:
    """Returns the input pipeline of a split; the training split is shuffled, augmented and weighted."""
    settings, records = process.settings, manifest.splits[split].records
    in_memory = settings.cache == "memory"
    if settings.cache == "auto" and process.strategy_name != "parameter_server" and settings.epochs > 1:
        size = decoded_bytes(process, manifest, split)
        in_memory = size is not None and size <= examples.memory_budget()
    pipeline = InputPipeline(
        files.local_path(settings.dataset),
        manifest,
        split,
        EpochPlan(records, process.replicas, settings.per_replica_batch_size),
        transform=load_transform(settings.transform) if settings.transform else None,
        in_memory=in_memory,
    )
    if split != "train":
        return replace(pipeline, epochs=1)
    return replace(
        pipeline,
        epochs=settings.epochs,
        shuffle_seed=settings.seed,
        augmentation=load_augmentation(settings.augment, manifest.info()) if settings.augment else None,
        class_weights=class_weights(settings.class_weights, manifest),
    )


def decoded_bytes(process: Process, manifest: Manifest, split: str) -> int | None:
    """Returns the decoded size in bytes of one process's examples of a split; None if it is unknown."""
    shared = assign_shards(process, manifest).name == "file"
    records = manifest.splits[split].records // (process.cluster.num_workers if shared else 1)
    total = 0
    for feature in (*manifest.inputs.values(), *(label.feature for label in manifest.labels)):
        sizes = [size for size in feature.shape if size is not None]
        if feature.dtype == "string" or len(sizes) < len(feature.shape):
            return None
        total += math.prod(sizes) * np.dtype(feature.dtype).itemsize
    return total * records


def assign_shards(process: Process, manifest: Manifest) -> ShardPolicy:
    """Returns how the training data is assigned to the workers, and why."""
    if process.strategy_name == "parameter_server":
        return ShardPolicy("chief", "the chief reads all shards and hands each batch to a free worker")
    shards = len(manifest.splits["train"].shards)
    return shard_policy(shards, manifest.streams("train"), process.cluster.num_workers)


def load_data(settings: TrainSettings, workers: int, *, evaluator: bool) -> Manifest:
    """Loads the manifest of a dataset, and checks its splits for a number of workers."""
    manifest = manifests.load(files.local_path(settings.dataset))
    manifest.info()  # images that differ in size are refused
    check_splits(settings, manifest, workers, evaluator=settings.evaluator or evaluator)
    return manifest


def check_splits(settings: TrainSettings, manifest: Manifest, workers: int, *, evaluator: bool) -> None:
    """Refuses a dataset whose splits are too small for the workers, or missing."""
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
    validation = manifest.splits.get("validation")
    if validation and validation.records < workers:
        raise SettingsError(
            f"the validation split has {validation.records} examples for {workers} replicas, and each needs "
            "one: use fewer replicas or more data"
        )


def announce(run: DatasetRun, interface: Interface) -> None:
    """Reports what will run, with the arithmetic of batches and shards. For the chief."""
    settings, plan, policy = run.settings, run.data.plan, assign_shards(run, run.manifest)
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
    size = decoded_bytes(run, run.manifest, "train")
    if run.data.in_memory and size is not None:
        kept = f"{size / 1e6:,.1f} MB"
        progress.report("train", f"input: each worker keeps its examples decoded in memory, {kept}")
    if settings.deterministic and settings.checkpoint_minutes:
        progress.report("train", "deterministic: checkpoints by checkpoint_steps and epoch, not by time")


def write_settings(run: DatasetRun, interface: Interface, record: Mapping[str, Any]) -> None:
    """Writes settings.json: what runs, and the changes in its `IdentityRecord`. For the chief."""
    settings, plan, policy = run.settings, run.data.plan, assign_shards(run, run.manifest)
    labels = run.manifest.labels
    packages = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")}
    files.write_json(
        run.dirs.model / SETTINGS_FILE,
        {
            "model": settings.model,
            "fingerprint": run.manifest.fingerprint,
            "class_names": run.manifest.class_names,
            "labels": unwrap_single_label(
                {label.name: interface.forms.get(label.name, DEFAULT_FORMS[label.kind]) for label in labels}
            ),
            "head": unwrap_single_label(interface.heads),
            "seed": settings.seed,
            "settings": asdict(settings),
            "learning_rates": list(record["learning_rates"]),
            "changes": list(record["changes"]),
            "strategy": run.strategy_name,
            "cluster": str(run.cluster),
            "replicas": plan.replicas,
            "global_batch_size": plan.global_batch_size,
            "examples_per_update": plan.global_batch_size * settings.gradient_accumulation_steps,
            "steps_per_epoch": plan.steps,
            "shard_policy": policy._asdict(),
            "versions": {"python": platform.python_version(), **packages},
        },
    )
