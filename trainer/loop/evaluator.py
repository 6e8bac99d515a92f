"""Evaluator: a process beside the training that evaluates every checkpoint and keeps the best model.

Chief and evaluator talk through files in `evaluations`, beside the checkpoints: `{steps}.json` is the result
of a checkpoint, `chief` changes for as long as the chief lives, and `last.json` names the last checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import keras
import tensorflow as tf

from shardline.trainer.base import files, progress
from shardline.trainer.base.errors import RunError
from shardline.trainer.checkpoint.state import Position, restore_model
from shardline.trainer.checkpoint.store import Checkpoints
from shardline.trainer.keras_compat.keras_compilation import saveable
from shardline.trainer.loop.callbacks import Stopping
from shardline.trainer.loop.reports import as_json, metrics_text, numbers, sync_events
from shardline.trainer.loop.run import DatasetRun
from shardline.trainer.loop.step import Logs, Shapes

BEST_FILE = "best.keras"

# Seconds between two signs of life; between two looks at the directory; and without a sign of life, far more
# than one takes on its way, after which the chief has ended.
_BEAT_S, _POLL_S, _GONE_S = 5.0, 1.0, 60.0


class Evaluations:
    """Directory of results, which need not exist, beside the checkpoints."""

    def __init__(self, checkpoints: Path):
        self._directory = checkpoints / "evaluations"
        self._beat = self._directory / "chief"
        self._last = self._directory / "last.json"

    def steps(self) -> list[int]:
        """Returns the steps whose checkpoints have been evaluated, in order."""
        return sorted(int(path.stem) for path in self._directory.glob("*.json") if path.stem.isdecimal())

    def write(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Writes the result of a checkpoint; a metric that is not finite becomes null."""
        self._directory.mkdir(parents=True, exist_ok=True)
        content = {"steps": position.steps, "epoch": position.epoch, "metrics": as_json(dict(metrics))}
        files.write_json(self._path(position.steps), content)

    def read(self, steps: int) -> dict[str, float] | None:
        """Returns the finite metrics of a checkpoint, or None where it has not been evaluated."""
        try:
            metrics = files.read_json(self._path(steps), RunError).get("metrics")
        except RunError:
            return None
        if not isinstance(metrics, dict):
            return None
        return {name: value for name, value in metrics.items() if isinstance(value, int | float)}

    @contextlib.contextmanager
    def chief_alive(self, first_step: int) -> Iterator[None]:
        """Shows that the chief lives; removes what an earlier attempt has left after `first_step`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._last.unlink(missing_ok=True)
        for steps in self.steps():
            if steps > first_step:
                self._path(steps).unlink()
        over = threading.Event()

        def show_life() -> None:
            while True:
                # A full disk must not end the run here; a checkpoint will say so.
                with contextlib.suppress(OSError):
                    files.write_text(self._beat, f"{time.time_ns()}\n")
                if over.wait(_BEAT_S):
                    return

        thread = threading.Thread(target=show_life, name="alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def life(self) -> str:
        """Returns what changes for as long as the chief lives."""
        with contextlib.suppress(OSError):
            return self._beat.read_text(encoding="utf-8")
        return ""

    def finish(self, steps: int) -> None:
        """Says, as the chief, that the checkpoint at `steps` is the last."""
        self._directory.mkdir(parents=True, exist_ok=True)
        files.write_json(self._last, {"steps": steps})

    @property
    def finished(self) -> bool:
        """Whether there will be no further checkpoint; of an earlier run, as long as no chief lives."""
        return self._last.exists()

    def _path(self, steps: int) -> Path:
        return self._directory / f"{steps}.json"


class Evaluator:
    """Evaluates checkpoints as they appear, each restored into a built model as a whole.

    The best model by `metric`, one of those `shown`, is written into `directory`, results into TensorBoard's
    run "evaluator" in `logs`.
    """

    def __init__(
        self,
        model: keras.Model,
        evaluate: Callable[[], Logs],
        checkpoints: Checkpoints,
        evaluations: Evaluations,
        *,
        directory: Path,
        logs: Path,
        metric: str,
        shown: Shapes,
    ):
        self._model = model
        self._evaluate = evaluate
        self._checkpoints = checkpoints
        self._evaluations = evaluations
        self._best_file = directory / BEST_FILE
        self._metric = metric
        self._events = logs / "evaluator"
        self._writer = tf.summary.create_file_writer(str(self._events))
        self._judge = Stopping(metric, 0)
        self._judge.set_model(model)
        self._judge.check(shown)
        self._skipped: set[int] = set()

    def run(self, startup_timeout: float, *, gone: float = _GONE_S) -> None:
        """Evaluates until the chief has said that a checkpoint is the last, or is `gone` seconds silent.

        It has to show itself within `startup_timeout` seconds (0 for no limit).
        """
        life, seen, alive = self._evaluations.life(), False, time.monotonic()
        while True:
            # Before looking for checkpoints: the last one is there when this is said.
            finished = seen and self._evaluations.finished
            self._evaluate_new()
            if finished:
                progress.report("evaluate", "training has ended, and so does the evaluator")
                return
            if (now := self._evaluations.life()) != life:
                life, seen, alive = now, True, time.monotonic()
                continue
            limit = gone if seen else startup_timeout or math.inf
            if time.monotonic() - alive > limit:
                progress.report(
                    "evaluate", f"no sign of life from the chief for {limit:g} s: the evaluator ends"
                )
                return
            time.sleep(_POLL_S)

    def _evaluate_new(self) -> None:
        done = {*self._evaluations.steps(), *self._skipped}
        for steps in self._checkpoints.steps():
            if steps not in done:
                try:
                    snapshot = self._checkpoints.read(steps)
                except RunError as error:
                    self._skipped.add(steps)
                    # A newer one may have taken its place meanwhile, which is nothing to worry about.
                    if steps in self._checkpoints.steps():
                        progress.report("evaluate", f"warning: {error}; it is not evaluated")
                    continue
                restore_model(self._model, snapshot)
                metrics = self._evaluate()
                with self._writer.as_default():
                    for name, value in numbers(metrics).items():
                        # The name that Keras' own callback gives to evaluations by step.
                        tf.summary.scalar(f"evaluation_{name}_vs_iterations", value, step=steps)
                self._writer.flush()
                sync_events(self._events)
                self._keep_best(metrics[self._metric])
                self._evaluations.write(snapshot.position, metrics)
                at = f"step {steps:,}, epoch {snapshot.position.epoch}"
                progress.report("evaluate", f"{at}: {metrics_text(metrics)}")

    def _keep_best(self, value: float) -> None:
        """Saves the model where none that was evaluated before, by an earlier process too, was better."""
        before = (self._evaluations.read(steps) for steps in self._evaluations.steps())
        values = [metrics[self._metric] for metrics in before if metrics and self._metric in metrics]
        better = all(self._judge.improves(value, other) for other in values)
        if not math.isfinite(value) or (values and self._best_file.exists() and not better):
            return
        self._best_file.parent.mkdir(parents=True, exist_ok=True)
        with saveable(self._model), files.replacing(self._best_file) as temporary:
            self._model.save(temporary)


def wait_for_last(run: DatasetRun, position: Position) -> Logs:
    """Tells the evaluator that training has ended, and returns its metrics ("evaluator_loss") of the last.

    For the chief, whose end ends the job. None, with a warning, when the evaluator took too long.
    """
    evaluations = Evaluations(run.dirs.checkpoints)
    evaluations.finish(position.steps)
    deadline = time.monotonic() + run.settings.evaluator_timeout
    while (metrics := evaluations.read(position.steps)) is None:
        if time.monotonic() > deadline:
            progress.report(
                "train",
                f"warning: no evaluation of step {position.steps:,} within evaluator_timeout "
                f"{run.settings.evaluator_timeout:g} s; look at the evaluator's log",
            )
            return {}
        time.sleep(_POLL_S)
    return {f"evaluator_{name}": value for name, value in metrics.items()}
