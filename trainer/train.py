"""One training run, from settings to a saved model. Every process of a job runs this same program.

What trains and what evaluates under a strategy: all replicas in step, or each worker by itself.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import keras
import tensorflow as tf

from shardline.trainer import evaluator, files, progress, saving
from shardline.trainer.assembly import assemble
from shardline.trainer.callbacks import Counters, chief_callbacks, stateful_callbacks
from shardline.trainer.checkpoint.identity import Identity, check_model_dir
from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.checkpoint.state import Position, TrainingState
from shardline.trainer.checkpoint.store import Checkpoints
from shardline.trainer.cluster import strategy as strategies
from shardline.trainer.cluster.cluster import Cluster, read_cluster
from shardline.trainer.cluster.collectives import Collectives, make_summation
from shardline.trainer.cluster.exchange import make_merge
from shardline.trainer.cluster.peers import Peers
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data import pipeline
from shardline.trainer.data.pipeline import Feed
from shardline.trainer.errors import RunError, SettingsError
from shardline.trainer.loop import Training
from shardline.trainer.models.build import model_function
from shardline.trainer.optimizers import finalize
from shardline.trainer.parameter_server import CoordinatorEvaluation, CoordinatorLoop, Workers, run_server
from shardline.trainer.run import Run, announce, check_splits
from shardline.trainer.settings import TrainSettings, has_evaluator, output_dirs
from shardline.trainer.step import Engine, Evaluation, Logs, Loop

Engines = tuple[Engine, Callable[[], Logs]]


def make_engine(run: Run, model: keras.Model, feed: Feed, position: Position) -> Engines:
    """Returns what trains, and what evaluates the validation split; without one, that returns nothing.

    Args:
        run: The run.
        model: Compiled and built inside the strategy's scope.
        feed: The training split.
        position: Where to begin.
    """
    make = _asynchronous if run.strategy_name == "parameter_server" else _synchronous
    return make(run, model, feed, position)


def _synchronous(run: Run, model: keras.Model, feed: Feed, position: Position) -> Engines:
    settings = run.settings
    batches = feed.distribute(run.strategy, run.process, position.epoch, settings.epochs, position.examples)
    loop = Loop(
        model,
        run.strategy,
        iter(batches),
        make_summation(settings, run.strategy, run.cluster),
        averaging_steps=settings.averaging_steps,
        jit_compile=settings.jit_compile,
        deterministic=settings.deterministic,
    )
    if "validation" not in run.manifest.splits:
        return loop, dict
    validation = run.feed("validation")
    split = validation.distribute(run.strategy, run.process, 0, 1)
    return loop, Evaluation(model, run.strategy, split, validation.plan.steps)


def _asynchronous(run: Run, model: keras.Model, feed: Feed, position: Position) -> Engines:
    workers = Workers(run.strategy, run.cluster, run.settings.startup_timeout)
    batches = feed.raw_dataset(position.epoch, run.settings.epochs, position.examples)
    loop = CoordinatorLoop(model, workers, batches, feed.decode)
    if "validation" not in run.manifest.splits:
        return loop, dict
    validation = run.feed("validation")
    return loop, CoordinatorEvaluation(model, workers, validation.raw_dataset(0, 1), validation.decode)


def train(settings: TrainSettings, environ: Mapping[str, str], preemption: Preemption) -> Logs:
    """Takes part in a training run, in the role that the environment gives to this process.

    Args:
        settings: What to do; the same on every replica.
        environ: The process's environment: TF_CONFIG and AIP_* are read from it.
        preemption: Notices SIGTERM.

    Returns:
        The metrics of the last epoch, the same on every replica that trains; nothing on any other.

    Raises:
        ShardlineError: For every mistake in settings, cluster, dataset or model.
        RestartError: After SIGTERM, when a checkpoint has been saved.
    """
    cluster = read_cluster(environ)
    if has_evaluator(environ):
        settings = replace(settings, evaluator=True)
    name = strategies.choose(settings, cluster)
    if name == "parameter_server" and cluster.role in ("worker", "ps"):
        run_server(cluster, settings.startup_timeout)
        return {}
    _check_strategy(settings, name)
    dirs = output_dirs(settings, environ)
    manifest = manifests.load(files.local_path(settings.dataset))
    manifest.info()  # images that differ in size are refused before any peer is waited for
    # Where workers take whole steps each, no step is shared out.
    sharing = 1 if name == "parameter_server" else cluster.num_workers
    check_splits(settings, manifest, sharing, evaluator=settings.evaluator or cluster.role == "evaluator")
    check_model_dir(
        dirs.model,
        model=settings.model,
        dataset=manifest.fingerprint,
        allow_new_data=settings.allow_new_data,
    )
    model_function(settings.model)  # a wrong one is refused before any peer is waited for
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
    peers = Peers(cluster)
    peers.meet(settings.startup_timeout)
    with _scratch(cluster) as scratch:
        strategy = strategies.create(settings, cluster)
        replicas = 1 if name == "parameter_server" else strategy.num_replicas_in_sync
        run = Run(settings, cluster, dirs, manifest, strategy, name, replicas, scratch)
        if cluster.role == "evaluator":
            evaluator.run(run)
            return {}
        try:
            logs = _train(run, preemption)
        except tf.errors.OpError as error:
            raise pipeline.explain(error) or peers.explain(error) or error from error
        # A peer that leaves early would look like a failure to those that still write.
        Collectives(strategy).barrier()
        if name == "multi_worker_mirrored":
            peers.leave()
    return logs


def _check_strategy(settings: TrainSettings, name: str) -> None:
    """Refuses settings that the strategy cannot follow."""
    if settings.jit_compile and name != "one_device":
        raise SettingsError(
            f"jit_compile needs strategy one_device: XLA compiles no exchange, as {name} needs it"
        )
    if settings.averaging_steps and name != "multi_worker_mirrored":
        raise SettingsError(
            "averaging_steps needs strategy multi_worker_mirrored, workers with weights of their own; "
            f"this run has {name}"
        )


def _train(run: Run, preemption: Preemption) -> Logs:
    settings, chief = run.settings, run.cluster.is_chief
    feed = run.feed("train")
    assembly = assemble(run, feed)
    model = assembly.model
    if chief:
        announce(run)
    meter = Counters(run.replicas)
    engine: Engine | None = None

    def retrace() -> None:
        if engine:
            engine.retrace()

    own = stateful_callbacks(run, assembly, meter, retrace)
    chosen = [*own, *(chief_callbacks(run, meter) if chief else [])]
    callbacks = keras.callbacks.CallbackList(chosen, model=model, epochs=settings.epochs)
    model.stop_training = False
    callbacks.on_train_begin()
    state = TrainingState(model, own)  # after on_train_begin, which resets what callbacks remember
    checkpoints = _checkpoints(run, state)
    together = Collectives(run.strategy)
    position = _resume(run, state, checkpoints, together)
    engine, evaluate = make_engine(run, model, feed, position)
    _count_steps(run, meter, position)
    preemption.ready()
    training = Training(
        run,
        model,
        engine,
        position=position,
        state=state,
        checkpoints=checkpoints,
        callbacks=callbacks,
        collectives=together,
        preemption=preemption,
        merge=_merger(run, model),
        validate=lambda: {f"val_{name}": value for name, value in evaluate().items()},
        meter=meter,
    )
    with evaluator.watched(run, position):
        logs = training.run()
        callbacks.on_train_end(logs)
        checkpoints.wait()
        averaged = finalize(model)
        if averaged or model.stop_training or not logs:
            # Averages, or the best weights that early stopping has put back, have not been validated.
            logs |= training.validate()
        _finish(run, model, training.position, logs)
    return logs


def _merger(run: Run, model: keras.Model) -> Callable[[], None]:
    merge = strategies.replica_merger(run.strategy, model)
    return make_merge(run.strategy, model, merge) if run.settings.averaging_steps else merge


def _checkpoints(run: Run, state: TrainingState) -> Checkpoints:
    return Checkpoints(
        run.dirs.checkpoints,
        Identity(run.settings.model, run.manifest.fingerprint, state.variables),
        keep=run.settings.keep_checkpoints,
        write=run.cluster.is_chief,
        allow_new_data=run.settings.allow_new_data,
    )


def _resume(run: Run, state: TrainingState, checkpoints: Checkpoints, together: Collectives) -> Position:
    """Restores the newest checkpoint and returns where it goes on; the beginning where there is none."""
    snapshot = checkpoints.restore()
    at = snapshot.position if snapshot else Position()
    processes, steps = together.total([1, at.steps])
    if steps != at.steps * processes:
        raise RunError(
            f"{run.cluster.name} has found another newest checkpoint in {run.dirs.checkpoints} (of step "
            f"{at.steps:,}) than the others; all replicas must see the same directory: use a shared one (gs://)"
        )
    if snapshot is None:
        return at
    state.restore(snapshot)
    if run.cluster.is_chief:
        within = f", {at.examples:,} examples into epoch {at.epoch + 1}" if at.examples else ""
        progress.say("train", f"resuming after step {at.steps:,}{within}, from {run.dirs.checkpoints}")
    return at


def _count_steps(run: Run, meter: Counters, position: Position) -> None:
    """Tells the meter where the run begins, and where it ends if nothing ends it early."""
    settings = run.settings
    epochs_left = settings.epochs - position.epoch - 1
    left = run.plan("train", position.examples).steps + epochs_left * run.plan("train").steps
    meter.first_step = meter.steps = position.steps
    meter.total_steps = position.steps + max(0, left)
    if settings.max_steps:
        meter.total_steps = min(meter.total_steps, settings.max_steps)


def _finish(run: Run, model: keras.Model, position: Position, logs: Logs) -> None:
    """Saves the model. A collective; the chief's copy is kept."""
    saving.save_model(model, run.dirs.model, scratch=run.scratch)
    if run.cluster.is_chief:
        if run.settings.evaluator:
            logs |= evaluator.wait_for_last(run, position)
        files.write_json(
            run.dirs.model / saving.METRICS_FILE, {"epochs": position.epoch, "steps": position.steps, **logs}
        )
        progress.fact("model", str(run.dirs.model / saving.MODEL_FILE))
        progress.fact("TensorBoard logs", str(run.dirs.logs))


@contextlib.contextmanager
def _scratch(cluster: Cluster) -> Iterator[Path | None]:
    """Gives a process other than the chief a directory of its own, removed at the end."""
    if cluster.is_chief:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix=f"shardline-{cluster.name}-") as directory:
        yield Path(directory)
