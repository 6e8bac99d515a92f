"""`shardline train --engine slurm` on a real Slurm of two nodes: disturbed jobs end as undisturbed ones."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shardline.trainer.models.saving import load_model
from tests.helpers import paced, programs
from tests.helpers.datasets import write_dataset
from tests.helpers.history import read_history
from tests.helpers.jobs import eventually, marked
from tests.helpers.markdown import blocks
from tests.helpers.replicas import ROOT
from tests.helpers.slurm import Slurm

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]

#: Examples in each step, whatever the number of replicas.
BATCH = 24


def trainer_options(replicas: int) -> list[str]:
    options = {
        "--model": "tests.helpers.models:scheduled",
        "--callback": "tests.helpers.paced:slow_steps",
        "--epochs": 4,
        "--per-replica-batch-size": BATCH // replicas,
        "--checkpoint-steps": 3,
        "--steps-per-execution": 1,
    }
    return ["--deterministic", *(str(word) for pair in options.items() for word in pair)]


@dataclass
class Job:
    """A training job that was submitted."""

    slurm: Slurm
    out: Path
    id: str
    run: Path
    slow: Path

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.run.rglob("*.log")))

    def wait_for_checkpoint(self) -> None:
        """Waits until training is in the middle."""

        def is_there() -> bool:
            assert self.slurm.state(self.id) in ("PENDING", "RUNNING", "CONFIGURING"), self.log
            # Of two the first is complete for certain.
            return len(list(self.out.glob("checkpoints/ckpt-*.index"))) > 1

        eventually(is_there, seconds=120)

    def finish(self, state: str = "COMPLETED") -> None:
        self.slow.unlink(missing_ok=True)
        assert self.slurm.wait(self.id, seconds=150) == state, (
            self.log
            + str(self.slurm.job(self.id))
            + (self.slurm.directory / "log/slurmctld.log").read_text()[-3000:]
        )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("slurm")
    write_dataset(place / "data", records={"train": 96, "validation": 24, "test": 8}, shards=6)
    return place


@pytest.fixture
def submit(
    slurm: Slurm, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Job]:
    """Submits a job that trains slowly until `finish`."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TEST_MARK", str(tmp_path))
    monkeypatch.setenv(paced.VARIABLE, str(tmp_path / "slow"))

    def start(out: str = "out", *, replicas: int = 2, slow: bool = True, nodes: str = "2") -> Job:
        if slow:
            (tmp_path / "slow").touch()
        (tmp_path / "settings.toml").write_text(f'[engine.slurm]\nnodes = "{nodes}"\n')
        words = ["train", directory / "data", tmp_path / out, "--replicas", replicas, "--engine", "slurm"]
        words += ["--settings", tmp_path / "settings.toml", "--runs-dir", tmp_path / "runs", "--detach"]
        shardline(*words, "--", *trainer_options(replicas))
        run = (tmp_path / "runs" / "latest").resolve()
        record = json.loads((run / "run.json").read_text())
        return Job(slurm, tmp_path / out, record["job"], run, tmp_path / "slow")

    return start


def shardline(*words: object, code: int = 0) -> str:
    done = programs.run(
        ["shardline", *map(str, words)], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def state(out: Path) -> tuple[Any, ...]:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read_history(out)]
    return load_model(out / "model.keras").get_weights(), rows


