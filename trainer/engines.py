"""What trains and what evaluates under a strategy: all replicas in step, or each worker by itself."""

from __future__ import annotations

from collections.abc import Callable

import keras

from shardline.trainer.coordinator import CoordinatorEvaluation, CoordinatorLoop
from shardline.trainer.data.pipeline import Feed
from shardline.trainer.distribute.summation import make_summation
from shardline.trainer.loop import Engine, Evaluation, Logs, Loop
from shardline.trainer.resume.state import Position
from shardline.trainer.run import Run
from shardline.trainer.workers import Workers

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
