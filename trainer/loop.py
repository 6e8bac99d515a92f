"""Loop: the outer loop of a run, through which all replicas go in step.

How a run proceeds. An epoch is a plan of steps, trained in stretches of about a second, or of one step where
a callback has a hook of every step. Within a stretch the engine (`step.Loop`, or
`parameter_server.CoordinatorLoop`) runs the model's own `train_step` on each batch; inside that step the
optimizer's gradients are summed over the replicas (`cluster.collectives`), before they are clipped and used.
After a stretch every replica reads the metrics, callbacks get `on_train_batch_end`, and all processes add up
a few numbers (`Agreement`): whether one was asked to stop (SIGTERM), has diverged, or has a callback that
stops the training, and whether the chief's clock says that a checkpoint is due or the time is up. So all take
the same turn, whatever happens on one of them.

At the end of an epoch the replicas merge what each keeps for itself (BatchNormalization's statistics) and a
checkpoint is saved. Only then the validation split is evaluated and callbacks get `on_epoch_end`: a crash
there loses nothing, since a run that is resumed does both again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import keras

from shardline.trainer import progress
from shardline.trainer.callbacks import Hooks
from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.checkpoint.state import Position, TrainingState
from shardline.trainer.cluster.collectives import replica_merger
from shardline.trainer.errors import DivergedError, RestartError
from shardline.trainer.optimizers import finalize
from shardline.trainer.parameter_server import CoordinatorLoop
from shardline.trainer.reports import Counters
from shardline.trainer.resume import STOPPED, Beginning, end_of_run, restore, time_is_up
from shardline.trainer.run import Plan, Run
from shardline.trainer.step import Logs, Loop, Stretch

Engine = Loop | CoordinatorLoop

# Length of a stretch: looking up, which makes all replicas meet, then costs nothing; and it is short enough
# for a person, and for a machine that is about to be taken away.
_SECONDS = 1.0

# What the first steps cost, which trace and warm up, says little: growth is bounded.
_GROWTH = 8


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
        run: Run,
        model: keras.Model,
        hooks: Hooks,
        beginning: Beginning,
        make_engine: Callable[[Position], Engine],
        *,
        counters: Counters,
        preemption: Preemption,
        verbose: int = 2,
    ):
        """Restores the newest checkpoint, if any, and makes the engine for its position. A collective.

        Callbacks see `on_train_begin`, and within an epoch `on_epoch_begin`.
        """
        self._run = run
        self._model = model
        self._hooks = hooks
        self._counters = counters
        self._preemption = preemption
        self._watchdog = run.watchdog
        model.stop_training = False
        hooks.begin(model, epochs=run.settings.epochs, steps=run.steps_per_epoch, verbose=verbose)
        # After on_train_begin, which resets what callbacks remember.
        self.state = TrainingState(model, hooks.remembering, hooks.chief_remembering)
        self.checkpoints = beginning.checkpoints(run, self.state)
        resumed = restore(run, model, hooks, self.state, self.checkpoints, beginning)
        self.position = resumed.position if resumed else beginning.position
        self.engine = make_engine(self.position)
        self._count_steps()
        self.logs: Logs = dict(resumed.host.get("logs", {})) if resumed else {}
        self._merge = replica_merger(run.strategy, model, weights=run.settings.averaging_steps > 0)
        asked = run.settings.steps_per_execution or _compiled_steps(model)
        self._fixed = asked or int(hooks.by_step)
        self._test_fixed = (asked or 1) if hooks.by_test_step else 0
        self._stretch = self._fixed or 1
        self._began = self.position.examples > 0
        self._started = self._saved = time.monotonic()
        self._seconds_before = float(resumed.host.get("seconds", 0.0)) if resumed else 0.0
        self._ended = STOPPED if resumed and resumed.host["stop_training"] else ""

    def _count_steps(self) -> None:
        """Tells the counters where the run begins, and where it ends if nothing ends it early."""
        settings, at, counters = self._run.settings, self.position, self._counters
        left = (
            len(self._run.epoch(at).step_sizes) + (settings.epochs - at.epoch - 1) * self._run.steps_per_epoch
        )
        counters.first_step = counters.steps = at.steps
        counters.total_steps = at.steps + max(0, left)
        if settings.max_steps:
            counters.total_steps = min(counters.total_steps, settings.max_steps)

    def run(self) -> None:
        """Trains to the end of the run; then `logs` are the last metrics, val_* those of the final model.

        What `fit` does at its end comes in its order: moving averages are put in, then callbacks get
        `on_train_end`, where early stopping puts the best weights back.
        """
        self._preemption.ready()
        self._train()
        self.checkpoints.wait()
        finalize(self._model)
        self._hooks("on_train_end", logs=self.logs)
        if self._run.judges_end:
            self.logs |= self._validate(hooks=False)

    def _train(self) -> None:
        """Trains until the epochs, a limit or a callback ends the run."""
        self._look_at_limits()
        # Of an epoch that goes on the end is still to come.
        if not self.position.closed and (self._ended or not self.position.examples):
            self._close_epoch(self.position.last_epoch)
        while not self._ended:
            self._epoch()
        if self._run.cluster.is_chief and self.position.epoch < self._run.settings.epochs:
            progress.say("train", f"training ends after {self.position.steps:,} steps: {self._ended}")

    def _validate(self, *, hooks: bool = True) -> Logs:
        """Returns the metrics of the validation split under their names val_*. A collective.

        A RestartError says that a process was asked to stop. Without `hooks` no callback hears of it.
        """
        evaluation = self.engine.evaluation
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
            if done < evaluation.steps:
                count = self._next_count(count, time.monotonic() - started, done, evaluation.steps)
        logs = evaluation.read()
        call("on_test_end", logs=logs)
        return {f"val_{name}": value for name, value in logs.items()}

    def _next_count(self, count: int, seconds: float, done: int, steps: int) -> int:
        """Returns how many steps of the validation come next, after a look up; the chief decides."""
        wanted = self._test_fixed or _stretch(count, seconds)
        chief = self._run.cluster.is_chief
        stop, agreed = self._run.collectives.total([self._preemption.requested, wanted * chief])
        self._stop_if(stop > 0)
        if chief and seconds > _SECONDS / 2:
            progress.advance("train", done, steps, "steps of the validation")
        return int(agreed)

    def _save(self) -> None:
        """Saves a checkpoint at this position. A collective."""
        self._watchdog.at(f"saving a checkpoint of step {self.position.steps:,}")
        self._merge()
        if self._run.checkpoints is None:
            return
        seconds = self._seconds_before + time.monotonic() - self._started
        snapshot = self.state.capture(self.position, logs=self.logs, seconds=seconds)
        if name := self.state.not_finite(snapshot):
            raise DivergedError(
                f"{name} is not finite after step {self.position.steps:,}, whose loss still was, and is not "
                f"saved; {self._way_out()}"
            )
        snapshot = self.state.share(snapshot, self._run.collectives)
        step = self.position.steps
        self.checkpoints.save(snapshot, lambda: setattr(self._preemption, "saved_step", step))
        self._saved = time.monotonic()

    def _look_at_limits(self) -> None:
        stopped = self._ended == STOPPED
        found = end_of_run(self._run.settings, self.position, self._seconds_before, stopped=stopped)
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
        agreed = self._agree(Stretch(), 0)
        self._look_at_limits()
        if self._model.stop_training:
            self._ended = self._ended or STOPPED
        if agreed.time_is_up:
            self._ended = self._ended or time_is_up(self._run.settings)
        if not self._ended:
            self._stop_if(agreed.stop)

    def _steps(self, plan: Plan) -> bool:
        """Trains what is left of an epoch, or as much as a limit allows; returns whether that was all."""
        sizes, done = plan.step_sizes, 0
        first = plan.first
        while done < len(sizes) and not self._ended:
            count = min(self._stretch, len(sizes) - done, self._steps_to_cut())
            now = sizes[done : done + count]
            self._hooks("on_train_batch_begin", first + done)
            self._watchdog.at(f"in step {self.position.steps + 1:,}")
            started = time.monotonic()
            stretch = self.engine.train(now)
            self.logs = self.engine.read_metrics()
            self._advance(now, time.monotonic() - started, stretch)
            done += count
            self._hooks("on_train_batch_end", first + done - 1, logs=self.logs)
            agreed = self._agree(stretch, count)
            self._check_finite(agreed, plan)
            self._obey(agreed, last=done == len(sizes))
        return done == len(sizes)

    def _steps_to_cut(self) -> int:
        """Returns the steps until the next one after which something has to happen."""
        settings, steps = self._run.settings, self.position.steps
        cuts = [settings.max_steps] if settings.max_steps else []
        if settings.checkpoint_steps:
            cuts.append((steps // settings.checkpoint_steps + 1) * settings.checkpoint_steps)
        return min((cut - steps for cut in cuts if cut > steps), default=self._stretch)

    def _advance(self, sizes: Sequence[int], seconds: float, stretch: Stretch) -> None:
        position, examples = self.position, sum(sizes)
        self.position = Position(position.epoch, position.examples + examples, position.steps + len(sizes))
        counters = self._counters
        counters.steps += len(sizes)
        counters.examples += examples
        counters.seconds += seconds
        counters.waited += stretch.waited
        if not self._fixed:
            self._stretch = _stretch(max(len(sizes), self._stretch), seconds, of=len(sizes))

    def _agree(self, stretch: Stretch, count: int) -> Agreement:
        """Agrees with all processes; what a callback of one has stopped, stops on all. A collective."""
        self._watchdog.at(f"after step {self.position.steps:,}, to agree with the others")
        settings, cluster, now = self._run.settings, self._run.cluster, time.monotonic()
        chief = cluster.is_chief
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

    def _check_finite(self, agreed: Agreement, plan: Plan) -> None:
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
        source = self._run.step_source(plan, step - before, process)
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
                position = self.position
                self.position = Position(position.epoch + 1, 0, position.steps, closed=False)
            self._save()
            self._stop_if(True)
        if self._model.stop_training:
            self._ended = STOPPED
        if agreed.time_is_up:
            self._ended = time_is_up(settings)
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
            saved = (
                f"a checkpoint was saved at step {self.position.steps:,}; start the same command again "
                "to go on"
            )
            if self._run.checkpoints is None:
                saved = "nothing is saved, as there is no checkpoint_dir"
            raise RestartError(f"asked to stop (SIGTERM): {saved}")


def _stretch(steps: int, seconds: float, *, of: int = 0) -> int:
    """Returns the steps of about a second when `of` of them, or `steps`, took some; growth is bounded."""
    wanted = int((of or steps) * _SECONDS / max(seconds, 1e-6))
    return max(1, min(wanted, _GROWTH * steps))


def _compiled_steps(model: keras.Model) -> int:
    """Returns the steps that `compile(steps_per_execution=...)` takes at a time; 0 where it says nothing."""
    steps = model.steps_per_execution
    return steps if isinstance(steps, int) and steps > 1 else 0
