"""The Slurm that tests start: two nodes, and nothing left of it, however its owner ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.jobs import eventually, marked
from tests.helpers.replicas import ROOT
from tests.helpers.slurm import Slurm

pytestmark = pytest.mark.timeout(120)

_OWNER = """
import signal
from tests.helpers.slurm import start
with start() as slurm:
    job = slurm.run("sbatch", "--parsable", "--nodes=2", "--output=/dev/null", "--wrap=srun sleep 600")
    slurm.wait(job, "RUNNING")
    print(slurm.directory, flush=True)
    signal.pause()
"""


def test_a_job_has_both_nodes(slurm: Slurm) -> None:
    assert sorted(slurm.run("srun", "--nodes=2", "printenv", "SLURMD_NODENAME").split()) == ["n1", "n2"]


def test_nothing_is_left_of_a_slurm_whose_owner_is_killed(slurm_cluster: Slurm) -> None:
    mark = f"slurm-{os.getpid()}"
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TEST_MARK": mark},
    )
    try:
        assert owner.stdout is not None
        with owner.stdout:
            directory = owner.stdout.readline().decode().strip()
        assert os.path.isdir(directory)
        eventually(lambda: {"slurmctld", "slurmd", "sleep"} <= {process.name() for process in marked(mark)})
    finally:
        owner.kill()
        owner.wait()
    eventually(lambda: not marked(mark) and not os.path.exists(directory))
