"""Loop: the outer loop of a run, in which all replicas take the same steps.

The steps of an epoch are trained in chunks of about a second, or of one step if a callback has a hook for
every step. Within a chunk the engine (`step.StepLoop`, or `parameter_server.CoordinatorLoop`) runs the
model's own `train_step` on each batch, with gradients summed over the replicas. After it every replica reads
the metrics, callbacks get `on_train_batch_end`, and all processes sum a few numbers (`Agreement`), by which
all take the same decisions.

At the end of an epoch the replicas merge their own variables (BatchNormalization's statistics) and a
checkpoint is saved. Then the validation split is evaluated and callbacks get `on_epoch_end`: a crash there
loses nothing, as a resumed run does both again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shardline.trainer.base import progress
from shardline.trainer.base.errors import DivergedError, ModelError, RestartError, RunError, SettingsError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.checkpoint import (
    BEGINNING,
    Checkpoints,
    Identity,
    IdentityRecord,
    Position,
    Snapshot,
    TrainingState,
)
from shardline.trainer.distribute import make_summation, replica_merger
from shardline.trainer.keras_compat.datasets import stateful_ops
from shardline.trainer.keras_compat.keras_internals import all_layers, requested_jit_compile, supports_xla
from shardline.trainer.keras_compat.replicas import inexact_metrics, loss_couples_examples
from shardline.trainer.loop.build import apply_changed_rates, finalize, learning_rates
from shardline.trainer.loop.callbacks import Hooks
from shardline.trainer.loop.parameter_server import CoordinatorEvaluation, CoordinatorLoop, Workers
from shardline.trainer.loop.process import TrainingRun
from shardline.trainer.loop.step import EvaluationLoop, Logs, StepLoop, StepsResult
from shardline.trainer.models import refresh_adapted
from shardline.trainer.preemption import Preemption
from shardline.trainer.sharding import RunPlan

# Seconds of a chunk: long enough for the collective after it to cost nothing, and short enough for a progress
# line, and for a machine that is about to be preempted.
_SECONDS = 1.0

_STOPPED = "a callback has stopped it"


def make_engine(
    run: TrainingRun,
    model: keras.Model,
    at: Position,
    *,
    batch: Any = None,
) -> StepLoop | CoordinatorLoop:
    """Returns the engine that trains a built model from a position on, and evaluates it.

    On `batch`, if there is one, the losses are tried, to report where N replicas differ from one.
    """
    settings, strategy, training, validation = run.settings, run.strategy, run.data, run.validation
    xla = uses_xla(run, model)
    if (names := inexact_metrics(model)) and run.cluster.is_chief:
        progress.report(
            "train",
            f"warning: metrics {progress.shortened(names)} do not add up over parts of a batch, as sums and "
            "counts do, and are not those of one process; give them numbers for each example, after the "
            "model's call, and no parameter servers",
        )
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
        loop.traced = functools.partial(_report_random_ops, set())
    if validation:
        batches = validation.distribute(strategy, run.process, processes)
        loop.evaluation = EvaluationLoop(model, strategy, batches, validation.steps)
    return loop


def _report_random_ops(reported: set[str], graph: tf.Graph) -> None:
    drawing = [op for op in stateful_ops(graph.as_graph_def()) if not op.startswith("Assign")]
    if drawing and not reported:
        reported.update(drawing)
        progress.report(
            "train",
            f"warning: a step draws random numbers by {', '.join(drawing)} (tf.random, "
            "backend.random_normal), whose state is not in a checkpoint: a resumed run draws others, and its "
            "weights differ; use keras.random with a keras.random.SeedGenerator",
        )


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
    text = (
        "a loss is computed of a batch as a whole, and averaged over the replicas: if it is not a mean over "
        "examples (it, a regularizer or the model takes them together), N replicas do not train as one does"
    )
    say = functools.cache(lambda: progress.report("train", text))
    differs = None if batch is None else loss_couples_examples(model, batch)
    if differs:
        say()
    return say if differs is None else lambda: None


def own_statistics(model: keras.Model) -> list[str]:
    """Returns the names of layers that normalize each replica's part of a batch by its own statistics."""
    layers = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    return [layer.name for layer in layers if layer.trainable and not layer.synchronized]


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


