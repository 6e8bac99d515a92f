"""`--engine slurm`: what is submitted, refused and recorded, with a Slurm that does nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardline.components.preprocess import run as preprocessing
from shardline.components.runs import slurm_job
from shardline.components.runs.record import RunRecord
from shardline.components.runs.slurm_job import SlurmJob
from shardline.pipelines.cli import slurm as submission
from shardline.pipelines.cli.main import main
from shardline.pipelines.engines.slurm import engine
from shardline.pipelines.engines.slurm.script import BatchJob
from shardline.pipelines.engines.slurm.settings import SlurmSettings
from shardline.trainer.base.errors import RunError
from tests.helpers.replicas import ROOT


class Slurm:
    """Records what is submitted, followed and cancelled."""

    def __init__(self) -> None:
        self.jobs: list[BatchJob] = []
        self.settings = SlurmSettings()
        self.followed: list[str] = []
        self.cancelled: list[str] = []
        self.outcome: BaseException | None = None
        self.runs = False

    def submit(self, job: BatchJob, settings: SlurmSettings) -> str:
        job.directory.mkdir(parents=True)
        (job.directory / "job.sh").touch()
        self.jobs.append(job)
        self.settings = settings
        return str(100 + len(self.jobs))

    def run(self) -> None:
        """Does what the tasks of preprocessing would do."""
        for job in self.jobs:
            python, _, module, *arguments = job.command
            assert (python, module) == (sys.executable, preprocessing.__name__)
            for element in range(job.elements or 1):
                values = {"$SLURM_ARRAY_TASK_ID": str(element)}
                preprocessing.main([values.get(argument, argument) for argument in arguments])

    def follow(self, job_id: str, directory: Path, **options: Any) -> None:
        self.followed.append(job_id)
        if self.runs and job_id == str(100 + len(self.jobs)):
            self.run()
        if self.outcome:
            raise self.outcome


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Slurm:
    found = Slurm()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=":")
    monkeypatch.setattr(engine, "submit", found.submit)
    monkeypatch.setattr(engine, "follow", found.follow)
    monkeypatch.setattr(submission, "cancel_job", found.cancelled.append)
    monkeypatch.setattr(slurm_job, "read_job", lambda job, place: SlurmJob(id=job, state="failed", word="X"))
    return found


def shardline(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def launch(*options: str) -> Result:
    Path("program.py").write_text("print('hello')\n")
    return shardline("launch", "2", "--engine", "slurm", *options, "--", "program.py", "--epochs", "3")


def test_a_job_is_a_run_whose_record_has_its_id(slurm: Slurm) -> None:
    done = launch("--restarts", "4", "--timeout", "90")

    assert done.exit_code == 0, done.output
    directory = Path("runs/latest").resolve()
    record = json.loads((directory / "run.json").read_text())
    assert (record["engine"], record["job"], record["pipeline"]) == ("slurm", "101", "launch")
    (job,) = slurm.jobs
    assert job.tasks == {"chief": 1, "worker": 1}
    assert job.command[-3:] == ("program.py", "--epochs", "3")
    assert (slurm.settings.restarts, slurm.settings.time) == (4, "2")  # minutes
    assert slurm.followed == ["101"]


@pytest.mark.parametrize(("seconds", "minutes"), [("60", "1"), ("61", "2"), ("inf", "0")])
def test_a_timeout_is_the_time_limit_in_minutes(slurm: Slurm, seconds: str, minutes: str) -> None:
    assert launch("--timeout", seconds).exit_code == 0
    assert slurm.settings.time == minutes


def test_detached_it_returns_once_the_job_is_submitted(slurm: Slurm) -> None:
    done = launch("--detach")

    assert done.exit_code == 0, done.output
    assert len(slurm.jobs) == 1
    assert not slurm.followed
    assert "--wait" in done.output


def test_ctrl_c_ends_the_watching_and_not_the_job(slurm: Slurm) -> None:
    slurm.outcome = KeyboardInterrupt()
    done = launch()

    assert done.exit_code == 75
    assert "the job continues" in done.output
    assert not slurm.cancelled
    assert Path("runs/latest/run.json").is_file()


def test_the_end_of_a_failed_job_is_recorded(slurm: Slurm) -> None:
    slurm.outcome = RunError("Slurm job 101 failed")
    done = preprocess("out", "--engine", "slurm")

    assert done.exit_code == 1
    assert json.loads(Path("runs/latest/run.json").read_text())["state"] == "failed"


def test_a_job_that_cannot_be_recorded_is_cancelled(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(record: RunRecord, directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunRecord, "write", full)
    assert launch().exit_code == 1
    assert slurm.cancelled == ["101"]
    assert not any(Path("runs").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logs", "logs"], "--logs is for processes of this machine"),
        (["--network", "host"], "--network is for processes of this machine"),
        (["--settings", "settings.toml"], "no settings file"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_submitted(
    slurm: Slurm, options: list[str], message: str
) -> None:
    done = launch(*options)

    assert (done.exit_code, slurm.jobs) == (2, [])
    assert message in done.output
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[engine.slrum]", "unknown key engine.slrum; did you mean engine.slurm?"),
        ("engine = 3", "engine must be a table"),
        ("[engine.slurm]\nparttition = 'a'", "parttition"),
        ("[engine.slurm]\nrestarts = 'a'", "engine.slurm.restarts"),
    ],
)
def test_wrong_settings_are_refused_with_their_name(slurm: Slurm, table: str, message: str) -> None:
    Path("settings.toml").write_text(table)
    done = launch()

    assert (done.exit_code, slurm.jobs) == (2, [])
    assert message in done.output


def test_without_slurm_it_says_so(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    done = launch()

    assert done.exit_code == 2
    assert "no sbatch in PATH" in done.output


@pytest.mark.parametrize("option", ["--detach", "--dry-run", "--settings=settings.toml"])
def test_its_options_need_the_engine(option: str) -> None:
    done = shardline("launch", "2", option, "program.py")

    assert done.exit_code == 2
    assert f"{option.partition('=')[0]} needs --engine slurm" in done.output


def preprocess(out: str, *options: str) -> Result:
    return shardline("preprocess", "digits", out, "--shards", "4", *options)


def test_an_array_and_a_job_after_it_give_the_bytes_of_one_process(slurm: Slurm) -> None:
    slurm.runs = True
    assert preprocess("here").exit_code == 0
    done = preprocess("there", "--engine", "slurm", "--tasks", "3", "--json")

    assert done.exit_code == 0, done.output
    parts, finish = slurm.jobs
    assert (parts.elements, finish.elements, finish.after) == (3, 0, "101")
    assert slurm.followed == ["101", "102"]
    assert json.loads(done.stdout)["splits"]
    here, there = (
        {path.name: path.read_bytes() for path in Path(name).iterdir() if path.is_file()}
        for name in ("here", "there")
    )
    assert here.keys() == there.keys()
    assert all(here[name] == there[name] for name in here if name.endswith(".tfrecord"))


def test_a_thousand_parts_are_one_array(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts: list[BatchJob] = []
    monkeypatch.setattr(submission, "batch_script", lambda job, settings: scripts.append(job) or job.name)
    done = preprocess("out", "--engine", "slurm", "--tasks", "5000", "--dry-run")

    assert done.exit_code == 0, done.output
    assert [job.elements for job in scripts] == [1000, 0]
    assert not slurm.jobs
    assert not Path("out").exists()


def test_a_part_that_is_no_number_of_the_plan_is_refused(
    slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        preprocessing.main(["write", "out", "8", "8"])
    assert "part must be 0..7, not 8" in capsys.readouterr().err
    assert preprocess("out", "--tasks", "3").exit_code == 2


def test_the_scripts_of_a_pipeline_are_shown_and_nothing_is_written(tmp_path: Path) -> None:
    options = ["--engine", "slurm", "--dry-run", "--detach", "--runs-dir", str(tmp_path / "runs")]
    done = CliRunner().invoke(main, ["run", str(ROOT / "compiled" / "tune.yaml"), *options])

    assert done.exit_code == 0, done.output
    controlling, training = done.stdout.split("#!/bin/bash")[1:]
    assert "--ntasks=1" in controlling
    assert "--no-requeue" in controlling
    assert f"-- env SHARDLINE_RUN={tmp_path}/runs/" in controlling
    assert "--pools chief=1,worker=1" in training
    assert "--job=" in training  # commands of components are whole programs
    assert "hyperparameter-tuning-job: its worker pools are known in the run only" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_pipeline_for_slurm_has_no_injected_failures(tmp_path: Path) -> None:
    options = ["--engine", "slurm", "--dry-run", "--inject", "kill:chief@t=5s"]
    done = CliRunner().invoke(main, ["run", str(ROOT / "compiled" / "retrain.yaml"), *options])

    assert done.exit_code == 2
    assert "--inject is for processes of this machine" in done.stderr
