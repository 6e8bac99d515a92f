"""Upload and deployment in the compiled retraining pipeline."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from shardline.components.register import Deploy, ModelUpload
from shardline.pipelines.check import Pipeline, check_pipeline
from shardline.pipelines.cli.main import main
from shardline.pipelines.compile import compile_pipeline
from shardline.pipelines.settings import Settings
from tests.helpers.compiled import JOB, blessed_tasks

LOCATION = "{{$.pipeline_google_cloud_location}}"
PARENT = "projects/acme-vision/locations/europe-west4/models/7"
ENDPOINT = "projects/acme-vision/locations/europe-west4/endpoints/9"
PINNED = f"europe-west4-docker.pkg.dev/acme-vision/shardline/shardline@sha256:{64 * 'a'}"
SETTINGS = Settings(
    image=PINNED, train=JOB, model_upload=ModelUpload(display_name="digits", serving_image_uri="s:1")
)


def compiled(**changes: Any) -> str:
    return compile_pipeline(dataclasses.replace(SETTINGS, **changes))


def given(task: dict[str, Any]) -> dict[str, Any]:
    """Returns what a task is given that is fixed."""
    parameters = task["inputs"]["parameters"]
    return {
        name: item["runtimeValue"]["constant"] for name, item in parameters.items() if "runtimeValue" in item
    }


def test_a_blessed_model_is_the_champion_only_once_it_is_uploaded_and_deployed() -> None:
    upload = ModelUpload(display_name="digits", serving_image_uri="s:1", parent_model=PARENT)
    deploy = Deploy(machine_type="n1-standard-2", endpoint=ENDPOINT)
    text = compiled(model_upload=upload, deploy=deploy)
    tasks = blessed_tasks(text)

    assert {name: sorted(task.get("dependentTasks", [])) for name, task in tasks.items()} == {
        "importer": [],
        "serving-model": [],
        "model-upload": ["importer", "serving-model"],
        "importer-2": [],
        "model-deploy": ["importer-2", "model-upload"],
        "register": ["model-deploy"],
    }
    assert given(tasks["model-deploy"])["traffic_split"] == {"0": "100"}
    assert not tasks["model-deploy"].get("cachingOptions")
    checked = {"pipeline": "retrain", "parent_model": PARENT, "endpoint": ENDPOINT}
    assert checked.items() <= given(tasks["serving-model"]).items()
    assert check_pipeline(Pipeline.parse(text, Path("p.yaml"))) == []


def test_without_an_endpoint_each_run_makes_one_where_it_runs() -> None:
    deploy = Deploy(machine_type="n1-standard-2", accelerator_type="NVIDIA_L4", accelerator_count=1)
    tasks = blessed_tasks(compiled(deploy=deploy))

    assert tasks["model-deploy"]["dependentTasks"] == ["endpoint-create", "model-upload"]
    made = given(tasks["endpoint-create"])
    assert (made["location"], made["display_name"]) == (LOCATION, "digits")
    assert given(tasks["model-deploy"])["dedicated_resources_accelerator_type"] == "NVIDIA_L4"


def test_the_upload_goes_where_the_pipeline_runs_and_is_tried_again() -> None:
    task = blessed_tasks(compiled())["model-upload"]

    assert given(task) == {
        "location": LOCATION,
        "display_name": "digits",
        "labels": {"shardline-pipeline": "retrain"},
        "encryption_spec_key_name": "{{$.pipeline_encryption_key_name}}",
    }
    assert task["retryPolicy"]["maxRetryCount"] == 2
    assert not task.get("cachingOptions")


def test_nothing_of_it_is_there_unless_it_is_asked_for() -> None:
    text = compiled(model_upload=None)

    assert set(blessed_tasks(text)) == {"register"}
    for word in ("model-deploy", "traffic", "serving"):
        assert word not in text


@pytest.mark.parametrize(
    "image", [PINNED, "europe-west4-docker.pkg.dev/acme-vision/shardline/shardline:0.1.0"]
)
def test_an_image_keeps_its_digest_everywhere_and_a_tag_is_warned_of(image: str) -> None:
    text = compiled(image=image)
    executors = yaml.safe_load(text)["deploymentSpec"]["executors"].values()
    own = {
        item["container"]["image"] for item in executors if "container" in item and "shardline" in str(item)
    }
    ours = {name for name in own if "ml-pipeline" not in name}

    assert ours == {image}
    warned = {finding.code for finding in check_pipeline(Pipeline.parse(text, Path("p.yaml")))}
    assert warned == (set() if "@" in image else {"SL403"})


def test_a_digest_takes_the_place_of_the_settings_tag(tmp_path: Path) -> None:
    settings = tmp_path / "s.toml"
    settings.write_text('image = "i:1"\n[train]\nreplica_count = 1\nmachine_type = "n1-standard-8"\n')
    output = tmp_path / "p.yaml"
    given = ["compile", "--settings", str(settings), "--output", str(output), "--image", PINNED]
    done = CliRunner().invoke(main, given)

    assert done.exit_code == 0, done.output
    assert f"image: {PINNED}" in output.read_text()
    assert "i:1" not in output.read_text()