@dataclass(frozen=True)
class Agreement:
    """Agreement of all processes after a chunk.

    Attributes:
        stop: Whether a process was asked to stop.
        time_is_up, save: Whether `max_time` is over, or a checkpoint is due, by the chief's clock.
        diverged: For each process the step (from 1) since which its loss is not finite; 0 if it is finite.
    """

    stop: bool
    time_is_up: bool
    save: bool
    diverged: tuple[int, ...]


class Training:
    """Training of one model from a position to the end of its run."""

    def __init__(
        self,
        run: TrainingRun,
        model: keras.Model,
        hooks: Hooks,
        *,
        data: str,
        fixed: Mapping[str, object],
        preemption: Preemption,
        beginning: Position = BEGINNING,
        batch: Any = None,
    ):
        """Restores the newest checkpoint, if any, and makes the engine for its position. A collective.

        `data` is the fingerprint of the training data, part of the run's identity; `fixed` are further facts
        that a resumed run cannot change. Without a checkpoint the run begins at the position `beginning`.
        """
        settings = run.settings
        self._run = run
        self._model = model
        self._hooks = hooks
        self.counters = counters = run.counters
        self._preemption = preemption
        self._watchdog = run.watchdog
        model.stop_training = False
        record = IdentityRecord.of(settings, run.replicas, learning_rates(model))
        hooks.begin(model)
        # After on_train_begin, which resets the state of callbacks.
        self.state = TrainingState(model, hooks.stateful, hooks.chief_stateful)
        identity = Identity(settings.model, data, self.state.variables, {**record.fixed, **fixed})
        self.checkpoints = Checkpoints(settings, run.checkpoints, identity, write=run.cluster.is_chief)
        try:
            resumed = self._restore(record, beginning)
        except BaseException:
            self.checkpoints.close()  # another attempt of this process may write there
            raise
        host: Mapping[str, Any] = (
            resumed.host if resumed else {"stop_training": False, "logs": {}, "seconds": 0.0}
        )
        at = self.position = resumed.position if resumed else beginning
        self.engine = make_engine(run, model, at, batch=batch)
        left = len(run.data.epoch(at).step_sizes) + (settings.epochs - at.epoch - 1) * run.data.steps
        counters.first_step = counters.steps = at.steps
        counters.total_steps = min(at.steps + max(0, left), settings.max_steps or sys.maxsize)
        self.logs: Logs = dict(host["logs"])
        self._merge, self._reported = replica_merger(run.strategy, model), False
        compiled = model.steps_per_execution
        compiled = compiled if isinstance(compiled, int) and compiled > 1 else 0
        requested = settings.steps_per_execution or compiled
        self._fixed = requested or int(hooks.by_step)
        self._test_fixed = (requested or 1) if hooks.by_test_step else 0
        self._chunk_size = self._fixed or 1
        self._began = at.examples > 0
        self._validated: tuple[tuple[int, ...], Logs] = (), {}
        self._started = self._saved = time.monotonic()
        self._seconds_before = float(host["seconds"])
        self._stop_reason = _STOPPED if host["stop_training"] else ""

    def _restore(self, record: IdentityRecord, beginning: Position) -> Snapshot | None:
        """Restores the newest checkpoint and returns it; None if there is none. A collective."""
        run, hooks = self._run, self._hooks
        run.watchdog.at("in the settings handshake before the first step")
        snapshot = self.checkpoints.restore()
        at = snapshot.position if snapshot else beginning
        processes, steps, *by_step = run.collectives.total([1, at.steps, hooks.by_step, hooks.by_test_step])
        # Replicas may have made other callbacks: a hook for every step on one makes chunks of a step on all.
        hooks.by_step, hooks.by_test_step = (bool(number) for number in by_step)
        if steps != at.steps * processes:
            raise RunError(
                f"{run.cluster.name} has found another newest checkpoint in {run.checkpoints} (of step "
                f"{at.steps:,}) than the others; all replicas must see the same directory: use a shared one "
                "(gs://)"
            )
        self.checkpoints.set_aside()
        self.state.record = asdict(record)
        if snapshot is None:
            return None
        before = IdentityRecord(**snapshot.host["run"])
        now, changes = record.continuing(before, at.steps + 1)
        if at.examples or not at.closed:
            # The checkpoint is from after this hook, which may have set the learning rate.
            hooks("on_epoch_begin", at.last_epoch)
        self.state.restore(snapshot)
        if run.settings.allow_new_data:  # to which layers have been adapted again
            refresh_adapted(self._model)
        apply_changed_rates(self._model, before.learning_rates, now.learning_rates)
        self.state.record = asdict(now)
        if run.cluster.is_chief:
            within = f", {at.examples:,} examples into epoch {at.epoch + 1}" if at.examples else ""
            progress.report("train", f"resuming after step {at.steps:,}{within}, from {run.checkpoints}")
            seconds, stopped = snapshot.host["seconds"], snapshot.host["stop_training"]
            time_is_up = 0 < run.settings.max_time <= seconds
            reason = _find_stop_reason(run.settings, at, time_is_up=time_is_up, stopped=stopped)
            no_steps = f": that trains nothing, as {reason}; raise that limit, or begin in another directory"
            if changes:
                progress.report("train", f"warning: {changes}{no_steps}" if reason else changes)
        return snapshot

    def train(self) -> None:
        """Trains to the end of the run; then `logs` are the last metrics, val_* those of the final model."""
        self._preemption.ready()
        self._check_limits(time_is_up=0 < self._run.settings.max_time <= self._seconds_before)
        # The end of an epoch that continues is still to come.
        if not self.position.closed and (self._stop_reason or not self.position.examples):
            self._close_epoch(self.position.last_epoch)
        while not self._stop_reason:
            epoch, plan = self.position.epoch, self._run.data.epoch(self.position)
            if not self._began:
                self.engine.reset_metrics()
                self._hooks("on_epoch_begin", epoch)
            self._began = False
            if self._steps(plan):
                self.position = Position(epoch + 1, 0, self.position.steps)
            self.position = replace(self.position, closed=False)
            self._save()
            self._close_epoch(epoch)
        if self._run.cluster.is_chief and self.position.epoch < self._run.settings.epochs:
            progress.report(
                "train", f"training ends after {self.position.steps:,} steps: {self._stop_reason}"
            )
        self.checkpoints.wait()
        # In the order of `fit`: moving averages, then `on_train_end`, which may restore the best weights.
        finalize(self._model)
        self._hooks("on_train_end", logs=self.logs)
        if self._run.evaluates_final_weights:
            digest, self.logs = self._validated[0], self.logs | self._validated[1]
            if any(self._run.collectives.total([digest != _digest(self._model)])):
                self.logs |= self._validate(hooks=False)

    def _validate(self, *, hooks: bool = True) -> Logs:
        """Evaluates the validation split, with callbacks if `hooks`; returns val_* metrics. A collective."""
        evaluation, chief = self.engine.evaluation, self._run.cluster.is_chief
        if evaluation is None:
            return {}
        self._watchdog.at("before the validation")
        call = self._hooks if hooks else lambda *_, **__: None
        call("on_test_begin")
        evaluation.begin()
        done, count = 0, self._test_fixed or self._chunk_size
        while done < evaluation.steps:
            count = min(count, evaluation.steps - done)
            call("on_test_batch_begin", done)
            started = time.monotonic()
            evaluation.take_steps(count)
            done += count
            self._watchdog.at(f"after step {done:,} of the validation")
            call("on_test_batch_end", done - 1, logs=evaluation.read_metrics() if self._test_fixed else {})
            if done == evaluation.steps:
                break
            seconds = time.monotonic() - started
            # The chief decides the number of next steps.
            wanted = self._test_fixed or _next_chunk_size(count, seconds)
            stop, agreed = self._run.collectives.total([self._preemption.requested, wanted * chief])
            self._stop_if(stop > 0)
            if chief and seconds > _SECONDS / 2:
                progress.advance("train", done, evaluation.steps, "steps of the validation")
            count = int(agreed)
        logs = evaluation.read_metrics()
        call("on_test_end", logs=logs)
        return {f"val_{name}": value for name, value in logs.items()}

    def _save(self) -> None:
        """Saves a checkpoint at this position. A collective."""
        self._watchdog.at(f"saving a checkpoint of step {self.position.steps:,}")
        self._merge_replicas()
        if self._run.checkpoints is None:
            return
        self.checkpoints.wait()  # one snapshot is in memory at a time
        seconds, chief = self._seconds_before + time.monotonic() - self._started, self._run.cluster.is_chief
        known = set(self.state.callbacks.lost)
        snapshot = self.state.capture(self.position, logs=self.logs, seconds=seconds, whole=chief)
        for name in sorted(self.state.callbacks.lost - known) if chief else ():
            progress.report(
                "train",
                f"warning: {name} changes in training and cannot be kept in a checkpoint: a restart begins "
                "it anew; give the callback get_state() and set_state()",
            )
        if name := self.state.first_not_finite(snapshot):
            raise DivergedError(
                f"{name} is not finite after step {self.position.steps:,}, whose loss still was, and is not "
                f"saved; {self._divergence_advice()}"
            )
        self.state.check_replicas(snapshot, self._run.collectives)
        step = self.position.steps
        self.checkpoints.save(snapshot, lambda: setattr(self._preemption, "saved_step", step))
        self._saved = time.monotonic()

    def _merge_replicas(self) -> None:
        """Merges variables that each replica has for itself, and reports, once, those of a program's own."""
        names = self._merge()
        if names and not self._reported and self._run.cluster.is_chief:
            self._reported = True
            progress.report(
                "train",
                f"warning: weights that layers assign ({progress.shortened(names)}) differ between replicas, "
                "each of which has a part of a batch: floats are averaged, other numbers are the first's, "
                f"so {self._run.replicas} replicas do not train as one does; in the layer, sum over the "
                "replicas by tf.distribute.get_replica_context().all_reduce",
            )

    def _check_limits(self, *, time_is_up: bool, stopped: bool = False) -> None:
        reason = _find_stop_reason(self._run.settings, self.position, time_is_up=time_is_up, stopped=stopped)
        self._stop_reason = reason or self._stop_reason

    def _close_epoch(self, epoch: int) -> None:
        """Validates an epoch, also one that a limit has cut short, and calls `on_epoch_end`."""
        if self._run.validates(epoch):
            logs = self._validate()
            self.logs |= logs
            # Known to be the last: its weights may be the final ones, which are then not evaluated again.
            if self._stop_reason or self.position.epoch >= self._run.settings.epochs:
                self._validated = _digest(self._model), logs
        self._hooks("on_epoch_end", epoch, logs=self.logs)
        self.position = replace(self.position, closed=True)
        agreed = self._agree(StepsResult(), 0)
        self._check_limits(time_is_up=agreed.time_is_up, stopped=self._model.stop_training)
        if not self._stop_reason:
            self._stop_if(agreed.stop)

    def _steps(self, plan: RunPlan) -> bool:
        """Trains the rest of an epoch, or up to a limit; returns whether it is complete."""
        settings, counters, sizes, done = self._run.settings, self.counters, plan.step_sizes, 0
        while done < len(sizes) and not self._stop_reason:
            at = self.position
            # Steps until the next limit or checkpoint.
            cuts = [settings.max_steps - at.steps] if settings.max_steps > at.steps else []
            if settings.checkpoint_steps:
                cuts.append(settings.checkpoint_steps - at.steps % settings.checkpoint_steps)
            count = min(self._chunk_size, len(sizes) - done, *cuts)
            now = sizes[done : done + count]
            self._hooks("on_train_batch_begin", plan.first_step + done)
            self._watchdog.at(f"in step {at.steps + 1:,}")
            started = time.monotonic()
            result = self.engine.train(now)
            self.logs = self.engine.read_metrics()
            seconds = time.monotonic() - started
            self.position = Position(at.epoch, at.examples + sum(now), at.steps + count)
            counters.steps += count
            counters.examples += sum(now)
            counters.seconds += seconds
            counters.waited += result.waited
            if not self._fixed:
                self._chunk_size = _next_chunk_size(max(count, self._chunk_size), seconds, of=count)
            done += count
            self._hooks("on_train_batch_end", plan.first_step + done - 1, logs=self.logs)
            agreed = self._agree(result, count)
            self._check_finite(agreed, plan, done)
            self._apply(agreed, last=done == len(sizes))
        return done == len(sizes)

    def _agree(self, result: StepsResult, count: int) -> Agreement:
        """Agrees with all processes: if a callback of one stops the training, all stop. A collective."""
        self._watchdog.at(f"after step {self.position.steps:,}, to agree with the others")
        settings, chief, now = self._run.settings, self._run.cluster.is_chief, time.monotonic()
        # Clocks differ between machines, and so would the steps at which a checkpoint is due.
        minutes = 0.0 if settings.deterministic else settings.checkpoint_minutes
        diverged = [0.0] * len(self._run.processes)
        if result.diverged is not None:
            diverged[self._run.process] = self.position.steps - count + result.diverged + 1
        seconds = self._seconds_before + now - self._started
        stop, stopped, time_is_up, save, steps, *bad = self._run.collectives.total(
            [
                self._preemption.requested,
                self._model.stop_training,
                chief and 0 < settings.max_time <= seconds,
                chief and 0 < minutes * 60 <= now - self._saved,
                self._chunk_size if chief else 0,
                *diverged,
            ]
        )
        self._chunk_size = int(steps)
        self._model.stop_training = stopped > 0
        return Agreement(stop > 0, time_is_up > 0, save > 0, tuple(int(step) for step in bad))

    def _check_finite(self, agreed: Agreement, plan: RunPlan, done: int) -> None:
        """Ends the run when the loss of a step was not finite, naming the shards of its batch."""
        diverged = [(step, process) for process, step in enumerate(agreed.diverged) if step]
        if not diverged:
            return
        step, process = min(diverged)
        processes = self._run.processes
        source = self._run.data.source(plan, step - (self.position.steps - done + 1), process, len(processes))
        where = f" on {processes[process]}" if len(processes) > 1 else ""
        raise DivergedError(
            f"the loss is not finite since step {step:,} (epoch {self.position.epoch + 1}){where}, whose "
            f"examples are in {source}, or the update before it was too large; {self._divergence_advice()}"
        )

    def _divergence_advice(self) -> str:
        self.checkpoints.wait()
        steps = self.checkpoints.steps()
        kept = f"; the checkpoint of step {steps[-1]:,} is finite and is kept to resume from" if steps else ""
        return f"lower the learning rate, clip gradients, or look for broken examples{kept}"

    def _apply(self, agreed: Agreement, *, last: bool) -> None:
        settings = self._run.settings
        if agreed.stop:
            if last:
                self.position = Position(self.position.epoch + 1, 0, self.position.steps, closed=False)
            self._save()
            self._stop_if(True)
        self._check_limits(time_is_up=agreed.time_is_up, stopped=self._model.stop_training)
        due = settings.checkpoint_steps and self.position.steps % settings.checkpoint_steps == 0
        # The end of an epoch saves one anyway.
        if (agreed.save or due) and not last and not self._stop_reason:
            self._save()

    def _stop_if(self, requested: bool) -> None:
        if requested:
            self.checkpoints.wait()
            # None ends while another still receives the agreement; one that has ended since is no error.
            with contextlib.suppress(tf.errors.OpError):
                self._run.collectives.barrier()
            saved = f"a checkpoint was saved at step {self.position.steps:,}; start the same command again"
            if self._run.checkpoints is None:
                saved = "nothing is saved, as there is no checkpoint_dir"
            raise RestartError(f"asked to stop (SIGTERM): {saved}")


def _digest(model: keras.Model) -> tuple[int, ...]:
    arrays = (np.atleast_1d(keras.ops.convert_to_numpy(weight)) for weight in model.weights)
    return tuple(zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data) for array in arrays)


def _next_chunk_size(steps: int, seconds: float, *, of: int = 0) -> int:
    """Returns the number of steps that take about a second, if `of` (default `steps`) took `seconds`."""
    wanted = int((of or steps) * _SECONDS / max(seconds, 1e-6))
    return max(1, min(wanted, 8 * steps))  # bounded, because the first steps trace and warm up


def _find_stop_reason(settings: TrainSettings, at: Position, *, time_is_up: bool, stopped: bool) -> str:
    """Returns why a run ends at a position; "" if it does not."""
    if at.epoch >= settings.epochs:
        return f"the run has done its {settings.epochs} epochs"
    if settings.max_steps and at.steps >= settings.max_steps:
        return f"max_steps {settings.max_steps:,} reached"
    if time_is_up:
        return f"max_time {settings.max_time:g} s is over"
    return _STOPPED if stopped else ""
