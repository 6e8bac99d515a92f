"""The script of docs/clusters.md on a real Slurm of two nodes: a stopped job ends as an undisturbed one."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardline.trainer.models import load_model
from tests.helpers import paced, programs
from tests.helpers.datasets import write_dataset
from tests.helpers.history import read_history
from tests.helpers.jobs import eventually
from tests.helpers.markdown import blocks
from tests.helpers.replicas import ROOT
from tests.helpers.slurm import Slurm

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]

OPTIONS = {
    "--model": "tests.helpers.models:scheduled",
    "--callback": "tests.helpers.paced:slow_steps",
    "--epochs": 4,
    "--per-replica-batch-size": 12,
    "--checkpoint-steps": 3,
    "--steps-per-execution": 1,
}
TRAINER_OPTIONS = ["--deterministic", *(str(word) for pair in OPTIONS.items() for word in pair)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a model that two processes of this machine have trained."""
    place = tmp_path_factory.mktemp("slurm")
    write_dataset(place / "data", records={"train": 96, "validation": 24, "test": 8}, shards=6)
    command = ["shardline", "train", place / "data", place / "two", "--replicas", 2, "--", *TRAINER_OPTIONS]
    done = programs.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def state(out: Path) -> tuple[Any, ...]:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read_history(out)]
    return load_model(out / "model.keras").get_weights(), rows


@pytest.mark.parametrize("stop", ["scontrol requeue", "scancel --signal=TERM"])
def test_a_stopped_job_ends_with_the_weights_of_an_undisturbed_one_to_the_bit(
    slurm: Slurm, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """Slurm requeues it, or sends its tasks SIGTERM as before a time limit, and the script does."""
    slow, out, log = tmp_path / "slow", tmp_path / "out", tmp_path / "log"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(paced.VARIABLE, str(slow))
    (text,) = [block for block in blocks(ROOT / "docs" / "clusters.md", "bash") if "program.py" in block]
    paths = ["--dataset", directory / "data", "--model-dir", out]
    program = map(str, [sys.executable, "-m", "shardline.trainer.task", *paths, *TRAINER_OPTIONS])
    (tmp_path / "job.sh").write_text(
        text.replace("python -m shardline.trainer.program program.py", shlex.join(program))
    )
    slow.touch()
    job = slurm.run("sbatch", "--parsable", f"--output={log}", tmp_path / "job.sh")
    # Of two checkpoints the first is complete for certain.
    eventually(lambda: len([*out.glob("checkpoints/ckpt-*.index")]) > 1, seconds=120)
    slurm.run(*stop.split(), job)
    eventually(lambda: slurm.job(job)["Restarts"] == "1", seconds=60)
    slow.unlink()

    assert slurm.wait(job, 150) == "COMPLETED", log.read_text()
    assert f"cluster: Slurm job {job}, 2 tasks on n1, n2" in log.read_text()
    assert "resuming after step" in log.read_text()
    assert "Traceback" not in log.read_text()
    (weights, rows), (expected, undisturbed) = state(out), state(directory / "two")
    assert rows == undisturbed
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(one, other)
