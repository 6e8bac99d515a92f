"""What the tasks of a pipeline log to an MLflow server, and the settings that name it to them.

Nothing is logged where MLFLOW_TRACKING_URI is not set; a server that is away costs no run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from shardline.components.runs.record import FAILED, SUCCEEDED, RunRecord
from shardline.components.vertex.client import read_secret
from shardline.components.vertex.forms import SECRET, Form
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SettingsError, ShardlineError
from shardline.trainer.base.tracking import NAME_TAG, RUN_VARIABLE, URI_VARIABLE, TrackedRun, open_run
from shardline.trainer.data.manifest import Manifest

#: Environment variables: the token, MLflow's own, and the name of the secret that holds it.
TOKEN_VARIABLE, SECRET_VARIABLE = "MLFLOW_TRACKING_TOKEN", "SHARDLINE_MLFLOW_TOKEN_SECRET"
#: Tags of an end, which no longer hold when the run goes on.
_END = {"failed step", "exit", "error", "likely cause", "next step", "verdict", "reason", "blocked by"}
_URI = Form(
    r"https?://[^@/?#\s]+(/[^@?#\s]*)?", "http(s)://HOST[:PORT][/PATH]; a token's secret is token_secret"
)


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """The MLflow server of all tasks, [tracking]; settings/vertex.toml.example explains the fields."""

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
        """Environment variables of every task."""
        names = URI_VARIABLE, "MLFLOW_EXPERIMENT_NAME", SECRET_VARIABLE
        return {name: value for name, value in zip(names, vars(self).values(), strict=True) if value}


def sign_in(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets this process's MLFLOW_TRACKING_TOKEN from the secret of [tracking], unless there is a token."""
    secret = environ.get(SECRET_VARIABLE)
    if secret and environ.get(URI_VARIABLE) and not environ.get(TOKEN_VARIABLE):
        try:
            environ[TOKEN_VARIABLE] = read_secret(secret)
        except ShardlineError as error:
            progress.report("tracking", f"warning: no token for MLflow: {error.line}")


def log(name: str, *actions: Callable[[TrackedRun], Any], continues: str = "", status: str = "") -> None:
    """Logs to the MLflow run of a pipeline's run, that of the run that it `continues`; `status` ends it."""
    sign_in()
    if run := open_run(continues or name):
        if continues:
            run.call(lambda client: _reopen(client, run.id))
            run.tags({NAME_TAG: name, "continues": continues})
        for action in actions:
            action(run)
        run.close("" if os.environ.get(RUN_VARIABLE) else status)  # who made that run ends it


def _reopen(client: Any, run_id: str) -> None:
    client.update_run(run_id, status="RUNNING")
    for key in _END & client.get_run(run_id).data.tags.keys():
        client.delete_tag(run_id, key)


def end(name: str, record: RunRecord) -> None:
    """Ends the MLflow run of a pipeline's run, with the explanation of a failure, and links."""
    tags = dict(record.explanation.rows()) if record.explanation else {}
    links = (f"{key}: {link}" for key, link in record.links.items())  # the page makes links of addresses
    tags["mlflow.note.content"] = "\n\n".join([record.headline(), *links])
    status = {SUCCEEDED: "FINISHED", FAILED: "FAILED"}.get(record.state, "KILLED")
    log(name, methodcaller("tags", tags), status=status)


def log_dataset(name: str, manifest: Manifest, draw_card: Callable[[], str]) -> None:
    """Logs a dataset as input of the MLflow run of a pipeline's run, with its card, an HTML page."""

    def action(run: TrackedRun) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        columns = [{"name": item.name, "type": item.dtype} for item in manifest.features]
        records = {key: split.records for key, split in manifest.splits.items()}
        dataset = Dataset(
            manifest.source[:500],
            manifest.fingerprint.removeprefix("sha256:")[:36],  # MLflow takes no more
            "local",
            json.dumps({"uri": manifest.source}),
            json.dumps({"mlflow_colspec": columns}),
            json.dumps({"num_rows": manifest.records, **records, "fingerprint": manifest.fingerprint}),
        )
        inputs = [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])]
        run.call(lambda client: client.log_inputs(run.id, inputs))
        run.call(lambda client: client.log_text(run.id, draw_card(), "dataset_card.html"))

    log(name, action)
