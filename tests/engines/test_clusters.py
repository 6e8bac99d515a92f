"""Clusters of real launchers: the tasks of srun and mpirun train together without TF_CONFIG."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.replicas import ROOT
from tests.helpers.slurm import Slurm

pytestmark = pytest.mark.timeout(180)

PROGRAM = """
import json, os, sys
from pathlib import Path
import shardline
from tests.helpers.fit_programs import arrays, steady

rank = os.environ.get("SLURM_PROCID") or os.environ.get("OMPI_COMM_WORLD_RANK", "alone")
history = shardline.fit(steady, arrays(96), batch_size=24, epochs=2, verbose=0)
Path(sys.argv[1], rank).write_text(json.dumps(history.history["loss"]))
"""
HETEROGENEOUS = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --nodelist=n2
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=2 --nodelist=n1
export CUDA_VISIBLE_DEVICES=
{}
"""


def start(out: Path, *command: str) -> subprocess.Popen[str]:
    out.mkdir()
    return subprocess.Popen(
        [*command, sys.executable, "-c", PROGRAM, str(out)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def losses(out: Path) -> dict[str, list[float]]:
    return {path.name: json.loads(path.read_text()) for path in out.iterdir()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("alone") / "out"
    process = start(out, "env")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return losses(out)["alone"]


def assert_one_cluster(out: Path, alone: list[float], tasks: int) -> None:
    found = losses(out)
    assert sorted(found) == [str(rank) for rank in range(tasks)]
    assert len({tuple(values) for values in found.values()}) == 1
    assert found["0"] == pytest.approx(alone, abs=1e-5)


def test_two_steps_on_the_same_nodes(slurm: Slurm, tmp_path: Path, alone: list[float]) -> None:
    """Three tasks by blocks and two one by one, at the same time."""
    commands = {3: ["srun", "--job-name=three", "-N2", "-n3"], 2: ["srun", "-N2", "-n2", "-mcyclic"]}
    steps = {tasks: start(tmp_path / str(tasks), *command) for tasks, command in commands.items()}

    for tasks, step in steps.items():
        output, _ = step.communicate()
        assert step.returncode == 0, output
        lines = [line for line in output.splitlines() if line.startswith("train: cluster: Slurm job ")]
        assert [line.partition(",")[2] for line in lines] == [f" {tasks} tasks on n1, n2"], output
        assert_one_cluster(tmp_path / str(tasks), alone, tasks)


def test_a_heterogeneous_step(slurm: Slurm, tmp_path: Path, alone: list[float]) -> None:
    """The first group is on n2, which Slurm lists after n1."""
    out, script = tmp_path / "out", tmp_path / "job.sh"
    out.mkdir()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    task = f"{sys.executable} {program} {out}"
    script.write_text(HETEROGENEOUS.format(f"srun --het-group=0 {task} : --het-group=1 {task}"))
    job = slurm.run(
        "sbatch",
        "--parsable",
        f"--output={tmp_path}/log",
        f"--chdir={ROOT}",
        f"--export=ALL,PYTHONPATH={ROOT}",
        script,
    )

    assert slurm.wait(job, seconds=120) == "COMPLETED", (tmp_path / "log").read_text()
    assert f"cluster: Slurm job {job}, 3 tasks on " in (tmp_path / "log").read_text()
    assert_one_cluster(out, alone, 3)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun not found: apt-get install openmpi-bin")
def test_ranks_of_open_mpi(tmp_path: Path, alone: list[float]) -> None:
    process = start(tmp_path / "out", "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
    output, _ = process.communicate()

    assert process.returncode == 0, output
    assert "train: cluster: Open MPI, 2 tasks on 127.0.0.1" in output
    assert_one_cluster(tmp_path / "out", alone, 2)
