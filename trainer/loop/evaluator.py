"""Evaluator: a process of its own that evaluates every checkpoint and keeps the best model.

Chief and evaluator communicate by files in `evaluations`, next to the checkpoints: `{steps}.json` is the
result of a checkpoint, `chief` the chief's heartbeat, and `last.json` names the last checkpoint.
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
from shardline.trainer.base.errors import DamagedError, ModelError, RunError
from shardline.trainer.base.settings import OutputDirs
from shardline.trainer.checkpoint import Checkpoints, Position, restore_model
from shardline.trainer.keras_compat.keras_internals import saveable
from shardline.trainer.keras_compat.tensorflow_internals import in_thread
from shardline.trainer.loop import callbacks
from shardline.trainer.loop.step import Logs, Shapes

BEST_FILE = "best.keras"

# Seconds between two heartbeats; between two polls of the directory; and without a heartbeat, after which the
# chief counts as ended: a mounted bucket (Cloud Storage FUSE) may show an old one for 60 s.
_BEAT_S, _POLL_S, _GONE_S = 5.0, 1.0, 180.0
#: Seconds that the chief waits for the evaluation of the last checkpoint.
_LAST_EVALUATION_S = 600.0


class Evaluations:
    """Directory of results, next to the checkpoints; it need not exist."""

    def __init__(self, checkpoints: Path):
        self._directory = checkpoints / "evaluations"
        self._beat = self._directory / "chief"
        self._last = self._directory / "last.json"

    def steps(self) -> list[int]:
        """Returns the steps whose checkpoints have been evaluated, in order."""
        stems = (name.removesuffix(".json") for name in files.names(self._directory))
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def write(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Writes the result of a checkpoint; a metric that is not finite becomes null."""
        self._directory.mkdir(parents=True, exist_ok=True)
        values = callbacks.to_json_values(dict(metrics))
        content = {"steps": position.steps, "epoch": position.epoch, "metrics": values}
        files.write_json(self._path(position.steps), content)

    def read_metrics(self, steps: int) -> dict[str, float] | None:
        """Returns the finite metrics of a checkpoint; None if it has not been evaluated.

        Raises RunError when its file cannot be read.
        """
        try:
            metrics = files.read_json(self._path(steps), ModelError).get("metrics")
        except ModelError:  # there is none, or it is damaged
            return None
        if not isinstance(metrics, dict):
            return None
        return {name: value for name, value in metrics.items() if isinstance(value, int | float)}

    @contextlib.contextmanager
    def chief_alive(self, first_step: int) -> Iterator[None]:
        """Writes the chief's heartbeat; removes results after `first_step` of an earlier process."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._last.unlink(missing_ok=True)
        for steps in self.steps():
            if steps > first_step:
                self._path(steps).unlink()
        over = threading.Event()

        def beat() -> None:
            while True:
                # A full disk must not end the run here; saving a checkpoint reports it.
                with contextlib.suppress(OSError):
                    files.write_text(self._beat, f"{time.time_ns()}\n")
                if over.wait(_BEAT_S):
                    return

        with in_thread(beat, over, "heartbeat"):
            yield

    def heartbeat(self) -> str:
        """Returns the chief's last heartbeat, which changes as long as the chief runs."""
        with contextlib.suppress(OSError):
            return self._beat.read_text(encoding="utf-8")
        return ""

    def finish(self, steps: int) -> None:
        """Records, as the chief, that the checkpoint at `steps` is the last."""
        self._directory.mkdir(parents=True, exist_ok=True)
        files.write_json(self._last, {"steps": steps})

    @property
    def finished(self) -> bool:
        """Whether the last checkpoint is recorded; that of an earlier run, until a chief starts."""
        return self._last.exists()

    def _path(self, steps: int) -> Path:
        return self._directory / f"{steps}.json"


