"""Log of a run in MLflow: what it has left is logged when it has ended, by MLflow's own client.

Nothing is imported where MLFLOW_TRACKING_URI is not set; a server that is away costs a line and ten seconds.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardline.components.custom_job import SECRET, TextFormat
from shardline.components.runs.run import Run
from shardline.components.vertex import call_within, read_secret
from shardline.trainer.base import files
from shardline.trainer.base.errors import SettingsError, printable
from shardline.trainer.base.progress import report
from shardline.trainer.base.settings import HISTORY_FILE, SETTINGS_FILE

#: MLflow's own environment variables: the server, and the token or the name of the secret that holds it.
URI_VARIABLE, TOKEN_VARIABLE = "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"
#: Tag with the name of the run, by which a repeated log finds its run.
NAME_TAG = "shardline.run"
_TIMEOUT, _UPLOAD_TIMEOUT_S, _UPLOAD_S = "MLFLOW_HTTP_REQUEST_TIMEOUT", 300, 3600
# MLflow's client prints nothing, and does not retry.
_OPTIONS = {
    _TIMEOUT: "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
}
# What MLflow takes in no name, and the longest value of a parameter or tag.
_OTHER, _MAX_VALUE = re.compile(r"[^\w/. -]"), 5000
_URI = TextFormat(
    r"https?://[^@/?#\s]+(/[^@?#\s]*)?", "http(s)://HOST[:PORT][/PATH]; a token's secret is token_secret"
)


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """The MLflow server that runs are logged to, [tracking]; settings/vertex.toml.example has the fields."""

    mlflow_uri: str = ""
    experiment: str = ""
    token_secret: str = ""

    def __post_init__(self) -> None:
        # Neither is repeated in a message: it may be a secret.
        if any(vars(self).values()) and not _URI.fits(self.mlflow_uri):
            raise SettingsError(f"mlflow_uri must be {_URI.description}")
        if self.token_secret and not SECRET.fits(self.token_secret):
            raise SettingsError(f"token_secret must be {SECRET.description} that holds the token")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the task that logs."""
        names = URI_VARIABLE, "MLFLOW_EXPERIMENT_NAME", TOKEN_VARIABLE
        return {name: value for name, value in zip(names, vars(self).values(), strict=True) if value}


def log_run(name: str, run: Run) -> None:
    """Logs a run that has ended to the MLflow run of this name, which is made where there is none.

    A training without a pipeline is a run without one, whose name is the absolute path of its model.
    """
    if not (uri := os.environ.get(URI_VARIABLE)):
        return
    for variable, value in _OPTIONS.items():
        os.environ.setdefault(variable, value)
    try:
        if SECRET.fits(secret := os.environ.get(TOKEN_VARIABLE, "")):
            os.environ[TOKEN_VARIABLE] = read_secret(secret)
        _log(name, run)
    except Exception as error:  # MLflow raises its own, and those of requests
        token = os.environ.get(TOKEN_VARIABLE, "")  # which a server may repeat
        text = str(error) if SECRET.fits(token) else str(error).replace(token or "\0", "***")
        cause = " ".join(text.rpartition("(Caused by ")[2].split())[:300]
        hint = ": pip install 'shardline[mlflow]'" if isinstance(error, ImportError) else ""
        line = f"warning: cannot log to MLflow at {uri}: {printable(cause)}{hint}"
        report("tracking", re.sub(r"//[^/\s]*@", "//", line))  # without the password of an address


def _ask(call: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Calls MLflow's client, whose own timeout is for each read of an answer, of which there may be many."""
    return call_within(float(os.environ[_TIMEOUT]), partial(call, *given, **options))


def _log(name: str, record: Run) -> None:
    import mlflow

    quote = '"' if "'" in name else "'"  # nothing in it can be escaped
    wanted = f"tags.`{NAME_TAG}` = {quote}{name}{quote}"
    found = _ask(mlflow.search_runs, filter_string=wanted, max_results=1, output_format="list")
    tags = {NAME_TAG: name, **{_key(key): value[:_MAX_VALUE] for key, value in _tags(record).items()}}
    known = found[0].info.run_id if found else None
    run = _ask(mlflow.start_run, known, run_name=name, tags=tags).info.run_id
    try:
        training = files.local_path(record.training)
        own = files.read_json(training / SETTINGS_FILE, SettingsError) if record.training else {}
        settings = {**own, **record.parameters}
        given = {_key(key): value for key, value in settings.items() if value not in ("", (), [], {})}
        texts = {key: str(value)[:_MAX_VALUE] for key, value in given.items()}
        _ask(mlflow.log_params, texts, run_id=run)
        tests = {_key(f"test/{key}"): value for key, value in record.metrics.items()}
        _ask(mlflow.log_metrics, tests, run_id=run)
        if record.data:
            _log_dataset(run, record.data, settings)
        if record.training:
            _log_epochs(run, training)
        if exported := record.links.get("model"):
            os.environ[_TIMEOUT] = str(_UPLOAD_TIMEOUT_S)  # the server is there, and a model may be large
            path = str(files.local_path(exported))
            call_within(_UPLOAD_S, partial(mlflow.log_artifacts, path, "model", run_id=run))
    finally:
        status = {"succeeded": "FINISHED", "failed": "FAILED"}.get(record.state, "KILLED")
        _ask(mlflow.MlflowClient().set_terminated, run, status)


def _tags(run: Run) -> dict[str, str]:
    if not run.pipeline:
        return {}
    links = (f"{key}: {link}" for key, link in run.links.items())  # the page makes links of addresses
    return {
        "mlflow.note.content": "\n\n".join([run.headline(), *links]),
        **{key: value for key in ("verdict", "reason") if (value := getattr(run, key))},
        **dict(run.explanation.rows() if run.explanation else ()),
    }


def _key(name: str) -> str:
    return _OTHER.sub("_", name)[:250]


def _log_dataset(run: str, data: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    import mlflow
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source, fingerprint = str(settings.get("source", "dataset")), str(data.get("fingerprint", ""))
    digest = fingerprint.removeprefix("sha256:")[:36]  # MLflow takes no more
    profile = json.dumps(data, default=str)
    dataset = Dataset(source[:500], digest, "local", json.dumps({"uri": source}), profile=profile)
    inputs = [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])]
    _ask(mlflow.MlflowClient().log_inputs, run, inputs)


def _log_epochs(run: str, directory: Path) -> None:
    """Logs the metrics of each epoch at the time of its end, and the files that a training has left."""
    import mlflow

    path = directory / HISTORY_FILE
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    time = path.stat().st_mtime
    for row in reversed(rows):
        values = {key: json.loads(text) for key, text in row.items() if text}
        numbers = {_key(key): value for key, value in values.items() if isinstance(value, int | float)}
        step = int(numbers.pop("epoch"))
        _ask(mlflow.log_metrics, numbers, step=step, run_id=run, timestamp=int(time * 1000))
        time -= values["seconds"]
    for kept in (SETTINGS_FILE, HISTORY_FILE):
        _ask(mlflow.log_artifact, str(directory / kept), "training", run_id=run)
