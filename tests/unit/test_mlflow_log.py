"""Log of a run in MLflow: its settings, and a server that takes nothing."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardline.components.runs import mlflow_log
from shardline.components.runs.mlflow_log import TOKEN_VARIABLE, TrackingSettings, log_run
from shardline.components.runs.run import Run
from shardline.pipelines import settings as environments
from shardline.pipelines.compile import compile_pipeline
from shardline.trainer.base.errors import PlatformError, SettingsError
from tests.helpers.replicas import ROOT, free_ports
from tests.helpers.serving import QuietHandler, serve

SECRET = "projects/my-project/secrets/mlflow/versions/latest"
TRACKING = TrackingSettings(
    mlflow_uri="https://mlflow.corp:8443/ml", experiment="digits", token_secret=SECRET
)
RUN = Run(name="a", pipeline="retrain", state="succeeded", parameters={"epochs": 3})


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*mlflow_log._OPTIONS, mlflow_log.URI_VARIABLE, TOKEN_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


class Refusing(QuietHandler):
    """Server that answers no request, as one that knows no password of this client."""

    def do_POST(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b"You are not authenticated")

    do_GET = do_POST


def logged(uri: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Logs a run, and returns the only line."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    began = time.monotonic()
    log_run("retrain-a", RUN)
    assert time.monotonic() - began < 15
    output, errors = capfd.readouterr()
    assert (output.count("\n"), errors) == (1, "")
    assert output.startswith("tracking: warning: cannot log to MLflow at ")
    assert ":secret@" not in output
    return output


def test_without_the_variable_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    log_run("retrain-a", RUN)


def test_a_server_that_is_away_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_ports(1)[0]
    line = logged(f"http://user:secret@127.0.0.1:{port}", monkeypatch, capfd)
    assert f"http://127.0.0.1:{port}: " in line
    assert "Connection refused" in line


def test_a_server_that_does_not_answer_costs_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "timed out" in logged(f"http://127.0.0.1:{server.getsockname()[1]}", monkeypatch, capfd)


class Endless(QuietHandler):
    """Server whose answer drips, each byte long before a client gives up waiting for one."""

    over = threading.Event()

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        while not self.over.wait(0.05):
            self.wfile.write(b" ")

    do_GET = do_POST


class LaterEndless(Endless):
    """Server that answers the first request."""

    def do_POST(self) -> None:
        if self.path.endswith("/search"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")
        else:
            super().do_POST()


@pytest.mark.parametrize("server", [Endless, LaterEndless])
def test_an_answer_that_drips_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], server: type[Endless]
) -> None:
    monkeypatch.setenv(mlflow_log._TIMEOUT, "1")
    Endless.over.clear()
    with serve(server) as port:
        assert "no whole answer within 1 s" in logged(f"http://127.0.0.1:{port}", monkeypatch, capfd)
        Endless.over.set()


class Repeating(QuietHandler):
    """Server whose error has the client's token, also where the line is cut, and acts on a terminal."""

    before_cut = "x" * 250

    def do_POST(self) -> None:
        self.send_response(400)
        self.end_headers()
        message = (
            f"\x1b[31mno {self.headers['Authorization']}{self.before_cut} {self.headers['Authorization']}"
        )
        self.wfile.write(json.dumps({"error_code": "BAD_REQUEST", "message": message}).encode())

    do_GET = do_POST


def test_what_a_server_repeats_shows_no_token_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "t0ps3cret")
    with serve(Repeating) as port:
        line = logged(f"http://127.0.0.1:{port}", monkeypatch, capfd)
    assert r"\x1b[31mno Bearer ***" in line
    assert "t0p" not in line


def test_a_wrong_password_is_reported_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve(Refusing) as port:
        assert "401" in logged(f"http://user:secret@127.0.0.1:{port}", monkeypatch, capfd)


def test_a_missing_client_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert "pip install 'shardline[mlflow]'" in logged("http://127.0.0.1:9", monkeypatch, capfd)


def test_the_token_is_read_from_its_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> str:
        raise PlatformError(f"cannot read {name}: permission denied")

    monkeypatch.setattr(mlflow_log, "read_secret", refuse)
    monkeypatch.setenv(TOKEN_VARIABLE, "projects/p/secrets/s/versions/1")
    line = logged("http://127.0.0.1:9", monkeypatch, capfd)
    assert "cannot read projects/p/secrets/s/versions/1: permission denied" in line


def test_the_task_that_ends_a_run_has_the_server_and_no_other() -> None:
    local = environments.load_settings(ROOT / "settings" / "local.toml")
    spec = yaml.safe_load(compile_pipeline(replace(local, tracking=TRACKING), None))
    found = {
        name: [item["name"] for item in executor["container"].get("env", ())]
        for name, executor in spec["deploymentSpec"]["executors"].items()
        if "MLFLOW" in str(executor)
    }
    assert found == {"exec-exit-handler": ["MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", TOKEN_VARIABLE]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mlflow_uri": "https://me:hunter2@mlflow.corp"}, "a token's secret is token_secret"),
        ({"mlflow_uri": "mlflow.corp:5000"}, "mlflow_uri must be http"),
        ({"experiment": "digits"}, "mlflow_uri must be http"),
        ({"mlflow_uri": "https://mlflow.corp", "token_secret": "hunter2"}, "token_secret must be projects/"),
    ],
)
def test_a_secret_or_a_wrong_address_is_refused_and_not_repeated(given: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        TrackingSettings(**given)
    assert "hunter2" not in str(refused.value)


def test_the_table_of_a_file_is_read_and_excludes_emails(tmp_path: Path) -> None:
    local = (ROOT / "settings" / "local.toml").read_text()
    lines = "[tracking]", *(f'{name} = "{value}"' for name, value in vars(TRACKING).items()), ""
    path = tmp_path / "own.toml"
    path.write_text("\n".join([local, *lines]))
    assert environments.load_settings(path).tracking == TRACKING
    path.write_text("\n".join([local, *lines, '[notify]\nemails = ["a@b.c"]\n']))
    with pytest.raises(SettingsError, match=r"notify\.emails takes the place of .*, \[tracking\]"):
        environments.load_settings(path)
