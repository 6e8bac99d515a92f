"""Engine of a run, chosen by its strategy: synchronous steps of all replicas, or a parameter server."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer.adapters.adapter import Batches
from shardline.trainer.base import progress
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.checkpoint.state import Position
from shardline.trainer.cluster.collectives import make_summation
from shardline.trainer.keras_compat.datasets import stateful_ops
from shardline.trainer.keras_compat.keras_internals import all_layers, requested_jit_compile, supports_xla
from shardline.trainer.keras_compat.replica_losses import loss_couples_examples
from shardline.trainer.keras_compat.replica_metrics import inexact_metrics
from shardline.trainer.loop.loop import Engine
from shardline.trainer.loop.parameter_server import CoordinatorEvaluation, CoordinatorLoop, Workers
from shardline.trainer.loop.run import TrainingRun
from shardline.trainer.loop.step import EvaluationLoop, StepLoop


def make_engine(
    run: TrainingRun,
    model: keras.Model,
    validation: Batches | None,
    at: Position,
    *,
    batch: Any = None,
) -> Engine:
    """Returns the engine that trains a built model from a position on, and evaluates it on `validation`.

    On `batch`, if there is one, the losses are tried, to report where N replicas differ from one.
    """
    settings, strategy, training = run.settings, run.strategy, run.data
    xla = uses_xla(run, model)
    if (names := inexact_metrics(model)) and run.cluster.is_chief:
        progress.report("train", f"warning: metrics {progress.shortened(names)} {_INEXACT_METRICS}")
    if run.strategy_name == "parameter_server":
        workers = Workers(strategy, run.cluster, settings.startup_timeout)
        served = CoordinatorLoop(model, workers, training.raw_batches(at), training.decode)
        if validation:
            served.evaluation = CoordinatorEvaluation(
                model, workers, validation.raw_batches(), validation.decode, validation.steps
            )
        return served
    processes = len(run.processes)
    sized = training.has_sizes and run.replicas > 1
    loop = StepLoop(
        model,
        strategy,
        training.distribute(strategy, run.process, processes, at, sized=sized),
        make_summation(settings, strategy, run.cluster),
        sized=sized,
        jit_compile=xla,
        deterministic=settings.deterministic,
        single_loss=_report_differences(run, model, batch),
    )
    if run.checkpoints is not None and run.cluster.is_chief:
        reported: list[str] = []

        def report_random_ops(graph: tf.Graph) -> None:
            drawing = [op for op in stateful_ops(graph.as_graph_def()) if not op.startswith("Assign")]
            if drawing and not reported:
                reported.append(f"warning: a step draws random numbers by {', '.join(drawing)} {_RANDOM_OPS}")
                progress.report("train", reported[0])

        loop.traced = report_random_ops
    if validation:
        batches = validation.distribute(strategy, run.process, processes)
        loop.evaluation = EvaluationLoop(model, strategy, batches, validation.steps)
    return loop


def _report_differences(run: TrainingRun, model: keras.Model, batch: Any) -> Callable[[], None]:
    """Reports how several replicas train differently from one; returns what reports a loss in the step."""
    if run.replicas == 1 or not run.cluster.is_chief:
        return lambda: None
    if names := own_statistics(model):
        progress.report(
            "train",
            f"BatchNormalization ({progress.shortened(names)}) takes the statistics of each replica's part "
            f"of a batch, so {run.replicas} replicas do not train as one does; synchronized=True takes those "
            "of the batch",
        )
    say = functools.cache(lambda: progress.report("train", _SINGLE_LOSS))
    differs = None if batch is None else loss_couples_examples(model, batch)
    if differs:
        say()
    return say if differs is None else lambda: None


_SINGLE_LOSS = (
    "a loss is computed of a batch as a whole, and averaged over the replicas: if it is not a mean over "
    "examples (it, a regularizer or the model takes them together), N replicas do not train as one does"
)

_INEXACT_METRICS = (
    "do not add up over parts of a batch, as sums and counts do, and are not those of one process; give "
    "them numbers for each example, after the model's call, and no parameter servers"
)


def own_statistics(model: keras.Model) -> list[str]:
    """Returns the names of layers that normalize each replica's part of a batch by its own statistics."""
    layers = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    return [layer.name for layer in layers if layer.trainable and not layer.synchronized]


_RANDOM_OPS = (
    "(tf.random, backend.random_normal), whose state is not in a checkpoint: a resumed run draws others, "
    "and its weights differ; use keras.random with a keras.random.SeedGenerator"
)


def uses_xla(run: TrainingRun, model: keras.Model) -> bool:
    """Whether XLA compiles the step: by the setting, else by the argument of `compile`, else on one GPU.

    On a CPU convolutions take three times as long with it (benchmarks/RESULTS.md).
    """
    chosen, asked = run.settings.jit_compile, requested_jit_compile(model)
    wanted = "run_eagerly" if model.run_eagerly else "jit_compile" if asked is True else ""
    if wanted and run.strategy_name != "one_device":
        raise ModelError(
            f"compile({wanted}=True) needs strategy one_device, on one replica, and this run has "
            f"{run.strategy_name}; leave it out"
        )
    if model.run_eagerly and chosen == "on":
        raise SettingsError(
            "jit_compile on and compile(run_eagerly=True) exclude each other; give one of them"
        )
    if chosen != "auto" or model.run_eagerly:
        return chosen == "on"
    if asked != "auto":
        return bool(asked)
    gpus = tf.config.list_logical_devices("GPU")
    return run.strategy_name == "one_device" and bool(gpus) and supports_xla(model)
