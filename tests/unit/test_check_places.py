"""Rules about what a run of our own pipelines reads and writes, and about what is sent to the platform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardline.pipelines.check.checks import check, check_run
from shardline.pipelines.check.pipeline import Aim, Pipeline
from shardline.pipelines.image.settings import ImageSettings
from shardline.pipelines.spec import load_pipeline
from shardline.trainer.base.errors import ShardlineError
from tests.helpers.checks import codes, component, job, pipeline, pool

RETRAIN = load_pipeline(Path(__file__).parents[2] / "compiled" / "retrain.yaml")
#: The same with an image that the platform can pull.
SENT = json.loads(
    json.dumps(RETRAIN).replace("shardline:0.1.0", "europe-docker.pkg.dev/vision/r/shardline:1")
)
GIVEN = {"champion_uri": "gs://b/champions"}


def options(**given: Any) -> dict[str, Any]:
    return {"train_options": given}


ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("SL606", {"epochs": 0}, {"epochs": 1}),
    ("SL606", {"source": "imges:x"}, {"source": "own.package:x"}),
    ("SL606", {"source": "iris.csv"}, {"source": "table:gs://b/iris.csv"}),
    ("SL606", {"model": "mnist_cnnn"}, {"model": "own.package:cnn"}),
    ("SL606", {"min_accuracy": 2.0}, {"min_accuracy": 0.5}),
    ("SL607", {"source": "images:photos"}, {"source": "images:gs://b/photos/{date}"}),
    ("SL607", {"source": "table:~/iris.csv"}, {"source": "table:/gcs/b/iris.csv"}),
    ("SL607", {"source": "images:/"}, {"source": "images:/mnt/nowhere"}),
    (
        "SL607",
        {"source": "images:gs://b", "labels": "l.csv"},
        {"source": "images:gs://b", "labels": "gs://b/l"},
    ),
    ("SL607", {"schema": "s.json"}, {"schema": "gs://b/s.json"}),
    ("SL607", {"source": "tfds:mnist", "data_dir": "tfds"}, {"source": "tfds:mnist"}),
    ("SL607", options(initial_model="runs/x"), options(initial_model="gs://b/x")),
    ("SL607", {"model": "keras:VGG16", "hparams": {"weights": "w.h5"}}, {"hparams": {"weights": "imagenet"}}),
    ("SL607", {"hparams": {"weights": "w.h5"}}, {"model": "own.m:f", "hparams": {"weights": "w.h5"}}),
    ("SL608", {"source": "images:/mnt/nowhere"}, {"source": "images:/gcs/b/x"}),
    ("SL609", {"source": "images:s3://b/x"}, {"source": "images:gs://b/x"}),
    ("SL609", {"source": "table:https://b/x.csv"}, {"source": "table:/gcs/b/x.csv"}),
    ("SL609", {"source": "images:gs:/b/x"}, {"source": "images:gs://b/x"}),
    ("SL609", {"history_uri": "https://b/x"}, {"history_uri": "gs://b/x"}),
    ("SL609", options(initial_model="https://b/x"), options(initial_model="/gcs/b/x")),
    ("SL610", {"champion_uri": "runs/champions/x"}, {"champion_uri": ""}),
    ("SL610", {"history_uri": "/tmp/history"}, {"history_uri": ""}),
    ("SL610", options(checkpoint_dir="/tmp"), options(checkpoint_dir="gs://b/jobs/{{$.pipeline_job_name}}")),
    ("SL412", {"source": "images:gs://my-bucket/photos"}, {"source": "images:gs://my-bucket-2/photos"}),
    ("SL412", {"champion_uri": "/gcs/my-bucket/x"}, {"champion_uri": "gs://acme/my-project/my-bucket/x"}),
    ("SL614", {"model": "leafnet.model:build"}, {"model": "keras:MobileNet"}),
]


@pytest.mark.parametrize(("code", "broken", "repaired"), ROWS)
def test_what_a_run_is_given(code: str, broken: dict[str, Any], repaired: dict[str, Any]) -> None:
    assert code in codes(RETRAIN, parameters=GIVEN | broken)
    assert code not in codes(RETRAIN, parameters=GIVEN | repaired)
    # On this machine they are places like others, and somebody else's pipeline may mean others by them.
    assert not {"SL607", "SL610"} & codes(RETRAIN, parameters=GIVEN | broken, aim=Aim.HERE)


SENT_ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("SL411", RETRAIN, pipeline(component(image="python:3.11"))),
    (
        "SL413",
        pipeline(component(image="leafnet:0.1.0")),
        pipeline(component(image="docker.io/leafnet:0.1.0")),
    ),
    (
        "SL412",
        pipeline(component(image="europe-docker.pkg.dev/my-project/r/i:1")),
        pipeline(component(image="europe-docker.pkg.dev/vision/my-projects/i:1")),
    ),
    (
        "SL412",
        job(pool(), service_account="a@my-project.iam.gserviceaccount.com"),
        job(pool(), service_account="a@vision.iam.gserviceaccount.com"),
    ),
]


@pytest.mark.parametrize(("code", "broken", "repaired"), SENT_ROWS)
def test_what_is_sent(code: str, broken: dict[str, Any], repaired: dict[str, Any]) -> None:
    assert code in codes(broken, aim=Aim.SENT)
    assert code not in codes(repaired, aim=Aim.SENT)
    assert code not in codes(broken, aim=Aim.HERE)


def test_an_image_of_ones_own_has_a_registry_whatever_it_is_called() -> None:
    text = json.dumps(RETRAIN)
    for executor in Pipeline(RETRAIN).executors:
        text = text.replace(executor.container["image"], "leafnet:0.1.0")
    assert "SL411" in codes(json.loads(text), aim=Aim.SENT)


def test_a_run_without_a_place_for_its_champion_is_said_and_then_refused() -> None:
    code, broken, repaired = (
        "SL611",
        {},
        {"champion_uri": ""},
    )
    assert code in codes(RETRAIN, parameters=broken)
    assert code not in codes(RETRAIN, parameters=repaired)
    assert code not in codes(RETRAIN)  # nothing is known of the run yet
    with pytest.raises(ShardlineError, match="champion_uri is not set"):
        check_run(SENT, broken)
    assert check_run(SENT, repaired)[0] == repaired


def test_a_module_that_the_image_does_not_hold(tmp_path: Path) -> None:
    code, broken, repaired = (
        "SL612",
        {"source": "leafnet.source:Leaves"},
        {"source": "digits"},
    )
    image = ImageSettings(name="europe-docker.pkg.dev/vision/r/leafnet:1")
    for given, found in ((broken, True), (repaired, False)):
        findings = check(Pipeline(RETRAIN, GIVEN | given, image=image))
        assert (code in {finding.code for finding in findings}) == found
        assert code not in {finding.code for finding in check(Pipeline(RETRAIN, GIVEN | given))}  # not known
    train = '[train]\nreplica_count = 1\nmachine_type = "n1-standard-8"\n'
    # Of an image that is only named nobody has said that it holds anything else.
    for text in (f'[image]\nname = "{image.name}"\n', f'image = "{image.name}"\n'):
        (tmp_path / "vertex.toml").write_text(text + train)
        with pytest.raises(
            ShardlineError, match=r"SL612 .* the image .* has no module leafnet; name what it has"
        ):
            check_run(SENT, GIVEN | broken, settings=tmp_path / "vertex.toml")


def test_a_run_here_is_refused_a_directory_of_something_else_for_its_champion(tmp_path: Path) -> None:
    given = {"source": "digits", "champion_uri": str(tmp_path)}
    check_run(SENT, given, here=True)
    (tmp_path / "export.json").touch()

    with pytest.raises(ShardlineError, match=r"holds no champions .* but export\.json; give"):
        check_run(SENT, given, here=True)
