"""Train: one training run from settings to a saved model, in any process of a job."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import keras
import tensorflow as tf

from shardline.trainer.base import files, plugins, progress
from shardline.trainer.base.errors import ModelError, ShardlineError
from shardline.trainer.base.settings import TrainSettings, output_dirs
from shardline.trainer.checkpoint.identity import Identity, check_model_dir
from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.checkpoint.store import Checkpoints
from shardline.trainer.cluster import strategy as strategies
from shardline.trainer.cluster.cluster import has_evaluator, read_cluster
from shardline.trainer.cluster.peers import peer_config
from shardline.trainer.data import examples, transforms
from shardline.trainer.data.pipeline import InputPipeline
from shardline.trainer.keras_compat.keras_internals import weigh_output_losses
from shardline.trainer.loop import evaluator
from shardline.trainer.loop.build import accumulate_gradients, build, create_variables, model_function
from shardline.trainer.loop.callbacks import Hooks, check_metrics, chief_reports, make_callbacks
from shardline.trainer.loop.loop import Training
from shardline.trainer.loop.parameter_server import run_server
from shardline.trainer.loop.process import is_server, join_cluster
from shardline.trainer.loop.reports import Counters, to_json_values
from shardline.trainer.loop.run import (
    DatasetRun,
    Watchdog,
    announce,
    input_pipeline,
    load_data,
    write_settings,
)
from shardline.trainer.loop.step import EvaluationLoop, Logs
from shardline.trainer.models import saving
from shardline.trainer.models.interface import Interface, check_export, read_interface

_POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


def train(settings: TrainSettings, environ: Mapping[str, str], preemption: Preemption) -> Logs:
    """Takes part in a training run, in this process's role in the environment (TF_CONFIG, AIP_*).

    Returns the metrics of the last epoch, the same on every replica that trains; empty on any other.
    """
    cluster = read_cluster(environ)
    strategies.announce(cluster, environ)
    requested, settings = settings, replace(settings, evaluator=settings.evaluator or has_evaluator(environ))
    name = strategies.choose(settings, cluster)
    if is_server(cluster, name):
        run_server(cluster, settings.startup_timeout)
        return {}
    dirs = output_dirs(settings, environ)
    # With parameter servers each worker takes whole steps.
    sharing = 1 if name == "parameter_server" else cluster.num_workers
    manifest = load_data(settings, sharing, evaluator=cluster.role == "evaluator")
    data = manifest.fingerprint
    check_model_dir(dirs.model, model=settings.model, dataset=data, allow_new_data=settings.allow_new_data)
    model_function(settings.model)
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
    own = peer_config(requested, data, len(tf.config.list_physical_devices("GPU")))
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(join_cluster(settings, cluster, name, own))
        prefix = f"shardline-{cluster.name}-"
        scratch = None if cluster.is_chief else tempfile.TemporaryDirectory(prefix=prefix)
        split = "validation" if cluster.role == "evaluator" else "train"
        run = DatasetRun(
            **vars(process),
            checkpoints=dirs.checkpoints,
            data=input_pipeline(process, manifest, split),
            evaluates_final_weights=True,
            watchdog=Watchdog(cluster.name, settings.stall_timeout),
            dirs=dirs,
            manifest=manifest,
            scratch=Path(stack.enter_context(scratch)) if scratch else None,
        )
        with _explain_errors(run):
            if cluster.role == "evaluator":
                _evaluate(run)
                return {}
            stack.enter_context(run.watchdog)
            logs = _train(run, preemption)
        # A peer that ends early would look lost to those that still write.
        run.collectives.barrier()
        if name == "multi_worker_mirrored":
            run.peers.leave()
    return logs


@contextlib.contextmanager
def _explain_errors(run: DatasetRun) -> Iterator[None]:
    """Turns an error of TensorFlow into one about the record or the lost peer that caused it, if known."""
    try:
        yield
    except SystemExit as exit:  # from a model's or a callback's code: nothing is trained
        raise ModelError(f"the run's own code ended it: {plugins.describe(exit)}") from exit
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        directory = files.local_path(run.settings.dataset)
        known = examples.explain(error, directory, run.manifest) or run.peers.explain(error)
        raise known or error from error
    except ShardlineError as error:
        raise run.peers.explain(error.__cause__) or error from error.__cause__


def _train(run: DatasetRun, preemption: Preemption) -> Logs:
    settings, chief = run.settings, run.cluster.is_chief
    model, interface, prepared = _assemble(run)
    run = replace(run, data=_formed(run.data, interface))
    if "validation" in run.manifest.splits:
        run = replace(run, validation=_formed(input_pipeline(run, run.manifest, "validation"), interface))
    if chief:
        announce(run, interface)
    chosen, counters = make_callbacks(run), Counters()
    hooks = Hooks(run, chosen, chief_reports(run, counters))
    training = Training(
        run,
        model,
        hooks,
        data=run.manifest.fingerprint,
        fixed=saving.adapted_layers(model, numbers=settings.evaluator),
        counters=counters,
        preemption=preemption,
    )
    if settings.early_stopping or settings.tuning_metric:
        # The logs that callbacks get after an epoch.
        engine = training.engine
        validated = engine.evaluation.shapes if engine.evaluation else {}
        shown = engine.shapes | {f"val_{name}": shape for name, shape in validated.items()}
        check_metrics(settings, chosen, shown)
    if chief:
        transforms.save(prepared, run.dirs.model)
        write_settings(run, interface, training.state.record)
    alive = evaluator.Evaluations(run.dirs.checkpoints).chief_alive(training.position.steps)
    with (
        alive if settings.evaluator and chief else contextlib.nullcontext(),
        contextlib.closing(training.checkpoints),
    ):
        training.run()
        _finish(run, model, training)
    return training.logs


def _evaluate(run: DatasetRun) -> None:
    model, interface, _ = _assemble(run, evaluate_only=True)
    feed = _formed(run.data, interface)
    evaluation = EvaluationLoop(model, run.strategy, feed.distribute(run.strategy, 0, 1), feed.steps)
    # No variables are compared: this model lacks those of the optimizer in training.
    identity = Identity(run.settings.model, run.manifest.fingerprint, {})
    evaluator.Evaluator(
        model,
        evaluation,
        Checkpoints(run.settings, run.checkpoints, identity, write=False),
        run.dirs,
        metric=run.settings.early_stopping.removeprefix("val_") or "loss",
        shown=evaluation.shapes,
    ).run(run.settings.startup_timeout)


def _formed(data: InputPipeline, interface: Interface) -> InputPipeline:
    return replace(data, forms=interface.forms, order=interface.order)


def _assemble(
    run: DatasetRun, *, evaluate_only: bool = False
) -> tuple[keras.Model, Interface, tf.Module | None]:
    """Returns a model built in the strategy's scope, its interface, and the preparation of inputs, if any.

    With `evaluate_only` its weights are restored later.
    """
    settings, exported = run.settings, not run.settings.allow_unexportable
    info = examples.describe(files.local_path(settings.dataset), run.manifest)
    prepared = transforms.trace_for_training(settings.transform, info, exported=exported)
    prepare = prepared.prepare if prepared else None
    # seed + 1: tf.data cannot compare a global seed of 0 with the tensor that seeds each epoch's shuffle.
    keras.utils.set_random_seed(settings.seed + 1)
    keras.config.set_dtype_policy(_POLICIES[settings.precision])
    element = run.data.element_spec
    with run.strategy.scope():
        model = build(settings.model, info, settings.model_arguments)
        interface = read_interface(
            model, info, transformed=bool(settings.transform), prepare=prepare, exported=exported
        )
        if not evaluate_only:
            accumulate_gradients(model, settings.gradient_accumulation_steps)
        if interface.forms or interface.order:
            element = _formed(run.data, interface).element_spec
        test_step = {"test_step": element} if "validation" in run.manifest.splits else {}
        create_variables(model, train_step=element, **test_step)
    if not evaluate_only:
        check_export(model, info, prepare=prepare, exported=exported)
    with run.strategy.scope():
        weigh_output_losses(model)
        if settings.initial_model:  # also in the evaluator: checkpoints have no vocabularies
            saving.warm_start(model, settings.initial_model)
    return model, interface, prepared


def _finish(run: DatasetRun, model: keras.Model, training: Training) -> None:
    """Saves the model and its metrics, on the chief."""
    position, logs = training.position, training.logs
    if not run.cluster.is_chief:
        run.watchdog.rest()  # waits for the chief
        return
    run.watchdog.at("saving the model")
    saving.save_model(model, run.dirs.model)
    run.watchdog.rest()  # waits for the evaluator
    if run.settings.evaluator:
        logs |= evaluator.wait_for_last_evaluation(run, position)
    metrics = {"epochs": position.epoch, "steps": position.steps, **to_json_values(logs)}
    if not_finite := [name for name, value in metrics.items() if value is None]:
        progress.report("train", f"warning: {', '.join(not_finite)} of the model is not finite")
    files.write_json(run.dirs.model / saving.METRICS_FILE, metrics)
    progress.fact("model", str(run.dirs.model / saving.MODEL_FILE))
    progress.fact("TensorBoard logs", str(run.dirs.logs))
