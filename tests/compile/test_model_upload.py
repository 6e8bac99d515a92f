"""The upload to the Model Registry in the compiled retraining pipeline."""

import subprocess
import sys
from pathlib import Path

import pytest

from shardline.components.register.settings import ModelUpload
from shardline.pipelines.check.checks import check, parse
from shardline.pipelines.compile import compile_pipeline
from shardline.pipelines.settings import Settings
from tests.helpers.compiled import JOB, blessed_tasks

PARENT = "projects/my-project/locations/europe-west4/models/7"


def compiled(upload: ModelUpload | None, *, pools_at_run_time: bool = False) -> str:
    return compile_pipeline(
        Settings(image="i:1", train=JOB, model_upload=upload, pools_at_run_time=pools_at_run_time)
    )


@pytest.mark.parametrize("pools_at_run_time", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_a_blessed_model_is_the_champion_only_once_it_is_uploaded(pools_at_run_time):
    upload = ModelUpload(display_name="digits", serving_image_uri="s:1", parent_model=PARENT)
    text = compiled(upload, pools_at_run_time=pools_at_run_time)
    tasks = blessed_tasks(text)

    assert {name: sorted(task.get("dependentTasks", [])) for name, task in tasks.items()} == {
        "serving-model": [],
        "model-upload": ["serving-model"],
        "registry-evaluation": ["model-upload"],
        "register": ["registry-evaluation"],
    }
    assert check(parse(text, Path("p.yaml"))) == []


def test_the_upload_goes_where_the_pipeline_runs():
    tasks = blessed_tasks(compiled(ModelUpload(display_name="digits", serving_image_uri="s:1")))
    given = {
        name: item["runtimeValue"]["constant"]
        for name, item in tasks["model-upload"]["inputs"]["parameters"].items()
        if "runtimeValue" in item
    }

    assert given == {
        "project": "{{$.pipeline_google_cloud_project_id}}",
        "location": "{{$.pipeline_google_cloud_location}}",
        "encryption_key": "{{$.pipeline_encryption_key_name}}",
        "job_name": "{{$.pipeline_job_name}}",
        "upload": {
            "display_name": "digits",
            "serving_image_uri": "s:1",
            "parent_model": "",
            "version_aliases": [],
            "labels": {},
        },
        "labels": {"pipeline": "retrain"},
    }


def test_no_upload_unless_it_is_asked_for():
    text = compiled(None)

    assert set(blessed_tasks(text)) == {"register"}
    assert "serving" not in text


def test_compiling_an_upload_loads_neither_tensorflow_nor_the_vertex_client(tmp_path):
    table = '[model_upload]\ndisplay_name = "d"\nserving_image_uri = "s:1"\n'
    (tmp_path / "s.toml").write_text(
        'image = "i:1"\n[train]\nreplica_count = 1\nmachine_type = "n1-standard-8"\n' + table
    )
    program = (
        "import sys; from pathlib import Path; from shardline.pipelines import compile, settings\n"
        "compile.compile_pipeline(settings.load(Path(sys.argv[1])))\n"
        "heavy = {'tensorflow', 'keras', 'google.cloud.aiplatform', 'sklearn', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "s.toml")], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
