"""Tracking without a server that takes what is logged: it costs little time, one line, and no run."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from shardline.components.runs.record import RUN_VARIABLE
from shardline.trainer.base import tracking
from shardline.trainer.base.tracking import open_run
from tests.helpers.replicas import ROOT, free_ports


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_away", {})
    for name in tracking._DEFAULTS:  # set where they are not, and then taken back
        monkeypatch.setenv(name, tracking._DEFAULTS[name])


class Refusing(BaseHTTPRequestHandler):
    """Server that answers no request, as one that knows no password of this client."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b"You are not authenticated")

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        Refusing.asked.clear()
        yield f"http://user:secret@127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def log(uri: str, *, seconds: float = 30.0) -> str:
    """Logs three things, and returns the id of the run."""
    run = open_run("name", environ={"MLFLOW_TRACKING_URI": uri})
    if run is None:
        return "not opened"
    run.parameters({"epochs": 3})
    run.metrics({"loss": 0.5}, 1)
    run.close("FINISHED", seconds=seconds)
    return run.id if seconds > 1 else ""


def test_without_the_variable_nothing_is_imported_or_started() -> None:
    program = """
import sys, threading
from shardline.trainer.base.tracking import open_run
assert open_run("name", environ={}) is None
assert threading.active_count() == 1
assert not {"mlflow", "requests"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_training_without_the_variable_has_no_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    from tests.helpers.fitting import classes, classifier, fitted

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    names: set[str] = set()
    seen = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: names.update(each.name for each in threading.enumerate())
    )
    fitted(classifier, classes(), epochs=1, callbacks=[seen])
    assert "tracking" not in names
    assert "MainThread" in names


def test_a_server_that_is_away_is_tried_again_and_reported_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "_PATIENCE_S", 0.1)
    port = free_ports(1)[0]
    began = time.monotonic()
    assert log(f"http://user:secret@127.0.0.1:{port}") == ""
    assert log(f"http://user:secret@127.0.0.1:{port}") == "not opened"
    assert time.monotonic() - began < 10
    output, errors = capfd.readouterr()
    assert errors == ""
    (line,) = output.splitlines()
    assert line.startswith(f"tracking: warning: cannot log to MLflow at http://127.0.0.1:{port}: ")
    assert "Connection refused" in line
    assert "3 requests were not made" in line
    assert "secret" not in line


def test_other_processes_of_a_run_here_do_not_try_a_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    uri = f"http://127.0.0.1:{free_ports(1)[0]}"
    log(uri, seconds=0.8)
    assert "Connection refused" in capfd.readouterr().out
    monkeypatch.setattr(tracking, "_away", {})  # as in another process
    assert log(uri) == "not opened"
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path / "another"))
    assert log(uri, seconds=0.1) != "not opened"


def test_a_server_that_is_back_in_time_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_ports(1)[0]
    run = open_run("name", environ={"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"})
    assert run
    with ThreadingHTTPServer(("127.0.0.1", port), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert run.id == ""  # waited for
        server.shutdown()
    assert "401" in capfd.readouterr().out


def test_a_server_that_does_not_answer_does_not_hold_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        began = time.monotonic()
        log(f"http://127.0.0.1:{server.getsockname()[1]}", seconds=0.2)
        assert time.monotonic() - began < 10
    assert "not done within 0.2 s; 3 requests were not made" in capfd.readouterr().out


def test_a_wrong_password_is_reported_at_once_and_not_shown(
    refusing: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert log(refusing) == ""
    output, errors = capfd.readouterr()
    assert (output.count("\n"), errors) == (1, "")
    assert "401" in output
    assert "secret" not in output
    assert len(Refusing.asked) == 1


@pytest.mark.parametrize("uri", ["foo://server", "http://[bad"])
def test_a_wrong_address_is_reported(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert log(uri) == ""
    output, errors = capfd.readouterr()
    assert (output.count("\n"), errors) == (1, "")
    assert f"cannot log to MLflow at {uri}: " in output


def test_a_missing_client_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert log("http://127.0.0.1:9") == log("http://127.0.0.1:9") == "not opened"
    assert capfd.readouterr().out.count("pip install 'shardline[mlflow]'") == 1
