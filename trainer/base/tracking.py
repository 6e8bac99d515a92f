"""Tracking: what a run logs to an MLflow server, where MLFLOW_TRACKING_URI is set.

A server that is away costs no run: what cannot be logged is tried again, then reported once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

from shardline.trainer.base import progress

#: Environment variables, MLflow's own: the server, and the run that open-source KFP has made for a pipeline.
URI_VARIABLE, RUN_VARIABLE = "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"
#: Tag with the name of Shardline's run, by which its other tasks, and a continued run, find the MLflow run.
NAME_TAG = "shardline.run"


class TrackedRun:
    """A run of MLflow that this process logs to; no method raises, but for a mistake in the calling code.

    Attributes:
        id: Id of the run in MLflow.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        """Takes an `mlflow.MlflowClient` and the id of a run; `open_run` makes one."""
        self.id = run_id
        self._client = client

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Logs parameters; MLflow keeps the first value of each."""
        for name, value in values.items():
            self.call(methodcaller("log_param", self.id, name, value))

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Logs metrics of a step, the number of an epoch from 1; 0 for those of the whole run."""
        for name, value in values.items():
            self.call(methodcaller("log_metric", self.id, name, value, step=step))

    def tags(self, values: Mapping[str, str]) -> None:
        """Sets tags."""
        for name, value in values.items():
            self.call(methodcaller("set_tag", self.id, name, value))

    def file(self, path: Path, directory: str = "") -> None:
        """Uploads a file, or a directory with all that is in it, below a directory of the run's artifacts."""
        upload = "log_artifacts" if path.is_dir() else "log_artifact"
        self.call(methodcaller(upload, self.id, str(path), directory or None))

    def call(self, action: Callable[[Any], Any]) -> None:
        """Calls anything else with the client, as the methods above do, in the order of the calls."""
        try:
            action(self._client)
        except Exception as error:  # MLflow raises its own, and those of requests
            progress.report("tracking", f"warning: cannot log to MLflow: {' '.join(str(error).split())}")

    def close(self, status: str = "") -> None:
        """Waits until all is logged, or given up; ends the run as FINISHED, FAILED or KILLED, if named."""
        if status:
            self.call(methodcaller("set_terminated", self.id, status))


def open_run(
    name: str, *, child: str = "", fresh: bool = False, environ: Mapping[str, str] = os.environ
) -> TrackedRun | None:
    """Returns the MLflow run of a Shardline run, which is made where there is none; None without a server.

    Args:
        name: Name of Shardline's run; the same name finds the same run again.
        child: Name of a run that is nested in it, such as "trial 3"; "" for the run itself.
        fresh: Whether to make a new one although there is one of this name.
        environ: Environment variables.
    """
    if not environ.get(URI_VARIABLE):
        return None
    try:
        from mlflow import MlflowClient

        client = MlflowClient(environ[URI_VARIABLE])
        own = environ.get(RUN_VARIABLE, "")
        experiment = client.get_run(own).info.experiment_id if own else _experiment(client, environ)
        run = own or ("" if fresh and not child else _find(client, experiment, name))
        run = run or client.create_run(experiment, tags={NAME_TAG: name}, run_name=name).info.run_id
        if child:
            nested = {NAME_TAG: f"{name}/{child}", "mlflow.parentRunId": run}
            run = ("" if fresh else _find(client, experiment, nested[NAME_TAG])) or client.create_run(
                experiment, tags=nested, run_name=child
            ).info.run_id
    except Exception as error:  # not installed, or MLflow's own errors, and those of requests
        progress.report("tracking", f"warning: cannot log to MLflow: {' '.join(str(error).split())}")
        return None
    return TrackedRun(client, run)


def _experiment(client: Any, environ: Mapping[str, str]) -> str:
    """Returns the id of the experiment, MLflow's own default where none is named."""
    if named := environ.get("MLFLOW_EXPERIMENT_ID"):
        return named
    name = environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))


def _find(client: Any, experiment: str, name: str) -> str:
    """Returns the id of the newest run of a name; "" for none."""
    quote = '"' if "'" in name else "'"  # nothing in it can be escaped
    found = client.search_runs([experiment], f"tags.`{NAME_TAG}` = {quote}{name}{quote}", max_results=1)
    return str(found[0].info.run_id) if found else ""
