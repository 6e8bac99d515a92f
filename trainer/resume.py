"""Resume: a built model is made ready to train from the newest checkpoint, or from the beginning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import keras

from shardline.trainer import progress, saving
from shardline.trainer.callbacks import Hooks
from shardline.trainer.checkpoint.identity import Identity, Record
from shardline.trainer.checkpoint.state import Position, Snapshot, TrainingState
from shardline.trainer.checkpoint.store import Checkpoints
from shardline.trainer.errors import RunError
from shardline.trainer.optimizers import take_changed_rates
from shardline.trainer.run import Run
from shardline.trainer.settings import TrainSettings

STOPPED = "a callback has stopped it"


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

    def checkpoints(self, run: Run, state: TrainingState) -> Checkpoints:
        """Returns the checkpoints of this run, and of no other."""
        fixed = {**self.record.fixed, **self.fixed}
        identity = Identity(run.settings.model, self.data, state.variables, fixed)
        return Checkpoints.of(run.settings, run.checkpoints, identity, write=run.cluster.is_chief)


def restore(
    run: Run,
    model: keras.Model,
    hooks: Hooks,
    state: TrainingState,
    checkpoints: Checkpoints,
    beginning: Beginning,
) -> Snapshot | None:
    """Restores the newest checkpoint and returns it; None where there is none. A collective.

    What has changed since then takes effect, and a line says so.
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
    state.record = asdict(record)
    if snapshot is None:
        return None
    before = Record(**snapshot.host.get("run", state.record))
    now, said = record.continuing(before, at.steps + 1)
    if at.examples or not at.closed:
        # What callbacks do at the beginning of an epoch (to the learning rate) is part of what is restored.
        hooks("on_epoch_begin", at.last_epoch)
    state.restore(snapshot, run.process)
    if run.settings.allow_new_data:  # to which layers have been adapted anew
        saving.refresh_adapted(model)
    take_changed_rates(model, before.learning_rates, now.learning_rates)
    state.record = asdict(now)
    if run.cluster.is_chief:
        within = f", {at.examples:,} examples into epoch {at.epoch + 1}" if at.examples else ""
        progress.say("train", f"resuming after step {at.steps:,}{within}, from {run.checkpoints}")
        seconds = snapshot.host.get("seconds", 0.0)
        ended = end_of_run(run.settings, at, seconds, stopped=snapshot.host["stop_training"])
        vain = f": that trains nothing, as {ended}; raise that limit, or begin in another directory"
        if said:
            progress.say("train", f"warning: {said}{vain}" if ended else said)
    return snapshot


def end_of_run(settings: TrainSettings, at: Position, seconds: float, *, stopped: bool) -> str:
    """Returns why no step is left to train after so many seconds, or "" where one is.

    `stopped` says whether a callback has stopped the training.
    """
    if at.epoch >= settings.epochs:
        return f"the run has done its {settings.epochs} epochs"
    if settings.max_steps and at.steps >= settings.max_steps:
        return f"max_steps {settings.max_steps:,} reached"
    if 0 < settings.max_time <= seconds:
        return time_is_up(settings)
    return STOPPED if stopped else ""


def time_is_up(settings: TrainSettings) -> str:
    """Says that `max_time` is over."""
    return f"max_time {settings.max_time:g} s is over"
