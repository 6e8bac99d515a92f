"""Tracking of a training: what its chief logs to an MLflow server, where MLFLOW_TRACKING_URI is set."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from numbers import Real
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from shardline.trainer.base import plugins, tracking
from shardline.trainer.base.errors import RestartError
from shardline.trainer.loop.loop import Training
from shardline.trainer.loop.run import TrainingRun, versions
from shardline.trainer.loop.step import Logs

_EMPTY: Any = ("", (), [], {})


class Tracking(keras.callbacks.Callback, AbstractContextManager["Tracking"]):  # type: ignore[misc]  # keras has no types
    """Logs settings, metrics by epoch and the end of a training, the end of the context. For the chief."""

    def __init__(self, environ: Mapping[str, str] = os.environ, pipeline: str = "") -> None:
        """Takes the name of the pipeline's run that the training is a part of; "" for none."""
        super().__init__()
        self._environ, self._pipeline = environ, pipeline
        self._run: tracking.TrackedRun | None = None
        trial = environ.get("CLOUD_ML_TRIAL_ID") if pipeline else ""
        self._trial = f"trial {trial}" if trial else ""
        self._attempt = ""

    def begin(self, run: TrainingRun, place: Path | str, training: Training) -> None:
        """Opens the MLflow run: the pipeline's, or that of a directory, the same if training has resumed."""
        self._counters, self._started, resumed = training.counters, time.monotonic(), training.resumed
        self._before, fresh = replace(self._counters), not resumed and not self._pipeline
        name = self._pipeline or str(place.absolute() if isinstance(place, Path) else place)
        self._run = tracked = tracking.open_run(name, child=self._trial, fresh=fresh, environ=self._environ)
        if tracked is None:
            return
        gpus = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
        tags = {
            **{f"version.{package}": version for package, version in versions().items()},
            "machine": " ".join([platform.node(), *(str(gpu.get("device_name")) for gpu in gpus)]),
            "cluster": str(run.cluster),
            "dataset": training.data,
            "strategy": run.strategy_name,
        }
        if resumed:
            tags["resumed_after_step"] = str(self._counters.steps)
            tags["changes"] = json.dumps(training.state.record["changes"], default=str)
            tracked.call(lambda client: self._begin_attempt(client, tracked.id, tags))
        else:
            tracked.tags(tags)
        more = {"replicas": run.replicas, "steps_per_epoch": run.steps_per_epoch}
        values = asdict(run.settings) | more | {"learning_rates": training.state.record["learning_rates"]}
        values |= {f"hparams.{key}": value for key, value in values.pop("hparams").items()}
        prefix = "training." if self._pipeline and not self._trial else ""  # beside the pipeline's parameters
        tracked.parameters({prefix + key: value for key, value in values.items() if value not in _EMPTY})

    def _begin_attempt(self, client: Any, parent: str, tags: Mapping[str, str]) -> None:
        """Makes the child of a training that goes on; earlier attempts that have not ended were killed."""
        continued = client.get_run(parent)
        experiment = continued.info.experiment_id
        wanted = f"tags.`{tracking.PARENT_TAG}` = '{parent}' AND attributes.run_name LIKE 'attempt %'"
        before = client.search_runs([experiment], wanted, max_results=1000)
        for run in before:
            if run.info.status == "RUNNING":
                client.set_terminated(run.info.run_id, "KILLED")
        client.update_run(parent, status="RUNNING")
        if "error" in continued.data.tags:
            client.set_tag(parent, "error", "")
        tags = {**tags, tracking.PARENT_TAG: parent}
        made = client.create_run(experiment, tags=tags, run_name=f"attempt {len(before) + 2}")
        self._attempt = made.info.run_id

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Logs the epoch, which on a continued run is the rest of it."""
        if self._run is None:
            return
        now, before, began = self._counters, self._before, self._started
        self._before, self._started = replace(now), time.monotonic()
        rate = (now.examples - before.examples) / max(now.seconds - before.seconds, 1e-9)
        metrics = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, Real)}
        speed = {"seconds": self._started - began, "examples_per_second": rate}
        self._run.metrics({**speed, **metrics}, epoch + 1)

    def files(self, *paths: Path) -> None:
        """Uploads files of a training that has ended."""
        for path in paths:
            if self._run is not None:
                self._run.file(path, "training")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends the run, unless it is to be continued, or a pipeline's or another's."""
        if self._run is None:
            return
        if isinstance(error, RestartError):  # within the grace period
            self._run.close(seconds=5.0)
            return
        killed = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        status = "FINISHED" if error is None else killed
        self._run.call(lambda client: self._attempt and client.set_terminated(self._attempt, status))
        owned = self._trial or not (self._pipeline or self._environ.get(tracking.RUN_VARIABLE))
        if owned and error is not None:
            self._run.tags({"error": plugins.describe(error)})
        self._run.close(status if owned else "")
