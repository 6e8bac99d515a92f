"""Network of a running local job: TensorFlow's servers, seen from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.datasets import write_dataset
from tests.helpers.jobs import eventually, marked
from tests.helpers.network import ORDINARY, needs_namespaces, open_from_outside

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]

_LISTENING = "0A"
_MAIN = "from shardline.pipelines.cli.main import main; main()"


def listening_ports(processes: list[psutil.Process]) -> set[int]:
    """Returns the ports at which these processes listen, each seen in its own network."""
    found = set()
    for process in processes:
        own = {os.readlink(file) for file in Path(f"/proc/{process.pid}/fd").iterdir() if file.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *others = line.split()
                if state == _LISTENING and f"socket:[{others[5]}]" in own:
                    found.add(int(local.rpartition(":")[2], 16))
    return found


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def serving(
    request: pytest.FixtureRequest, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[set[int]]:
    """Ports of a job that trains, as `shardline train` has started it with the test's options."""
    starter, *options = request.param
    mark = str(tmp_path)
    monkeypatch.setenv("TEST_MARK", mark)
    write_dataset(tmp_path / "data")
    python = ORDINARY if starter == "user" else (sys.executable, "-c")
    command = [*python, _MAIN, "train", str(tmp_path / "data"), str(tmp_path / "out"), "--epochs", "100000"]
    with (
        output.open("w") as printed,
        subprocess.Popen([*command, *options], stdout=printed, stderr=subprocess.STDOUT) as process,
    ):
        try:
            eventually(lambda: process.poll() is not None or "epoch 2/100000" in output.read_text(), 120)
            assert process.poll() is None, output.read_text()
            yield listening_ports(marked(mark))
        finally:
            process.terminate()
    eventually(lambda: not marked(mark), 5)


ISOLATED = [
    pytest.param(("self", "--replicas", "2"), marks=pytest.mark.matrix, id="self --replicas 2"),
    pytest.param(("user", "--replicas", "2", "--ps", "1"), id="user --replicas 2 --ps 1"),
]


@needs_namespaces
@pytest.mark.parametrize("serving", ISOLATED, indirect=True)
def test_no_server_of_a_job_is_reached_from_outside(serving: set[int], output: Path) -> None:
    assert len(serving) >= 2
    assert open_from_outside(serving) == []
    assert "warning" not in output.read_text()


@pytest.mark.parametrize("serving", [("self", "--replicas", "2", "--network", "host")], indirect=True)
def test_in_the_network_of_the_machine_they_are_reachable_and_reported(
    serving: set[int], output: Path
) -> None:
    by_port = {int(place.rpartition(":")[2]) for place in open_from_outside(serving)}
    assert by_port == serving
    (said,) = [line for line in output.read_text().splitlines() if "warning" in line]
    assert all(str(port) in said for port in by_port)
