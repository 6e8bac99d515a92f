"""Resume: a built model is made ready to train from the newest checkpoint, or from the beginning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import keras

from shardline.trainer import progress
from shardline.trainer.callbacks import Hooks
from shardline.trainer.checkpoint.changes import Moment, Record
from shardline.trainer.checkpoint.identity import Identity
from shardline.trainer.checkpoint.preemption import Preemption
from shardline.trainer.checkpoint.state import Position, Snapshot, TrainingState
from shardline.trainer.checkpoint.store import Checkpoints
from shardline.trainer.errors import RunError
from shardline.trainer.loop import Engine, Training, end_of_run
from shardline.trainer.models import adapted
from shardline.trainer.optimizers import take_changed_rates
from shardline.trainer.reports import Counters
from shardline.trainer.run import Run


@dataclass(frozen=True)
class Beginning:
    """What a run begins with, where no checkpoint says otherwise.

    Attributes:
        data: Fingerprint of what is trained on: part of the run's identity.
        record: What the run is.
        fixed: What cannot change when it goes on, beside that.
        position: Where it begins without a checkpoint.
    """

    data: str
    record: Record
    fixed: Mapping[str, object]
    position: Position = field(default_factory=Position)


def begin(
    run: Run,
    model: keras.Model,
    hooks: Hooks,
    beginning: Beginning,
    make_engine: Callable[[Position], Engine],
    *,
    counters: Counters,
    preemption: Preemption,
    verbose: int = 2,
) -> Training:
    """Returns what trains a built model on, at the newest checkpoint if there is one.

    Callbacks have seen `on_train_begin`, and within an epoch `on_epoch_begin`. A collective.
    """
    model.stop_training = False
    hooks.begin(model, epochs=run.settings.epochs, steps=run.steps_per_epoch, verbose=verbose)
    # After on_train_begin, which resets what callbacks remember.
    state = TrainingState(model, hooks.remembering, hooks.chief_remembering)
    fixed = {**beginning.record.fixed, **beginning.fixed}
    identity = Identity(run.settings.model, beginning.data, state.variables, fixed)
    checkpoints = Checkpoints.of(run.settings, run.checkpoints, identity, write=run.cluster.is_chief)
    snapshot = _resume(run, model, hooks, state, checkpoints, beginning)
    position = snapshot.position if snapshot else beginning.position
    engine = make_engine(position)
    _count_steps(run, counters, position)
    return Training(
        run,
        model,
        engine,
        position=position,
        resumed=snapshot,
        state=state,
        checkpoints=checkpoints,
        hooks=hooks,
        preemption=preemption,
        counters=counters,
    )


def _resume(
    run: Run,
    model: keras.Model,
    hooks: Hooks,
    state: TrainingState,
    checkpoints: Checkpoints,
    beginning: Beginning,
) -> Snapshot | None:
    """Restores the newest checkpoint and returns it; None where there is none.

    What has changed since then takes effect, and a line says so, or is refused.
    """
    run.watchdog.at("at the meeting before the first step")
    record, snapshot = beginning.record, checkpoints.restore()
    at = snapshot.position if snapshot else beginning.position
    processes, steps, *by_step = run.collectives.total([1, at.steps, hooks.by_step, hooks.by_test_step])
    # What is called after every step on one replica, where another has made other callbacks, is so on all.
    hooks.by_step, hooks.by_test_step = (bool(number) for number in by_step)
    if steps != at.steps * processes:
        raise RunError(
            f"{run.cluster.name} has found another newest checkpoint in {run.checkpoints} (of step "
            f"{at.steps:,}) than the others; all replicas must see the same directory: use a shared one (gs://)"
        )
    state.record = record.json
    if snapshot is None:
        return None
    before = Record(**snapshot.host.get("run", record.json))
    seconds, stopped = snapshot.host.get("seconds", 0.0), snapshot.host["stop_training"]
    ended = end_of_run(run.settings, at, seconds, stopped=stopped)
    now, said = record.continuing(before, Moment(at.epoch, at.examples, at.steps, ended))
    if at.examples or not at.closed:
        # What callbacks do at the beginning of an epoch (to the learning rate) is part of what is restored.
        hooks("on_epoch_begin", at.last_epoch)
    state.restore(snapshot, run.process)
    if run.settings.allow_new_data:  # to which layers have been adapted anew
        adapted.refresh(model)
    take_changed_rates(model, before.learning_rates, now.learning_rates)
    state.record = now.json
    if run.cluster.is_chief:
        within = f", {at.examples:,} examples into epoch {at.epoch + 1}" if at.examples else ""
        progress.say("train", f"resuming after step {at.steps:,}{within}, from {run.checkpoints}")
        for change in said:
            progress.say("train", str(change))
    return snapshot


def _count_steps(run: Run, counters: Counters, position: Position) -> None:
    """Tells the counters where the run begins, and where it ends if nothing ends it early."""
    settings = run.settings
    epochs_left = settings.epochs - position.epoch - 1
    left = len(run.epoch(position).step_sizes) + epochs_left * run.steps_per_epoch
    counters.first_step = counters.steps = position.steps
    counters.total_steps = position.steps + max(0, left)
    if settings.max_steps:
        counters.total_steps = min(counters.total_steps, settings.max_steps)
