"""One training run, from settings to a saved model. Every replica runs this same program."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from trainer import files, progress, saving
from trainer.callbacks.history import HistoryFile
from trainer.callbacks.report import Report
from trainer.data import manifest as manifests
from trainer.data.manifest import DatasetInfo, Manifest
from trainer.data.order import EpochPlan, worker_shards
from trainer.data.pipeline import Feed
from trainer.distribute import strategy as strategies
from trainer.distribute.cluster import Cluster, read_cluster
from trainer.environment import OutputDirs, output_dirs
from trainer.errors import DatasetError, SettingsError
from trainer.loop import Logs, Loop
from trainer.models.build import build, model_function
from trainer.resume.checkpoint import Checkpoints
from trainer.settings import TrainSettings

# Steps between two looks at the metrics, unless set: reading them makes all replicas meet.
_STEPS_PER_EXECUTION = 50


@dataclass(frozen=True)
class Run:
    """Everything that is fixed before the first step."""

    settings: TrainSettings
    cluster: Cluster
    dirs: OutputDirs
    manifest: Manifest
    strategy: tf.distribute.Strategy
    plan: EpochPlan
    scratch: Path | None


def train(settings: TrainSettings, environ: Mapping[str, str]) -> Logs:
    """Trains a model and saves it.

    Args:
        settings: What to do; the same on every replica.
        environ: The process's environment: TF_CONFIG and AIP_* are read from it.

    Returns:
        The metrics of the last epoch, the same on every replica.

    Raises:
        ShardlineError: For every mistake in settings, cluster, dataset or model.
    """
    cluster = read_cluster(environ)
    dirs = output_dirs(settings, environ)
    manifest = manifests.load(files.local_path(settings.dataset))
    manifest.info()  # images that differ in size are refused before any peer is waited for
    _check_splits(settings, manifest, cluster)
    model_function(settings.model)  # a wrong one is refused before any peer is waited for
    strategy = strategies.create(settings.strategy, cluster)
    plan = _plan(settings, manifest, "train", strategy)
    with _scratch(cluster) as scratch:
        run = Run(settings, cluster, dirs, manifest, strategy, plan, scratch)
        if cluster.is_chief:
            _announce(run)
        logs = _fit(run)
        # A peer that leaves early would look like a failure to those that still write.
        strategies.barrier(strategy)
    return logs


def _check_splits(settings: TrainSettings, manifest: Manifest, cluster: Cluster) -> None:
    if "train" not in manifest.splits:
        raise DatasetError(f"the dataset has no train split, only {sorted(manifest.splits)}")
    records = manifest.splits["train"].records
    if settings.per_replica_batch_size > records:
        raise SettingsError(
            f"per_replica_batch_size {settings.per_replica_batch_size} is larger than the training split of "
            f"{records} examples; choose at most {records}"
        )
    for name in ("train", "validation"):
        if name in manifest.splits and manifest.splits[name].records < cluster.num_workers:
            raise SettingsError(
                f"the {name} split has {manifest.splits[name].records} examples for {cluster.num_workers} "
                "replicas, and each needs one: use fewer replicas or more data"
            )


def _plan(
    settings: TrainSettings, manifest: Manifest, split: str, strategy: tf.distribute.Strategy
) -> EpochPlan:
    return EpochPlan(
        records=manifest.splits[split].records,
        replicas=strategy.num_replicas_in_sync,
        per_replica_batch_size=settings.per_replica_batch_size,
    )


@contextlib.contextmanager
def _scratch(cluster: Cluster) -> Iterator[Path | None]:
    """Gives a replica other than the chief a directory of its own, removed at the end."""
    if cluster.is_chief:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix=f"shardline-{cluster.name}-") as directory:
        yield Path(directory)


def _announce(run: Run) -> None:
    """Says once what will run, with the arithmetic of batches and shards, and records it."""
    plan, settings = run.plan, run.settings
    name = strategies.choose(settings.strategy, run.cluster)
    shards = [shard.file for shard in run.manifest.splits["train"].shards]
    policy = worker_shards(shards, run.cluster.num_workers, 0).policy
    progress.fact("replicas", plan.replicas, f"{plan.replicas} ({run.cluster})")
    progress.fact("strategy", name)
    progress.say(
        "train",
        f"{settings.model} on {run.cluster}, strategy {name}: global batch {plan.global_batch_size} = "
        f"{plan.replicas} x {plan.per_replica_batch_size}, {plan.steps:,} steps an epoch over "
        f"{plan.records:,} examples, {len(shards)} shards by {policy}",
    )
    run.dirs.model.mkdir(parents=True, exist_ok=True)
    files.write_json(
        run.dirs.model / saving.SETTINGS_FILE,
        {
            "model": settings.model,
            "fingerprint": run.manifest.fingerprint,
            "class_names": run.manifest.class_names,
            "seed": settings.seed,
            "settings": asdict(settings),
            "strategy": name,
            "replicas": plan.replicas,
            "global_batch_size": plan.global_batch_size,
            "steps_per_epoch": plan.steps,
            "shard_policy": policy,
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")},
            },
        },
    )


def _fit(run: Run) -> Logs:
    settings = run.settings
    # One up: tf.data cannot compare a global seed of 0 with the tensor that seeds each epoch's shuffle.
    keras.utils.set_random_seed(settings.seed + 1)
    with run.strategy.scope():
        model = build(settings.model, run.manifest.info(), settings.model_arguments)
        _create_variables(model, run.manifest.info())
        checkpoints = Checkpoints(
            model,
            run.dirs.checkpoints,
            scratch=run.scratch,
            identity={"model": settings.model, "dataset": run.manifest.fingerprint},
        )
    first_epoch = checkpoints.restore()
    if first_epoch and run.cluster.is_chief:
        progress.say("train", f"resuming after epoch {first_epoch} from {run.dirs.checkpoints}")
    logs = _epochs(run, model, checkpoints, first_epoch)
    saving.save_model(model, run.dirs.model, scratch=run.scratch)
    if run.cluster.is_chief:
        files.write_json(run.dirs.model / saving.METRICS_FILE, {"epochs": settings.epochs, **logs})
        progress.fact("model", str(run.dirs.model / saving.MODEL_FILE))
        progress.fact("TensorBoard logs", str(run.dirs.logs))
    return logs


def _create_variables(model: keras.Model, info: DatasetInfo) -> None:
    """Builds model, optimizer and metrics now, inside the strategy's scope, where they become distributed.

    Left to the first step they would be created inside a replica, which TensorFlow refuses.
    """
    images = np.zeros((1, *info.input_shape), np.uint8)
    model._symbolic_build(data_batch=(images, np.zeros(1, np.int64)))


def _epochs(run: Run, model: keras.Model, checkpoints: Checkpoints, first_epoch: int) -> Logs:
    settings, manifest, strategy = run.settings, run.manifest, run.strategy
    directory = files.local_path(settings.dataset)
    train = Feed(directory, manifest, "train", run.plan, shuffle_seed=settings.seed)
    batches = iter(train.distribute(strategy, first_epoch, settings.epochs))
    loop = Loop(model, strategy, steps_per_execution=settings.steps_per_execution or _STEPS_PER_EXECUTION)
    merge = strategies.replica_merger(strategy, model)
    validate = _validation(run, loop)
    chosen = (
        [
            Report(run.plan, first_epoch, settings.epochs),
            HistoryFile(run.dirs.model, run.plan, first_epoch),
            keras.callbacks.TensorBoard(str(run.dirs.logs), write_graph=False),
        ]
        if run.cluster.is_chief
        else []
    )
    callbacks = keras.callbacks.CallbackList(chosen, model=model, epochs=settings.epochs)
    model.stop_training = False
    logs: Logs = {}
    callbacks.on_train_begin()
    for epoch in range(first_epoch, settings.epochs):
        callbacks.on_epoch_begin(epoch)
        logs = loop.train_epoch(batches, run.plan, callbacks)
        merge()
        logs |= validate()
        callbacks.on_epoch_end(epoch, logs)
        checkpoints.save(epoch + 1)
        if model.stop_training:
            break
    callbacks.on_train_end(logs)
    return logs or validate()


def _validation(run: Run, loop: Loop) -> Callable[[], Logs]:
    """Returns a function that evaluates the validation split; without one it returns nothing."""
    if "validation" not in run.manifest.splits:
        return dict
    plan = _plan(run.settings, run.manifest, "validation", run.strategy)
    feed = Feed(files.local_path(run.settings.dataset), run.manifest, "validation", plan)
    dataset = feed.distribute(run.strategy, 0, 1)

    def validate() -> Logs:
        return {f"val_{name}": value for name, value in loop.evaluate(iter(dataset), plan).items()}

    return validate
