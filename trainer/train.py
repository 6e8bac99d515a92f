"""Train: one run on a dataset directory, from settings to a saved model, in any process of a job."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer import loop, models
from shardline.trainer import manifest as manifests
from shardline.trainer.base import files, plugins, progress
from shardline.trainer.base.errors import DatasetError, ModelError, SettingsError, ShardlineError
from shardline.trainer.base.settings import MODEL_FILE, SETTINGS_FILE, OutputDirs, TrainSettings, output_dirs
from shardline.trainer.checkpoint import Checkpoints, Identity, check_model_dir
from shardline.trainer.cluster import ClusterConfig, has_evaluator, read_cluster
from shardline.trainer.data import InputPipeline, describe_dataset, examples, transforms
from shardline.trainer.data.transforms import DEFAULT_FORMS, class_weights, load_augmentation, load_transform
from shardline.trainer.distribute import announce_devices, choose_strategy
from shardline.trainer.keras_compat.keras_internals import weigh_output_losses
from shardline.trainer.loop import callbacks, evaluator
from shardline.trainer.loop.build import accumulate_gradients, build, create_variables, model_function
from shardline.trainer.manifest import Manifest
from shardline.trainer.preemption import Preemption, during_a_run
from shardline.trainer.sharding import EpochPlan, ShardPolicy, shard_policy

_POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


@dataclass(frozen=True, kw_only=True)
class DatasetRun(loop.TrainingRun):
    """A run on a dataset directory, which writes a model directory.

    The chief writes to `dirs`, other processes to `scratch`, which is None on the chief.
    """

    data: InputPipeline
    dirs: OutputDirs
    manifest: Manifest
    scratch: Path | None


def train(settings: TrainSettings, environ: Mapping[str, str] = os.environ) -> loop.Logs:
    """Takes part in a training run, in this process's role in the environment (TF_CONFIG, AIP_*).

    Returns the metrics of the last epoch, the same on every replica that trains; empty on any other.
    """
    cluster = read_cluster(environ)
    announce_devices(cluster, environ)
    settings = replace(settings, evaluator=settings.evaluator or has_evaluator(environ))
    name = choose_strategy(settings, cluster)
    if loop.run_server(cluster, name, settings.startup_timeout):
        return {}
    evaluates = cluster.role == "evaluator"
    dirs, manifest = output_dirs(settings, environ), manifests.load(files.local_path(settings.dataset))
    manifest.info()  # images that differ in size are refused
    settings = settings if settings.per_replica_batch_size else _with_batch_size(settings, manifest, cluster)
    # With parameter servers each worker takes whole steps.
    sharing = 1 if name == "parameter_server" else cluster.num_workers
    check_splits(settings, manifest, sharing, evaluator=settings.evaluator or evaluates)
    known = {"model": settings.model, "dataset": manifest.fingerprint}
    check_model_dir(dirs.model, **known, allow_new_data=settings.allow_new_data)
    model_function(settings.model)
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(loop.join_cluster(settings, cluster, name, manifest.fingerprint))
        prefix = f"shardline-{cluster.name}-"
        scratch = None if cluster.is_chief else tempfile.TemporaryDirectory(prefix=prefix)
        run = DatasetRun(
            **vars(process),
            checkpoints=dirs.checkpoints,
            data=_input_pipeline(process, manifest, "validation" if evaluates else "train"),
            evaluates_final_weights=True,
            watchdog=loop.Watchdog(cluster.name, settings.stall_timeout),
            dirs=dirs,
            manifest=manifest,
            scratch=Path(stack.enter_context(scratch)) if scratch else None,
        )
        with _explain_errors(run):
            if evaluates:
                _evaluate(run)
                return {}
            with run.watchdog, during_a_run(settings.grace_period) as sigterm:
                logs = _train(run, sigterm)
        # A peer that ends early would look lost to those that still write.
        run.collectives.barrier()
        if name == "multi_worker_mirrored":
            run.peers.leave()
    return logs


def _with_batch_size(settings: TrainSettings, manifest: Manifest, cluster: ClusterConfig) -> TrainSettings:
    """Returns settings with the default batch size, or a worker's share of the examples if that is less."""
    split = manifest.splits.get("train")
    share = split.records // cluster.num_workers if split else 0
    default = max(1, min(TrainSettings.per_replica_batch_size, share))
    return replace(settings, per_replica_batch_size=default)


