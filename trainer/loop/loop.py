"""Loop: the outer loop of a run, through which all replicas go in step.

An epoch is a plan of steps, trained in stretches of about a second, or of one step where a callback has a
hook of every step. Within a stretch the engine (`step.Loop`, or `parameter_server.CoordinatorLoop`) runs the
model's own `train_step` on each batch, with gradients summed over the replicas. After it every replica reads
the metrics, callbacks get `on_train_batch_end`, and all processes add up a few numbers (`Agreement`), so that
all take the same turn, whatever happens on one of them.

At the end of an epoch the replicas merge what each keeps for itself (BatchNormalization's statistics) and a
checkpoint is saved. Only then the validation split is evaluated and callbacks get `on_epoch_end`: a crash
there loses nothing, since a run that is resumed does both again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import keras

from shardline.trainer.base import progress
from shardline.trainer.base.errors import DivergedError, RestartError, RunError
from shardline.trainer.base.settings import TrainSettings
from shardline.trainer.checkpoint.identity import Identity, IdentityRecord
from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.checkpoint.state import Position, Snapshot, TrainingState
from shardline.trainer.checkpoint.store import Checkpoints
from shardline.trainer.cluster.collectives import replica_merger
from shardline.trainer.loop.callbacks import Hooks
from shardline.trainer.loop.optimizers import finalize, take_changed_rates
from shardline.trainer.loop.parameter_server import CoordinatorLoop
from shardline.trainer.loop.reports import Counters
from shardline.trainer.loop.run import RunPlan, TrainingRun
from shardline.trainer.loop.step import Logs, StepLoop, StepsResult
from shardline.trainer.models import saving

Engine = StepLoop | CoordinatorLoop

# Length of a stretch: looking up, which makes all replicas meet, then costs nothing; and it is short enough
# for a person, and for a machine that is about to be taken away.
_SECONDS = 1.0

# What the first steps cost, which trace and warm up, says little: growth is bounded.
_GROWTH = 8

_STOPPED = "a callback has stopped it"


@dataclass(frozen=True)
class ResumePoint:
    """What a run begins with, where no checkpoint says otherwise.

    Attributes:
        data: Fingerprint of what is trained on: part of the run's identity.
        record: What the run is.
        fixed: What cannot change when it goes on, beside that.
        position: Where it begins without a checkpoint.
    """

    data: str
    record: IdentityRecord
    fixed: Mapping[str, object]
    position: Position = field(default_factory=Position)


@dataclass(frozen=True)
class Agreement:
    """Agreement of all processes after a stretch: what one of them wants, and what the chief's clock says.

    By process, `diverged` is the step (from 1) since which its loss is not finite; 0 where it is.
    """

    stop: bool
    time_is_up: bool
    save: bool
    diverged: tuple[int, ...]


class Training:
    """Trains one model from a position, which it moves on, to the end of its run."""

    def __init__(
        self,
        run: TrainingRun,
        model: keras.Model,
        hooks: Hooks,
        beginning: ResumePoint,
        make_engine: Callable[[Position], Engine],
        *,
        counters: Counters,
        preemption: Preemption,
        verbose: int = 2,
    ):
        """Restores the newest checkpoint, if any, and makes the engine for its position. A collective."""
        settings = run.settings
        self._run = run
        self._model = model
        self._hooks = hooks
        self._counters = counters
        self._preemption = preemption
        self._watchdog = run.watchdog
        model.stop_training = False
        hooks.begin(model, epochs=settings.epochs, steps=run.steps_per_epoch, verbose=verbose)
        # After on_train_begin, which resets what callbacks remember.
        self.state = TrainingState(model, hooks.remembering, hooks.chief_remembering)
        fixed = {**beginning.record.fixed, **beginning.fixed}
        identity = Identity(settings.model, beginning.data, self.state.variables, fixed)
        self.checkpoints = Checkpoints.of(settings, run.checkpoints, identity, write=run.cluster.is_chief)
        resumed = self._restore(beginning)
        host: Mapping[str, Any] = resumed.host if resumed else {"stop_training": False}
        at = self.position = resumed.position if resumed else beginning.position
        self.engine = make_engine(at)
        left = len(run.epoch(at).step_sizes) + (settings.epochs - at.epoch - 1) * run.steps_per_epoch
        counters.first_step = counters.steps = at.steps
        counters.total_steps = min(at.steps + max(0, left), settings.max_steps or sys.maxsize)
        self.logs: Logs = dict(host.get("logs", {}))
        self._merge = replica_merger(run.strategy, model, weights=settings.averaging_steps > 0)
        compiled = model.steps_per_execution
        asked = settings.steps_per_execution or (
            compiled if isinstance(compiled, int) and compiled > 1 else 0
        )
        self._fixed = asked or int(hooks.by_step)
        self._test_fixed = (asked or 1) if hooks.by_test_step else 0
        self._stretch = self._fixed or 1
        self._began = at.examples > 0
        self._started = self._saved = time.monotonic()
        self._seconds_before = float(host.get("seconds", 0.0))
        self._ended = _STOPPED if host["stop_training"] else ""

    def _restore(self, beginning: ResumePoint) -> Snapshot | None:
        """Restores the newest checkpoint and returns it; None where there is none. A collective."""
        run, hooks = self._run, self._hooks
        run.watchdog.at("in the settings handshake before the first step")
        record, snapshot = beginning.record, self.checkpoints.restore()
        at = snapshot.position if snapshot else beginning.position
        processes, steps, *by_step = run.collectives.total([1, at.steps, hooks.by_step, hooks.by_test_step])
        # What is called after every step on one replica is so on all, which may have made other callbacks.
        hooks.by_step, hooks.by_test_step = (bool(number) for number in by_step)
        if steps != at.steps * processes:
            raise RunError(
                f"{run.cluster.name} has found another newest checkpoint in {run.checkpoints} (of step "
                f"{at.steps:,}) than the others; all replicas must see the same directory: use a shared one "
                "(gs://)"
            )
        self.state.record = asdict(record)
        if snapshot is None:
            return None
        before = IdentityRecord(**snapshot.host.get("run", self.state.record))
        now, said = record.continuing(before, at.steps + 1)
        if at.examples or not at.closed:
            # What callbacks do at the beginning of an epoch (to the learning rate) is part of what is there.
            hooks("on_epoch_begin", at.last_epoch)
        self.state.restore(snapshot, run.process)
        if run.settings.allow_new_data:  # to which layers have been adapted anew
            saving.refresh_adapted(self._model)
        take_changed_rates(self._model, before.learning_rates, now.learning_rates)
        self.state.record = asdict(now)
        if run.cluster.is_chief:
            within = f", {at.examples:,} examples into epoch {at.epoch + 1}" if at.examples else ""
            progress.report("train", f"resuming after step {at.steps:,}{within}, from {run.checkpoints}")
            seconds, stopped = snapshot.host.get("seconds", 0.0), snapshot.host["stop_training"]
            ended = _end_of_run(run.settings, at, seconds, stopped=stopped)
            vain = f": that trains nothing, as {ended}; raise that limit, or begin in another directory"
            if said:
                progress.report("train", f"warning: {said}{vain}" if ended else said)
        return snapshot

    def run(self) -> None:
        """Trains to the end of the run; then `logs` are the last metrics, val_* those of the final model."""
        self._preemption.ready()
        self._look_at_limits()
        # Of an epoch that goes on the end is still to come.
        if not self.position.closed and (self._ended or not self.position.examples):
            self._close_epoch(self.position.last_epoch)
        while not self._ended:
            self._epoch()
        if self._run.cluster.is_chief and self.position.epoch < self._run.settings.epochs:
            progress.report("train", f"training ends after {self.position.steps:,} steps: {self._ended}")
        self.checkpoints.wait()
        # In the order of `fit`: moving averages, then `on_train_end`, where the best weights may be put back.
        finalize(self._model)
        self._hooks("on_train_end", logs=self.logs)
        if self._run.judges_end:
            self.logs |= self._validate(hooks=False)

    def _validate(self, *, hooks: bool = True) -> Logs:
        """Returns the metrics of the validation split under their names val_*. A collective.

        A RestartError says that a process was asked to stop. Without `hooks` no callback hears of it.
        """
        evaluation, chief = self.engine.evaluation, self._run.cluster.is_chief
        if evaluation is None:
            return {}
        self._watchdog.at("before the validation")
        call = self._hooks if hooks else lambda *_, **__: None
        call("on_test_begin")
        evaluation.begin()
        done, count = 0, self._test_fixed or self._stretch
        while done < evaluation.steps:
            count = min(count, evaluation.steps - done)
            call("on_test_batch_begin", done)
            started = time.monotonic()
            evaluation.take(count)
            done += count
            self._watchdog.at(f"after step {done:,} of the validation")
            call("on_test_batch_end", done - 1, logs=evaluation.read() if self._test_fixed else {})
            if done == evaluation.steps:
                break
            seconds = time.monotonic() - started
            # The chief decides how many steps come next.
            wanted = self._test_fixed or _stretch(count, seconds)
            stop, agreed = self._run.collectives.total([self._preemption.requested, wanted * chief])
            self._stop_if(stop > 0)
            if chief and seconds > _SECONDS / 2:
                progress.advance("train", done, evaluation.steps, "steps of the validation")
            count = int(agreed)
        logs = evaluation.read()
        call("on_test_end", logs=logs)
        return {f"val_{name}": value for name, value in logs.items()}

    def _save(self) -> None:
        """Saves a checkpoint at this position. A collective."""
        self._watchdog.at(f"saving a checkpoint of step {self.position.steps:,}")
        self._merge()
        if self._run.checkpoints is None:
            return
        seconds = self._seconds_before + time.monotonic() - self._started
        snapshot = self.state.capture(self.position, logs=self.logs, seconds=seconds)
        if name := self.state.first_not_finite(snapshot):
            raise DivergedError(
                f"{name} is not finite after step {self.position.steps:,}, whose loss still was, and is not "
                f"saved; {self._way_out()}"
            )
        snapshot = self.state.gather_callbacks(snapshot, self._run.collectives)
        step = self.position.steps
        self.checkpoints.save(snapshot, lambda: setattr(self._preemption, "saved_step", step))
        self._saved = time.monotonic()

    def _look_at_limits(self) -> None:
        stopped = self._ended == _STOPPED
        found = _end_of_run(self._run.settings, self.position, self._seconds_before, stopped=stopped)
        self._ended = found or self._ended

    def _epoch(self) -> None:
        epoch = self.position.epoch
        plan = self._run.epoch(self.position)
        if not self._began:
            self.engine.reset_metrics()
            self._hooks("on_epoch_begin", epoch)
        self._began = False
        if self._steps(plan):
            self.position = Position(epoch + 1, 0, self.position.steps)
        self.position = replace(self.position, closed=False)
        self._save()
        self._close_epoch(epoch)

    def _close_epoch(self, epoch: int) -> None:
        """Validates an epoch, also one that a limit has cut short, and lets callbacks see its end."""
        if self._run.validates(epoch):
            self.logs |= self._validate()
        self.checkpoints.check_writer()
        self._hooks("on_epoch_end", epoch, logs=self.logs)
        self.position = replace(self.position, closed=True)
        agreed = self._agree(StepsResult(), 0)
        self._look_at_limits()
        if self._model.stop_training:
            self._ended = self._ended or _STOPPED
        if agreed.time_is_up:
            self._ended = self._ended or _time_is_up(self._run.settings)
        if not self._ended:
            self._stop_if(agreed.stop)

    def _steps(self, plan: RunPlan) -> bool:
        """Trains what is left of an epoch, or as much as a limit allows; returns whether that was all."""
        settings, counters, sizes, done = self._run.settings, self._counters, plan.step_sizes, 0
        while done < len(sizes) and not self._ended:
            at = self.position
            # Steps until the next one after which something has to happen.
            cuts = [settings.max_steps - at.steps] if settings.max_steps > at.steps else []
            if settings.checkpoint_steps:
                cuts.append(settings.checkpoint_steps - at.steps % settings.checkpoint_steps)
            count = min(self._stretch, len(sizes) - done, *cuts)
            now = sizes[done : done + count]
            self._hooks("on_train_batch_begin", plan.first_step + done)
            self._watchdog.at(f"in step {at.steps + 1:,}")
            started = time.monotonic()
            stretch = self.engine.train(now)
            self.logs = self.engine.read_metrics()
            seconds = time.monotonic() - started
            self.position = Position(at.epoch, at.examples + sum(now), at.steps + count)
            counters.steps += count
            counters.examples += sum(now)
            counters.seconds += seconds
            counters.waited += stretch.waited
            if not self._fixed:
                self._stretch = _stretch(max(count, self._stretch), seconds, of=count)
            done += count
            self._hooks("on_train_batch_end", plan.first_step + done - 1, logs=self.logs)
            agreed = self._agree(stretch, count)
            self._check_finite(agreed, plan, done)
            self._obey(agreed, last=done == len(sizes))
        return done == len(sizes)

    def _agree(self, stretch: StepsResult, count: int) -> Agreement:
        """Agrees with all processes; what a callback of one has stopped, stops on all. A collective."""
        self._watchdog.at(f"after step {self.position.steps:,}, to agree with the others")
        settings, chief, now = self._run.settings, self._run.cluster.is_chief, time.monotonic()
        # Clocks differ between machines, and so would the times at which a checkpoint is due.
        minutes = 0.0 if settings.deterministic else settings.checkpoint_minutes
        diverged = [0.0] * len(self._run.processes)
        if stretch.diverged is not None:
            diverged[self._run.process] = self.position.steps - count + stretch.diverged + 1
        seconds = self._seconds_before + now - self._started
        stop, stopped, time_is_up, save, steps, *bad = self._run.collectives.total(
            [
                self._preemption.requested,
                self._model.stop_training,
                chief and 0 < settings.max_time <= seconds,
                chief and 0 < minutes * 60 <= now - self._saved,
                self._stretch if chief else 0,
                *diverged,
            ]
        )
        self._stretch = int(steps)
        self._model.stop_training = stopped > 0
        return Agreement(stop > 0, time_is_up > 0, save > 0, tuple(int(step) for step in bad))

    def _check_finite(self, agreed: Agreement, plan: RunPlan, done: int) -> None:
        """Ends the run when the loss of a step was not finite, naming the shards of its batch."""
        found = [(step, process) for process, step in enumerate(agreed.diverged) if step]
        if not found:
            return
        step, process = min(found)
        source = self._run.step_source(plan, step - (self.position.steps - done + 1), process)
        where = f" on {self._run.processes[process]}" if len(self._run.processes) > 1 else ""
        raise DivergedError(
            f"the loss is not finite since step {step:,} (epoch {self.position.epoch + 1}){where}, whose "
            f"examples lie in {source}, or the update before it was too large; {self._way_out()}"
        )

    def _way_out(self) -> str:
        self.checkpoints.wait()
        steps = self.checkpoints.steps()
        kept = f"; the checkpoint of step {steps[-1]:,} is finite and is kept to go on from" if steps else ""
        return f"lower the learning rate, clip gradients, or look for broken examples{kept}"

    def _obey(self, agreed: Agreement, *, last: bool) -> None:
        settings = self._run.settings
        if agreed.stop:
            if last:
                self.position = Position(self.position.epoch + 1, 0, self.position.steps, closed=False)
            self._save()
            self._stop_if(True)
        if self._model.stop_training:
            self._ended = _STOPPED
        if agreed.time_is_up:
            self._ended = _time_is_up(settings)
        if settings.max_steps and self.position.steps >= settings.max_steps:
            self._ended = f"max_steps {settings.max_steps:,} reached"
        due = settings.checkpoint_steps and self.position.steps % settings.checkpoint_steps == 0
        # The end of an epoch saves one anyway.
        if (agreed.save or due) and not last and not self._ended:
            self._save()

    def _stop_if(self, asked: bool) -> None:
        """Ends a run that was asked to stop, and of which all is saved."""
        if asked:
            self.checkpoints.wait()
            saved = f"a checkpoint was saved at step {self.position.steps:,}; start the same command again"
            if self._run.checkpoints is None:
                saved = "nothing is saved, as there is no checkpoint_dir"
            raise RestartError(f"asked to stop (SIGTERM): {saved}")


def _stretch(steps: int, seconds: float, *, of: int = 0) -> int:
    """Returns the steps of about a second when `of` of them, or `steps`, took some; growth is bounded."""
    wanted = int((of or steps) * _SECONDS / max(seconds, 1e-6))
    return max(1, min(wanted, _GROWTH * steps))


def _end_of_run(settings: TrainSettings, at: Position, seconds: float, *, stopped: bool) -> str:
    """Returns why no step is left to train after so many seconds, or "" where one is."""
    if at.epoch >= settings.epochs:
        return f"the run has done its {settings.epochs} epochs"
    if settings.max_steps and at.steps >= settings.max_steps:
        return f"max_steps {settings.max_steps:,} reached"
    if 0 < settings.max_time <= seconds:
        return _time_is_up(settings)
    return _STOPPED if stopped else ""


def _time_is_up(settings: TrainSettings) -> str:
    return f"max_time {settings.max_time:g} s is over"
