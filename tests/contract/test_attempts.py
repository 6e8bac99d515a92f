"""Attempts of one task, each launched by the real launcher as the platform retries it, with new outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardline.trainer.base import files
from tests.contract.fake.replicas import run_replicas
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import LOCATION, FakeVertex, fake_vertex
from tests.helpers import programs
from tests.helpers.datasets import write_dataset

pytestmark = [pytest.mark.timeout(180), pytest.mark.e2e]

LAUNCHER = "google_cloud_pipeline_components.container.v1.custom_job.launcher"
MODEL = """
import os, pathlib, keras

def build(dataset):
    model = keras.Sequential([
        keras.layers.Input(dataset.input_shape),
        keras.layers.Flatten(),
        keras.layers.Dense(dataset.num_classes),
    ])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

class Lost(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and not pathlib.Path("lost").exists():
            pathlib.Path("lost").touch()
            os._exit(1)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory with a model and a dataset, and a bucket."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(files.GCS_ROOT_VARIABLE, str(tmp_path / "buckets"))
    (tmp_path / "net_of_a_team.py").write_text(MODEL)
    write_dataset(tmp_path / "data", records={"train": 64, "validation": 8, "test": 8}, shards=2)
    return tmp_path


def _launch(
    vertex: FakeVertex, project: Path, number: int, options: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    """Launches the job once more, and returns how the launcher has ended; its job's log is job-N/log."""
    arguments = ["--dataset=data", "--model=net_of_a_team:build", f"--model-dir=gs://b/task-{number}/model"]
    pool = {
        "machine_spec": {"machine_type": "n1-standard-4"},
        "replica_count": 1,
        "container_spec": {
            "image_uri": "image:1",
            "command": ["python3", "-m", "shardline.trainer.task"],
            "args": [*arguments, *options],
        },
    }
    spec = {
        "worker_pool_specs": [pool],
        "scheduling": {"strategy": "STANDARD", "disable_retries": True, "max_wait_duration": ""},
        "base_output_directory": {"output_uri_prefix": "gs://b/jobs/run-1"},
    }
    resources = project / f"task-{number}/gcp_resources"
    resources.parent.mkdir()
    payload = json.dumps({"display_name": "train", "job_spec": spec})
    where = ("--project", PROJECT, "--location", LOCATION, "--gcp_resources", str(resources))
    return programs.run(
        [sys.executable, "-m", LAUNCHER, "--type", "CustomJob", "--payload", payload, *where],
        env=vertex.environment,
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_a_job_that_was_lost_goes_on_from_its_checkpoint(project: Path) -> None:
    options = ("--epochs=3", "--callback=net_of_a_team:Lost")
    with fake_vertex(project, lambda job: run_replicas(job, project / f"job-{job.name[-1]}")) as vertex:
        codes = [_launch(vertex, project, number, options).returncode for number in (1, 2)]

    said = (project / "job-2/log").read_text()
    assert [bool(code) for code in codes] == [True, False], said
    # The last checkpoint may not have been whole when the process was gone.
    assert re.search("resuming after step [48], from ", said)
    assert json.loads((project / "buckets/b/task-2/model/metrics.json").read_text())["epochs"] == 3