@contextlib.contextmanager
def _explain_errors(run: DatasetRun) -> Iterator[None]:
    """Turns an error of TensorFlow into one about the record or the lost peer that caused it, if known."""
    try:
        yield
    except SystemExit as exit:  # from a model's or a callback's code: nothing is trained
        raise ModelError(f"the run's own code ended it: {plugins.describe(exit)}") from exit
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        directory = files.local_path(run.settings.dataset)
        known = examples.explain_read_error(error, directory, run.manifest) or run.peers.explain(error)
        raise known or error from error
    except ShardlineError as error:
        raise run.peers.explain(error.__cause__) or error from error.__cause__


def _train(run: DatasetRun, preemption: Preemption) -> loop.Logs:
    settings, chief = run.settings, run.cluster.is_chief
    run, model, interface, prepared = _assemble(run)
    if "validation" in run.manifest.splits:
        validation = _input_pipeline(run, run.manifest, "validation")
        run = replace(run, validation=replace(validation, forms=run.data.forms, order=run.data.order))
    chosen = callbacks.make_callbacks(settings, run.scratch or run.dirs.model)
    if chief:
        _announce(run, interface)
    reports = callbacks.chief_reports(run, run.dirs, in_memory=run.data.in_memory) if chief else []
    hooks = callbacks.Hooks(run, chosen, reports)
    training = loop.Training(
        run,
        model,
        hooks,
        data=run.manifest.fingerprint,
        fixed=models.adapted_layers(model, numbers=settings.evaluator),
        preemption=preemption,
    )
    if settings.early_stopping or settings.tuning_metric:
        # The logs that callbacks get after an epoch.
        engine = training.engine
        validated = engine.evaluation.shapes if engine.evaluation else {}
        shown = engine.shapes | {f"val_{name}": shape for name, shape in validated.items()}
        callbacks.check_metrics(settings, chosen, shown)
    if chief:
        transforms.save(prepared, run.dirs.model)
        _write_settings(run, interface, training.state.record)
    alive = evaluator.Evaluations(run.dirs.checkpoints).chief_alive(training.position.steps)
    with (
        alive if settings.evaluator and chief else contextlib.nullcontext(),
        contextlib.closing(training.checkpoints),
    ):
        training.train()
        _finish(run, model, training)
    return training.logs


def _evaluate(run: DatasetRun) -> None:
    run, model, _, _ = _assemble(run, evaluate_only=True)
    batches = run.data.distribute(run.strategy, 0, 1)
    evaluation = loop.EvaluationLoop(model, run.strategy, batches, run.data.steps)
    # No variables are compared: this model lacks those of the optimizer in training.
    identity = Identity(run.settings.model, run.manifest.fingerprint, {})
    evaluator.Evaluator(
        model,
        evaluation,
        Checkpoints(run.settings, run.checkpoints, identity, write=False),
        run.dirs,
        metric=run.settings.early_stopping.removeprefix("val_") or "loss",
        shown=evaluation.shapes,
    ).evaluate_checkpoints(run.settings.startup_timeout)


def _assemble(
    run: DatasetRun, *, evaluate_only: bool = False
) -> tuple[DatasetRun, keras.Model, models.Interface, tf.Module | None]:
    """Returns the run with labels as the model takes them, and the model, built in the strategy's scope.

    Then its interface, and the preparation of inputs, if any. With `evaluate_only` the weights follow later.
    """
    settings, exported = run.settings, not run.settings.allow_unexportable
    info = describe_dataset(files.local_path(settings.dataset), run.manifest)
    prepared = transforms.trace_for_training(settings.transform, info, exported=exported)
    prepare = prepared.prepare if prepared else None
    # seed + 1: tf.data cannot compare a global seed of 0 with the tensor that seeds each epoch's shuffle.
    keras.utils.set_random_seed(settings.seed + 1)
    keras.config.set_dtype_policy(_POLICIES[settings.precision])
    with run.strategy.scope():
        model = build(settings.model, info, settings.model_arguments)
        interface = models.read_interface(
            model, info, transformed=bool(settings.transform), prepare=prepare, exported=exported
        )
        if not evaluate_only:
            accumulate_gradients(model, settings.gradient_accumulation_steps)
        run = replace(run, data=replace(run.data, forms=interface.forms, order=interface.order))
        element = run.data.element_spec
        test_step = {"test_step": element} if "validation" in run.manifest.splits else {}
        create_variables(model, train_step=element, **test_step)
    if not evaluate_only:
        models.check_export(model, info, prepare=prepare, exported=exported)
    with run.strategy.scope():
        weigh_output_losses(model)
        if settings.initial_model:  # also in the evaluator: checkpoints have no vocabularies
            models.warm_start(model, settings.initial_model)
    return run, model, interface, prepared


