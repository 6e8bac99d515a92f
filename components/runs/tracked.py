"""What the tasks of a pipeline log to an MLflow server, and the settings that name it to them.

Each function does nothing where MLFLOW_TRACKING_URI is not set, and costs no run where the server is away.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from shardline.components.vertex.client import read_secret
from shardline.components.vertex.forms import SECRET, check_text
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SettingsError, ShardlineError
from shardline.trainer.base.tracking import URI_VARIABLE

_TOPIC = "tracking"
#: Environment variables: the token, MLflow's own, and the name of the secret that holds it.
TOKEN_VARIABLE, SECRET_VARIABLE = "MLFLOW_TRACKING_TOKEN", "SHARDLINE_MLFLOW_TOKEN_SECRET"


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """The MLflow server of all tasks, [tracking]; settings/vertex.toml.example explains the fields."""

    mlflow_uri: str
    experiment: str = ""
    token_secret: str = ""

    def __post_init__(self) -> None:
        uri = urlsplit(self.mlflow_uri)
        if "@" in uri.netloc:  # not repeated in the message
            raise SettingsError(
                "mlflow_uri has a user or a password in it, which the compiled pipeline would show; name the "
                "secret that holds the token as token_secret"
            )
        if uri.scheme not in ("http", "https") or not uri.hostname:
            raise SettingsError(f"mlflow_uri must be http(s)://HOST[:PORT][/PATH], got {self.mlflow_uri!r}")
        if self.token_secret and not SECRET.fits(self.token_secret):
            raise SettingsError(f"token_secret must be {SECRET.description} that holds it, not the token")
        for name in ("mlflow_uri", "experiment"):
            check_text(name, getattr(self, name))

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
            progress.report(_TOPIC, f"warning: no token for MLflow: {error.line}")