class Evaluator:
    """Evaluates checkpoints as they appear, each restored into a built model.

    The best model by `metric`, one of those `shown`, is written to the directory of the model in `dirs`,
    results next to the checkpoints and to TensorBoard's run "evaluator".
    """

    def __init__(
        self,
        model: keras.Model,
        evaluate: Callable[[], Logs],
        checkpoints: Checkpoints,
        dirs: OutputDirs,
        *,
        metric: str,
        shown: Shapes,
    ):
        self._model = model
        self._evaluate = evaluate
        self._checkpoints = checkpoints
        self._evaluations = Evaluations(dirs.checkpoints)
        self._best_file = dirs.model / BEST_FILE
        self._metric = metric
        self._events = dirs.logs / "evaluator"
        self._writer = tf.summary.create_file_writer(str(self._events))
        self._comparison = callbacks.Stopping(metric, 0)
        self._comparison.set_model(model)
        self._comparison.check_metric(shown)
        self._skipped: set[int] = set()
        self._unread: set[int] = set()

    def evaluate_checkpoints(self, startup_timeout: float, *, gone: float = _GONE_S) -> None:
        """Evaluates until the chief has recorded its last checkpoint, or has no heartbeat for `gone` seconds.

        Its first heartbeat has to come within `startup_timeout` seconds (0 for no limit).
        """
        heartbeat, seen, alive = self._evaluations.heartbeat(), False, time.monotonic()
        waits = False
        while True:
            # Read before the checkpoints: the last one exists when it is recorded as the last.
            finished = seen and self._evaluations.finished
            if self._evaluate_new() and finished:
                progress.report("evaluate", "training has ended, and so does the evaluator")
                return
            if (now := self._evaluations.heartbeat()) != heartbeat:
                heartbeat, seen, alive, waits = now, True, time.monotonic(), False
                continue
            limit, silent = gone if seen else startup_timeout or math.inf, time.monotonic() - alive
            if seen and silent > limit / 2 and not waits:
                waits = True
                text = (
                    f"waiting for a heartbeat of the chief: none for {silent:.0f} s, the limit is {limit:g} s"
                )
                progress.report("evaluate", text)
            if silent > limit:
                progress.report("evaluate", f"no heartbeat of the chief for {limit:g} s: the evaluator ends")
                return
            time.sleep(_POLL_S)

    def _evaluate_new(self) -> bool:
        """Evaluates new checkpoints; returns whether all could be read that are not damaged."""
        done, unread = {*self._evaluations.steps(), *self._skipped}, set[int]()
        for steps in self._checkpoints.steps():
            if steps not in done:
                try:
                    snapshot = self._checkpoints.read_snapshot(steps, "model/")
                except RunError as error:
                    if steps in self._checkpoints.steps():  # else the chief has deleted it meanwhile
                        damaged = isinstance(error, DamagedError)
                        if steps not in self._unread:
                            result = "it is not evaluated" if damaged else "trying again"
                            progress.report("evaluate", f"warning: {error}; {result}")
                        (self._skipped if damaged else unread).add(steps)
                    continue
                restore_model(self._model, snapshot)
                metrics = self._evaluate()
                with self._writer.as_default():
                    for name, value in callbacks.scalar_metrics(metrics).items():
                        # Keras' own name of evaluations by step.
                        tf.summary.scalar(f"evaluation_{name}_vs_iterations", value, step=steps)
                self._writer.flush()
                callbacks.sync_events(self._events)
                self._keep_best(metrics[self._metric])
                self._evaluations.write(snapshot.position, metrics)
                at = f"step {steps:,}, epoch {snapshot.position.epoch}"
                progress.report("evaluate", f"{at}: {callbacks.format_metrics(metrics)}")
        self._unread = unread
        return not unread

    def _keep_best(self, value: float) -> None:
        """Saves the model unless one evaluated before, also by an earlier process, was better."""
        before = (self._evaluations.read_metrics(steps) for steps in self._evaluations.steps())
        values = [metrics[self._metric] for metrics in before if metrics and self._metric in metrics]
        better = all(self._comparison.improves(value, other) for other in values)
        if not math.isfinite(value) or (values and self._best_file.exists() and not better):
            return
        self._best_file.parent.mkdir(parents=True, exist_ok=True)
        with saveable(self._model), files.replacing(self._best_file) as temporary:
            self._model.save(temporary)


def wait_for_last_evaluation(checkpoints: Path, position: Position) -> Logs:
    """Records the last checkpoint, waits for its evaluation, and returns the metrics as "evaluator_loss", ...

    For the chief, whose end ends the job. Returns {}, with a warning, if the evaluator takes too long.
    """
    evaluations = Evaluations(checkpoints)
    evaluations.finish(position.steps)
    deadline = time.monotonic() + _LAST_EVALUATION_S
    while (metrics := evaluations.read_metrics(position.steps)) is None:
        if time.monotonic() > deadline:
            progress.report(
                "train",
                f"warning: no evaluation of step {position.steps:,} within {_LAST_EVALUATION_S:g} s; "
                "look at the evaluator's log",
            )
            return {}
        time.sleep(_POLL_S)
    return {f"evaluator_{name}": value for name, value in metrics.items()}
