"""`shardline preprocess --engine slurm` on a real Slurm writes the files of one process, byte for byte."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.helpers import paced, programs
from tests.helpers.jobs import eventually
from tests.helpers.replicas import ROOT
from tests.helpers.slurm import Slurm

pytestmark = pytest.mark.timeout(240)

_OPTIONS = ("--shards", "8", "--encoding", "png", "--seed", "3")


def start(out: Path, *words: object) -> programs.Popen:
    command = ["shardline", "preprocess", "tests.helpers.paced:SlowSource", out, *_OPTIONS, *words]
    return programs.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def content(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_an_array_with_killed_elements_is_submitted_again_and_writes_the_bytes_of_one_process(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    alone = start(tmp_path / "one")
    output = alone.communicate(timeout=100)[0]
    assert alone.returncode == 0, output

    monkeypatch.setenv(paced.VARIABLE, str(tmp_path / "slow"))
    (tmp_path / "slow").touch()
    runs = tmp_path / "runs"
    how = ("--engine", "slurm", "--tasks", 8, "--runs-dir", runs)
    disturbed = start(tmp_path / "eight", *how)
    eventually(lambda: (runs / "latest/run.json").exists() or disturbed.poll() is not None, seconds=60)
    job = json.loads((runs / "latest" / "run.json").read_text())["job"].split()[0]
    eventually(lambda: slurm.run("squeue", "-hr", "-t", "R", "-j", job).count("\n") == 7, seconds=60)
    slurm.run("scancel", "--full", "--signal=KILL", f"{job}_2", f"{job}_5")
    (tmp_path / "slow").unlink()
    output = disturbed.communicate(timeout=100)[0]
    assert disturbed.returncode == 4, output
    assert "6 of 8 elements succeeded" in output
    assert not (tmp_path / "eight" / "manifest.json").exists()

    again = start(tmp_path / "eight", *how)
    output = again.communicate(timeout=100)[0]
    assert again.returncode == 0, output
    assert content(tmp_path / "eight") == content(tmp_path / "one")
