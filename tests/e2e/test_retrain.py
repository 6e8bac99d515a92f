"""The committed pipeline, run whole on this machine by the command a user gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardline.components.preprocess.run import preprocess
from shardline.components.preprocess.settings import PreprocessSettings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
SHARDLINE = str(Path(sys.executable).with_name("shardline"))


def run(runs, *options, pipeline=("compiled/retrain.yaml",), **params):
    given = [part for name, value in params.items() for part in ("--param", f"{name}={value}")]
    return subprocess.run(
        [SHARDLINE, "run", *pipeline, "--runs-dir", str(runs), *options, *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def record(runs):
    return json.loads((runs / "latest" / "run.json").read_text())


def test_the_main_job_ends_with_a_champion(tmp_path):
    done = run(tmp_path / "runs")

    assert done.returncode == 0, done.stdout + done.stderr
    facts = record(tmp_path / "runs")["facts"]
    assert float(facts["quality"].removeprefix("accuracy ")) >= 0.95
    assert facts["blessed"] is True
    assert facts["replicas"] == 2
    assert facts["strategy"] == "multi_worker_mirrored"
    for name in ("model", "report", "exported model", "TensorBoard logs", "champion"):
        assert Path(facts[name]).exists(), name
    # What one opens lies at the top of the run directory, and so does what it leads to.
    for name in ("report.html", "model_card.html", "card.html", "saved_model", "model.keras"):
        assert (tmp_path / "runs" / "latest" / name).exists(), name
        assert f"Z/{name}\n" in done.stdout
    assert 'href="model_card.html"' in (tmp_path / "runs" / "latest" / "report.html").read_text()
    assert "/outputs/" not in done.stdout.rpartition("pipeline  ")[2]
    champion = json.loads((tmp_path / "runs" / "champions" / "digits" / "champion.json").read_text())
    assert champion["fingerprint"] == facts["dataset"]
    # The terminal tells the story; KFP's own words are in the log alone.
    assert "chief + 1 worker" in done.stdout
    assert "epoch 20/20" in done.stdout
    assert "KFP Executor" not in done.stdout
    assert "KFP Executor" in (tmp_path / "runs" / "latest" / "run.log").read_text()
    assert done.stderr == ""


def test_the_example_plugins_and_a_model_that_is_not_good_enough(tmp_path):
    """A user's own source and model, preprocessed by three tasks; nothing weak is published."""
    done = run(
        tmp_path / "runs",
        "--require-blessing",
        source="shardline.pipelines.project.template.images.my_package.source:Source",
        model="shardline.pipelines.project.template.images.my_package.model:build_model",
        hparams='{"filters": 8}',
        preprocess_tasks=3,
        epochs=1,
        min_accuracy=1.0,
    )

    assert done.returncode == 1, done.stdout + done.stderr
    assert "a blessing is required; not blessed" in done.stderr
    settings = record(tmp_path / "runs")
    assert settings["facts"]["blessed"] is False
    assert settings["parameters"]["hparams"] == {"filters": 8}
    # Three tasks wrote the dataset, with the bytes that one process writes.
    shapes = PreprocessSettings(
        source="shardline.pipelines.project.template.images.my_package.source:Source", readers=2
    )
    assert settings["facts"]["dataset"] == preprocess(shapes, tmp_path / "dataset").fingerprint
    assert not list((tmp_path / "runs" / "champions").rglob("champion.json"))


def test_a_run_whose_training_was_killed_for_good_is_continued(tmp_path):
    """The next run trains on from the checkpoints of the first; tests of the trainer compare the weights."""
    kills = [word for step in (50, 100) for word in ("--inject", f"kill:chief@step={step}")]
    killed = run(tmp_path / "runs", *kills, epochs=4)
    assert killed.returncode == 1, killed.stdout + killed.stderr
    assert "\nto continue    shardline run --resume 20" in killed.stdout

    old = (tmp_path / "runs" / "latest").resolve()
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*")}
    done = run(tmp_path / "runs", "--resume", "latest", pipeline=())

    assert done.returncode == 0, done.stdout + done.stderr
    assert "run: continues 20" in done.stdout
    assert "train: resuming after step " in done.stdout
    assert "epoch 1/4" not in done.stdout
    assert {path: path.stat().st_mtime_ns for path in old.rglob("*")} == before


def test_a_mistake_that_only_a_replica_can_find_is_one_line(tmp_path):
    done = run(tmp_path / "runs", model="tests.helpers.models:uncompiled")

    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert "returned a model that is not compiled; call model.compile(...)" in line
    assert "Traceback" not in done.stdout + done.stderr
    assert "to continue" not in done.stdout  # it would end in the same way
    assert record(tmp_path / "runs")["state"] == "failed"


@pytest.mark.matrix
@pytest.mark.skipif("SHARDLINE_TEST_DATA" not in os.environ, reason="SHARDLINE_TEST_DATA is not set")
def test_photos_in_folders_train_an_application(tmp_path):
    photos = Path(os.environ["SHARDLINE_TEST_DATA"]) / "photos"
    done = run(
        tmp_path / "runs", source=f"images:{photos}", model="keras:MobileNetV2", image_size=32, epochs=1
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert record(tmp_path / "runs")["facts"]["strategy"] == "multi_worker_mirrored"
