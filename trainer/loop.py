"""Loop: the outer loop of a run, through which all replicas go in step.

How a run proceeds. An epoch is a plan of steps, trained in stretches of about a second. Within a
stretch the engine (`step.Loop`, or `parameter_server.CoordinatorLoop`) runs the model's own `train_step` on
each batch; inside that step the optimizer's gradients are summed over the replicas (`cluster.exchange`),
before they are clipped and applied. After a stretch every replica reads the metrics; then all processes add
up a few numbers (`Agreement`): whether one was asked to stop (SIGTERM) or has diverged, and whether the
chief's clock says that a checkpoint is due or the time is up. So all take the same turn: Keras callbacks
(`on_train_batch_end`) see the metrics, and a checkpoint is saved where one is due. At the end of an epoch the
replicas merge what each keeps for itself (BatchNormalization's statistics), the validation split is
evaluated, callbacks get `on_epoch_end`, and only then the epoch's checkpoint is saved, which therefore holds
what the callbacks remember. An epoch that a limit cuts short is saved before its validation, which uses the
same metrics.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import keras

from shardline.trainer import progress
from shardline.trainer.callbacks import Counters
from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.checkpoint.state import Position, TrainingState
from shardline.trainer.checkpoint.store import Checkpoints
from shardline.trainer.cluster.exchange import replica_merger
from shardline.trainer.data.sharding import EpochPlan
from shardline.trainer.errors import DivergedError, RestartError
from shardline.trainer.parameter_server import CoordinatorLoop
from shardline.trainer.run import Run
from shardline.trainer.step import Logs, Loop, Stretch

Engine = Loop | CoordinatorLoop

# Length of a stretch: looking up, which makes all replicas meet, then costs nothing; and it is short enough
# for a person, and for a machine that is about to be taken away.
_SECONDS = 1.0

# What the first steps cost, which trace and warm up, says little: growth is bounded.
_GROWTH = 8


@dataclass(frozen=True)
class Agreement:
    """Agreement of all processes after a stretch: one was asked to stop, and what the chief's clock says.

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
        run: Run,
        model: keras.Model,
        engine: Engine,
        *,
        position: Position,
        state: TrainingState,
        checkpoints: Checkpoints,
        callbacks: keras.callbacks.CallbackList,
        preemption: Preemption,
        counters: Counters,
    ):
        self.position = position
        self._run = run
        self._model = model
        self._engine = engine
        self._state = state
        self._checkpoints = checkpoints
        self._callbacks = callbacks
        self._preemption = preemption
        self._counters = counters
        self._merge = replica_merger(run.strategy, model, weights=run.settings.averaging_steps > 0)
        self._stretch = run.settings.steps_per_execution or 1
        self._started = self._saved = time.monotonic()
        self._ended = ""

    def run(self) -> Logs:
        """Trains until the epochs, a limit or a callback ends the run; returns the last metrics."""
        logs: Logs = {}
        self._look_at_limits()
        while not self._ended:
            logs = self._epoch()
            self._look_at_limits()
        if self._run.cluster.is_chief and self._ended != "epochs":
            progress.say("train", f"training ends after {self.position.steps:,} steps: {self._ended}")
        return logs

    def validate(self) -> Logs:
        """Returns the metrics of the validation split under their names val_*. A collective."""
        return {f"val_{name}": value for name, value in self._engine.evaluate().items()}

    def _save(self) -> None:
        """Saves a checkpoint at this position. A collective."""
        self._merge()
        self._checkpoints.save(self._state.capture(self.position))
        self._saved = time.monotonic()

    def _look_at_limits(self) -> None:
        settings = self._run.settings
        if self.position.epoch >= settings.epochs:
            self._ended = "epochs"
        elif settings.max_steps and self.position.steps >= settings.max_steps:
            self._ended = f"max_steps {settings.max_steps:,} reached"
        elif self._model.stop_training:
            self._ended = "a callback has stopped it"

    def _epoch(self) -> Logs:
        epoch = self.position.epoch
        plan = self._run.plan("train", start=self.position.examples)
        self._callbacks.on_epoch_begin(epoch)
        if self.position.examples == 0:
            self._engine.reset_metrics()
        logs, whole = self._steps(plan)
        if whole:
            self.position = Position(epoch + 1, 0, self.position.steps)
        else:
            self._save()  # before the validation, which uses the same metrics
        self._merge()
        logs |= self.validate()
        self._callbacks.on_epoch_end(epoch, logs)
        if whole:
            self._save()
        return logs

    def _steps(self, plan: EpochPlan) -> tuple[Logs, bool]:
        """Trains what is left of an epoch, or as much as a limit allows; returns whether that was all."""
        sizes, done = plan.step_sizes, 0
        # Of an epoch that was interrupted, perhaps after its last step.
        logs = self._engine.read_metrics() if plan.start else {}
        while done < len(sizes) and not self._ended:
            count = min(self._stretch, len(sizes) - done, self._steps_to_cut())
            now = sizes[done : done + count]
            self._callbacks.on_train_batch_begin(done)
            started = time.monotonic()
            stretch = self._engine.train(now)
            logs = self._engine.read_metrics()
            self._advance(now, time.monotonic() - started, stretch)
            agreed = self._agree(stretch, count)
            self._check_finite(agreed, plan)
            done += count
            self._callbacks.on_train_batch_end(done - 1, logs)
            self._obey(agreed, last=done == len(sizes))
        return logs, done == len(sizes)

    def _steps_to_cut(self) -> int:
        """Returns the steps until the next one after which something has to happen."""
        settings, steps = self._run.settings, self.position.steps
        cuts = [settings.max_steps] if settings.max_steps else []
        if settings.checkpoint_steps:
            cuts.append((steps // settings.checkpoint_steps + 1) * settings.checkpoint_steps)
        if settings.profiled_steps:
            first, last = settings.profiled_steps
            cuts += [first - 1, last]
        return min((cut - steps for cut in cuts if cut > steps), default=self._stretch)

    def _advance(self, sizes: Sequence[int], seconds: float, stretch: Stretch) -> None:
        position, examples = self.position, sum(sizes)
        self.position = Position(position.epoch, position.examples + examples, position.steps + len(sizes))
        counters = self._counters
        counters.steps += len(sizes)
        counters.examples += examples
        counters.seconds += seconds
        counters.waited += stretch.waited
        if not self._run.settings.steps_per_execution:
            wanted = int(len(sizes) * _SECONDS / max(seconds, 1e-6))
            self._stretch = max(1, min(wanted, _GROWTH * max(len(sizes), self._stretch)))

    def _agree(self, stretch: Stretch, count: int) -> Agreement:
        settings, cluster, now = self._run.settings, self._run.cluster, time.monotonic()
        chief = cluster.is_chief
        # Clocks differ between machines, and so would the times at which a checkpoint is due.
        minutes = 0.0 if settings.deterministic else settings.checkpoint_minutes
        diverged = [0.0] * cluster.num_workers
        if stretch.diverged is not None:
            diverged[self._run.process] = self.position.steps - count + stretch.diverged + 1
        stop, time_is_up, save, steps, *bad = self._run.collectives.total(
            [
                self._preemption.requested,
                chief and 0 < settings.max_time <= now - self._started,
                chief and 0 < minutes * 60 <= now - self._saved,
                self._stretch if chief else 0,
                *diverged,
            ]
        )
        self._stretch = int(steps)
        return Agreement(stop > 0, time_is_up > 0, save > 0, tuple(int(step) for step in bad))

    def _check_finite(self, agreed: Agreement, plan: EpochPlan) -> None:
        """Ends the run when the loss of a step was not finite, naming the shards of its batch."""
        found = [(step, process) for process, step in enumerate(agreed.diverged) if step]
        if not found:
            return
        step, process = min(found)
        ends, done = [], plan.start
        for size in plan.step_sizes:
            done += size
            ends.append(done)
        before = self.position.steps - ends.index(self.position.examples)  # number of the plan's first step
        shards = self._run.step_shards(plan, step - before, process)
        where = f" on {self._run.processes[process]}" if self._run.cluster.num_workers > 1 else ""
        raise DivergedError(
            f"the loss is not finite since step {step:,} (epoch {self.position.epoch + 1}){where}, whose "
            f"examples lie in {shards}; lower the learning rate, clip gradients, or look for broken examples"
        )

    def _obey(self, agreed: Agreement, *, last: bool) -> None:
        settings = self._run.settings
        if agreed.stop:
            self._save()
            self._checkpoints.wait()
            raise RestartError(
                f"asked to stop (SIGTERM): a checkpoint was saved at step {self.position.steps:,}; "
                "start the same command again to go on"
            )
        if agreed.time_is_up:
            self._ended = f"max_time {settings.max_time:g} s is over"
        if settings.max_steps and self.position.steps >= settings.max_steps:
            self._ended = f"max_steps {settings.max_steps:,} reached"
        due = settings.checkpoint_steps and self.position.steps % settings.checkpoint_steps == 0
        # The end of an epoch saves one anyway.
        if (agreed.save or due) and not last and not self._ended:
            self._save()
