"""The committed pipeline, run whole on this machine by the command a user gives."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardline.components.preprocess.run import preprocess
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.pipelines import settings
from shardline.pipelines.compile import compile_pipeline

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
SHARDLINE = str(Path(sys.executable).with_name("shardline"))
#: The example of a user's own source and model.
PLUGINS = "shardline.pipelines.project.template.images.my_package"


@dataclass(frozen=True)
class Ran:
    """How the command came out, and the directory of the run that it was."""

    code: int
    stdout: str
    stderr: str
    directory: Path

    @property
    def record(self):
        return json.loads((self.directory / "run.json").read_text())


def run(runs, *options, pipeline=("compiled/retrain.yaml",), **params):
    given = [part for name, value in params.items() for part in ("--param", f"{name}={value}")]
    done = subprocess.run(
        [SHARDLINE, "run", *pipeline, "--runs-dir", str(runs), *options, *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return Ran(done.returncode, done.stdout, done.stderr, (runs / "latest").resolve())


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    """The pipeline with its defaults, and a history in which nothing is remembered yet."""
    directory = tmp_path_factory.mktemp("main")
    return run(directory / "runs", history_uri=directory / "it's history")


def test_the_main_job_ends_with_a_champion(main_job):
    assert main_job.code == 0, main_job.stdout + main_job.stderr
    facts = main_job.record["facts"]
    assert float(facts["quality"].removeprefix("accuracy ")) >= 0.95
    assert facts["blessed"] is True
    assert facts["replicas"] == 2
    assert facts["strategy"] == "multi_worker_mirrored"
    for name in ("model", "report", "exported model", "TensorBoard logs", "champion"):
        assert Path(facts[name]).exists(), name
    # What one opens lies at the top of the run directory, and so does what it leads to.
    for name in ("report.html", "model_card.html", "card.html", "saved_model", "model.keras"):
        assert (main_job.directory / name).exists(), name
        assert f"Z/{name}\n" in main_job.stdout
    assert 'href="model_card.html"' in (main_job.directory / "report.html").read_text()
    assert "/outputs/" not in main_job.stdout.rpartition("pipeline  ")[2]
    champion = json.loads((Path(facts["champion"]) / "version.json").read_text())
    assert champion["fingerprint"] == facts["dataset"]
    # The terminal tells the story; KFP's own words are in the log alone.
    assert "chief + 1 worker" in main_job.stdout
    assert "epoch 20/20" in main_job.stdout
    assert "KFP Executor" not in main_job.stdout
    assert "KFP Executor" in (main_job.directory / "run.log").read_text()
    assert main_job.stderr == ""


def test_the_same_again_has_nothing_to_do(main_job, tmp_path):
    """Compiled for people who want an e-mail, for which nothing trains again."""
    history = main_job.record["parameters"]["history_uri"]
    latest = json.loads((Path(history) / "latest.json").read_text())
    assert latest["blessed"] is True
    assert "changes: training: no run is recorded in" in main_job.stdout

    yaml = tmp_path / "email.yaml"
    local = settings.load_settings(ROOT / "settings" / "local.toml")
    notify = replace(local.notify, emails=("team@example.com",))
    yaml.write_text(compile_pipeline(replace(local, notify=notify)))
    runs = main_job.directory.parent
    again = run(runs, "--require-blessing", pipeline=(yaml,), history_uri=history)

    assert again.code == 0, again.stdout + again.stderr
    assert again.record["facts"]["state"] == "unchanged"
    assert again.record["facts"]["blessed"] is True
    assert "preprocess" not in again.stdout
    assert f"settings and code are those of {latest['run']}" in again.stdout


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """Two classes of small photos for a model that cannot train."""
    directory = tmp_path_factory.mktemp("mistaken")
    random = np.random.default_rng(seed=0)
    for label, name in enumerate(("dark", "it's bright")):
        (directory / "photos" / name).mkdir(parents=True)
        for number in range(30):
            pixels = random.integers(128 * label, 128 * label + 128, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(directory / "photos" / name / f"{number}.png")
    yaml = directory / "in tasks.yaml"
    local = settings.load_settings(ROOT / "settings" / "local.toml")
    yaml.write_text(compile_pipeline(replace(local, preprocess=replace(local.preprocess, tasks=3))))
    return run(
        directory / "runs",
        pipeline=(yaml,),
        source=f"images:{directory / 'photos'}",
        model="tests.helpers.models:uncompiled",
        history_uri=directory / "history",
    )


def test_a_mistake_that_only_a_replica_can_find_is_one_line(mistaken):
    assert mistaken.code == 2, mistaken.stdout + mistaken.stderr
    (line,) = [line for line in mistaken.stderr.splitlines() if line.startswith("Error: ")]
    assert "returned a model that is not compiled; call model.compile(...)" in line
    assert "Traceback" not in mistaken.stdout + mistaken.stderr
    assert "to continue" not in mistaken.stdout  # it would end in the same way
    assert mistaken.record["state"] == "failed"
    # The next run has nothing to compare with.
    assert not list(Path(mistaken.record["parameters"]["history_uri"]).rglob("latest.json"))


def test_tasks_of_the_pipeline_write_the_bytes_that_one_process_writes(mistaken, tmp_path):
    given = PreprocessSettings(source=mistaken.record["parameters"]["source"], readers=2)

    assert mistaken.record["facts"]["dataset"] == preprocess(given, tmp_path / "dataset").fingerprint


@pytest.mark.matrix
def test_a_training_killed_for_good_is_continued_and_a_weak_model_is_not_published(tmp_path):
    """The next run trains on from the checkpoints of the first; tests of the trainer compare the weights."""
    kills = [word for step in (20, 35) for word in ("--inject", f"kill:chief@step={step}")]
    killed = run(
        tmp_path / "runs",
        *kills,
        source=f"{PLUGINS}.source:Source",
        model=f"{PLUGINS}.model:build_model",
        hparams='{"filters": 4}',
        epochs=3,
        rules='["accuracy >= 1"]',
    )
    assert killed.code == 1, killed.stdout + killed.stderr
    assert "\nto continue    shardline run --resume 20" in killed.stdout

    before = {path: path.stat().st_mtime_ns for path in killed.directory.rglob("*")}
    done = run(tmp_path / "runs", "--resume", "latest", "--require-blessing", pipeline=())

    assert done.code == 1, done.stdout + done.stderr
    assert "run: continues 20" in done.stdout
    assert "train: resuming after step " in done.stdout
    assert "epoch 1/3" not in done.stdout
    assert {path: path.stat().st_mtime_ns for path in killed.directory.rglob("*")} == before

    assert "a blessing is required; not blessed" in done.stderr
    assert done.record["facts"]["blessed"] is False
    assert done.record["parameters"]["hparams"] == {"filters": 4}
    assert not list((tmp_path / "runs" / "champions").rglob("champion.json"))


@pytest.mark.matrix
@pytest.mark.skipif("SHARDLINE_TEST_DATA" not in os.environ, reason="SHARDLINE_TEST_DATA is not set")
def test_photos_in_folders_train_an_application(tmp_path):
    photos = Path(os.environ["SHARDLINE_TEST_DATA"]) / "photos"
    done = run(
        tmp_path / "runs", source=f"images:{photos}", model="keras:MobileNetV2", image_size=32, epochs=1
    )

    assert done.code == 0, done.stdout + done.stderr
    assert done.record["facts"]["strategy"] == "multi_worker_mirrored"