def _finish(run: DatasetRun, model: keras.Model, training: loop.Training) -> None:
    """Saves the model and its metrics, on the chief."""
    position, logs = training.position, training.logs
    if not run.cluster.is_chief:
        run.watchdog.rest()  # waits for the chief
        return
    run.watchdog.at("saving the model")
    models.save_model(model, run.dirs.model)
    run.watchdog.rest()  # waits for the evaluator
    if run.settings.evaluator:
        logs |= evaluator.wait_for_last_evaluation(run.dirs.checkpoints, position)
    metrics = {"epochs": position.epoch, "steps": position.steps, **callbacks.to_json_values(logs)}
    if not_finite := [name for name, value in metrics.items() if value is None]:
        progress.report("train", f"warning: {', '.join(not_finite)} of the model is not finite")
    files.write_json(run.dirs.model / models.METRICS_FILE, metrics)
    progress.fact("model", str(run.dirs.model / MODEL_FILE))
    progress.fact("TensorBoard logs", str(run.dirs.logs))


def _input_pipeline(process: loop.Process, manifest: Manifest, split: str) -> InputPipeline:
    """Returns the input pipeline of a split; the training split is shuffled, augmented and weighted."""
    settings, records = process.settings, manifest.splits[split].records
    in_memory = settings.cache == "memory"
    if settings.cache == "auto" and process.strategy_name != "parameter_server" and settings.epochs > 1:
        size = _decoded_bytes(process, manifest, split)
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


def _decoded_bytes(process: loop.Process, manifest: Manifest, split: str) -> int | None:
    """Returns the decoded size in bytes of one process's examples of a split; None if it is unknown."""
    shared = _assign_shards(process, manifest).name == "file"
    records = manifest.splits[split].records // (process.cluster.num_workers if shared else 1)
    total = 0
    for feature in (*manifest.inputs.values(), *(label.feature for label in manifest.labels)):
        sizes = [size for size in feature.shape if size is not None]
        if feature.dtype == "string" or len(sizes) < len(feature.shape):
            return None
        total += math.prod(sizes) * np.dtype(feature.dtype).itemsize
    return total * records


def _assign_shards(process: loop.Process, manifest: Manifest) -> ShardPolicy:
    """Returns how the training data is assigned to the workers, and why."""
    if process.strategy_name == "parameter_server":
        return ShardPolicy("chief", "the chief reads all shards and hands each batch to a free worker")
    shards = len(manifest.splits["train"].shards)
    return shard_policy(shards, manifest.streams("train"), process.cluster.num_workers)


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


def _announce(run: DatasetRun, interface: models.Interface) -> None:
    """Reports what will run, with the arithmetic of batches and shards. For the chief."""
    settings, plan, policy = run.settings, run.data.plan, _assign_shards(run, run.manifest)
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
    size = _decoded_bytes(run, run.manifest, "train")
    if run.data.in_memory and size is not None:
        kept = f"{size / 1e6:,.1f} MB"
        progress.report("train", f"input: each worker keeps its examples decoded in memory, {kept}")
    if settings.deterministic and settings.checkpoint_minutes:
        progress.report("train", "deterministic: checkpoints by checkpoint_steps and epoch, not by time")


def _write_settings(run: DatasetRun, interface: models.Interface, record: Mapping[str, Any]) -> None:
    """Writes settings.json: what runs, and the changes in its `IdentityRecord`. For the chief."""
    settings, plan, policy = run.settings, run.data.plan, _assign_shards(run, run.manifest)
    labels = run.manifest.labels
    packages = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")}
    files.write_json(
        run.dirs.model / SETTINGS_FILE,
        {
            "model": settings.model,
            "fingerprint": run.manifest.fingerprint,
            "class_names": run.manifest.class_names,
            "labels": models.unwrap_single_label(
                {label.name: interface.forms.get(label.name, DEFAULT_FORMS[label.kind]) for label in labels}
            ),
            "head": models.unwrap_single_label(interface.heads),
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