def assert_same(out: Path, undisturbed: tuple[Any, ...]) -> None:
    weights, rows = state(out)
    assert rows == undisturbed[1]
    for one, other in zip(weights, undisturbed[0], strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(out: Path, undisturbed: tuple[Any, ...]) -> None:
    for one, other in zip(state(out)[0], undisturbed[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.fixture(scope="module")
def undisturbed(directory: Path) -> tuple[Any, ...]:
    """Two processes of this machine."""
    shardline("train", directory / "data", directory / "two", "--replicas", 2, "--", *trainer_options(2))
    return state(directory / "two")


@pytest.fixture(scope="module")
def alone(directory: Path) -> tuple[Any, ...]:
    """One process."""
    shardline("train", directory / "data", directory / "one", "--", *trainer_options(1))
    return state(directory / "one")


def kill_worker(job: Job) -> None:
    def worker(process: psutil.Process) -> bool:
        environ = process.environ()
        return (
            '"index": 0' in environ.get("TF_CONFIG", "")
            and '"worker"' in environ["TF_CONFIG"].rpartition("task")[2]
        )

    victims = [
        one for one in marked(job.out.parent.as_posix()) if "TF_CONFIG" in one.environ() and worker(one)
    ]
    assert victims
    victims[0].kill()


def requeue(job: Job) -> None:
    job.slurm.run("scontrol", "requeue", job.id)


def lose_node(job: Job) -> None:
    job.slurm.set_node("n2", "DOWN")
    eventually(lambda: job.slurm.state(job.id) == "PENDING", seconds=60)
    job.slurm.set_node("n2", "RESUME")


@pytest.mark.parametrize("disturb", [kill_worker, requeue, lose_node])
def test_a_disturbed_job_ends_with_the_weights_of_an_undisturbed_one_to_the_bit(
    submit: Callable[..., Job], undisturbed: tuple[Any, ...], disturb: Callable[[Job], None]
) -> None:
    job = submit()
    job.wait_for_checkpoint()
    disturb(job)
    job.finish()
    assert "resuming after step" in job.log
    assert "Traceback" not in job.log
    assert job.slurm.job(job.id)["Restarts"] == ("0" if disturb is kill_worker else "1")
    assert_same(job.out, undisturbed)


def test_the_script_of_the_guide_starts_a_program_that_continues_after_a_requeue(
    submit: Callable[..., Job], slurm: Slurm, directory: Path, tmp_path: Path, undisturbed: tuple[Any, ...]
) -> None:
    (text,) = [block for block in blocks(ROOT / "docs" / "slurm.md", "bash") if "program.py" in block]
    paths = ["--dataset", directory / "data", "--model-dir", tmp_path / "out"]
    program = shlex.join(
        map(str, [sys.executable, "-m", "shardline.trainer.task", *paths, *trainer_options(2)])
    )
    (tmp_path / "job.sh").write_text(text.replace("python program.py", program))
    (tmp_path / "slow").touch()
    output = tmp_path / "run" / "slurm.log"
    output.parent.mkdir()
    job_id = slurm.run("sbatch", "--parsable", f"--output={output}", tmp_path / "job.sh")
    job = Job(slurm, tmp_path / "out", job_id, output.parent, tmp_path / "slow")
    job.wait_for_checkpoint()
    slurm.run("scontrol", "requeue", job_id)
    job.finish()
    assert "worker 0 as chief + 1 worker" in job.log
    assert "resuming after step" in job.log
    assert "Traceback" not in job.log
    assert_same(job.out, undisturbed)


def test_two_jobs_on_the_same_nodes_do_not_meet_and_three_replicas_train_as_one_process(
    submit: Callable[..., Job], undisturbed: tuple[Any, ...], alone: tuple[Any, ...]
) -> None:
    jobs = [submit("first"), submit("second", replicas=3)]
    for job in jobs:
        job.wait_for_checkpoint()
    for job in jobs:
        job.finish()
    assert_same(jobs[0].out, undisturbed)
    for job in jobs:
        assert_close(job.out, alone)


def test_a_cancelled_job_leaves_no_process_and_nothing_half_written(
    submit: Callable[..., Job], undisturbed: tuple[Any, ...], slurm: Slurm
) -> None:
    job = submit()
    job.wait_for_checkpoint()
    slurm.run("scancel", job.id)
    job.finish("CANCELLED")
    eventually(lambda: not marked(job.out.parent.as_posix()), seconds=60)
    names = [path.name for path in job.out.rglob("*")]
    assert names
    assert not [name for name in names if "tmp" in name or name.startswith(".")]
    again = submit(slow=False)
    again.finish()
    assert "resuming after step" in again.log
    assert_same(again.out, undisturbed)


def test_a_job_continues_with_the_nodes_that_are_left(
    submit: Callable[..., Job], alone: tuple[Any, ...]
) -> None:
    job = submit(nodes="1-2")
    job.wait_for_checkpoint()
    job.slurm.set_node("n2", "DOWN")
    eventually(lambda: job.slurm.state(job.id) == "PENDING", seconds=60)
    job.finish()
    assert job.slurm.job(job.id)["NumNodes"] == "1"
    assert "resuming after step" in job.log
    assert "on one process" in job.log


def test_a_job_that_waits_is_explained_and_cancelled(submit: Callable[..., Job], slurm: Slurm) -> None:
    slurm.set_node("n2", "DRAIN")
    job = submit(slow=False)
    eventually(lambda: slurm.job(job.id).get("Reason") not in ("None", None))
    reason = slurm.job(job.id)["Reason"]
    assert reason.split("_")[0] in shardline("status", job.run)
    assert reason.split("_")[0] in shardline("explain", job.run)
    shardline("cancel", job.run)
    job.finish("CANCELLED")
