"""A real MLflow server on this machine, asked over HTTP what its UI shows.

SHARDLINE_TEST_MLFLOW is the path of its program, `mlflow`; `make engines` installs one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.jobs import eventually
from tests.helpers.replicas import free_ports

VARIABLE = "SHARDLINE_TEST_MLFLOW"

#: The shell ends its group, with the server, when standard input ends: also if its owner was killed.
_SHELL = '"$@" & read -r _; kill -9 0'


def unavailable() -> str:
    """Returns why no server can be started here, "" if one can."""
    program = os.environ.get(VARIABLE, "")
    return "" if program and Path(program).exists() else f"{VARIABLE} names no mlflow: make engines"


@dataclass
class MlflowServer:
    """A server with its database and artifacts in a directory of its own.

    Attributes:
        directory: What it writes, with server.log.
        uri: Its address, for MLFLOW_TRACKING_URI.
    """

    directory: Path
    uri: str
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, again at the same port, and waits until it answers."""
        command = (
            *(os.environ[VARIABLE], "server", "--port", self.uri.rpartition(":")[2], "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{self.directory}/mlflow.db"),
            *("--artifacts-destination", str(self.directory / "artifacts")),
        )
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _SHELL, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                start_new_session=True,
            )
        try:
            eventually(self._answers, seconds=90)
        except AssertionError:
            self.stop()
            raise AssertionError((self.directory / "server.log").read_text()[-3000:]) from None

    def stop(self) -> None:
        """Ends it at once, as a machine that is lost."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=30)
            self._process = None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
            return bool(answer.read() == b"OK")
        return False

    def ask(self, path: str, content: dict[str, Any] | None = None, /, **query: str) -> dict[str, Any]:
        """Returns the answer of the REST API, as in `ask("runs/get", run_id=ID)`; `content` is posted.

        https://mlflow.org/docs/latest/api_reference/rest-api.html
        """
        url = f"{self.uri}/api/2.0/mlflow/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        request = urllib.request.Request(url, headers={"Content-Type": "application/json"})
        if content is not None:
            request.data = json.dumps(content).encode()
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error}: {error.read().decode()}") from None

    def experiment(self, name: str) -> str:
        """Returns the id of an experiment; "" if there is none."""
        found = self.ask("experiments/search", {"max_results": 1000})["experiments"]
        return next((str(each["experiment_id"]) for each in found if each["name"] == name), "")

    def runs(self, experiment: str = "Default", *, parent: str = "") -> list[dict[str, Any]]:
        """Returns the runs of an experiment, the oldest first: all, or those nested in a run."""
        asked = {
            "experiment_ids": [self.experiment(experiment)],
            "order_by": ["attributes.start_time ASC"],
            "filter": f"tags.`mlflow.parentRunId` = '{parent}'" if parent else "",
        }
        return list(self.ask("runs/search", asked).get("runs", []))

    def history(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """Returns the steps of a metric with their values, in the order in which they were logged."""
        found = self.ask("metrics/get-history", run_id=run_id, metric_key=metric).get("metrics", [])
        return [(int(item.get("step", 0)), float(item["value"])) for item in found]

    def artifacts(self, run_id: str, path: str = "") -> list[str]:
        """Returns the paths of a run's artifacts in a directory of them."""
        found = self.ask("artifacts/list", run_id=run_id, path=path).get("files", [])
        return sorted(item["path"] for item in found)

    def artifact(self, run_id: str, path: str) -> str:
        """Returns the text of an artifact, as the UI shows it."""
        query = urllib.parse.urlencode({"run_uuid": run_id, "path": path})
        with urllib.request.urlopen(f"{self.uri}/get-artifact?{query}", timeout=30) as answer:
            return str(answer.read().decode())


def pairs(run: dict[str, Any], kind: str) -> dict[str, Any]:
    """Returns a run's "params", "metrics" (the last value of each) or "tags" by name."""
    return {item["key"]: item["value"] for item in run["data"].get(kind, [])}


@contextlib.contextmanager
def start(directory: Path) -> Iterator[MlflowServer]:
    """Starts a server that keeps its data in a directory, and ends it."""
    server = MlflowServer(directory, f"http://127.0.0.1:{free_ports(1)[0]}")
    server.start()
    try:
        yield server
    finally:
        server.stop()
