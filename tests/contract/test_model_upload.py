"""A blessed model is uploaded and predicts a batch: kfp.local, the real launchers, the fake, and back."""

import functools
import json
import subprocess
from pathlib import Path

import pytest
import yaml
from google.cloud.aiplatform_v1.types import Model
from google_cloud_pipeline_components.types.artifact_types import UnmanagedContainerModel
from kfp import compiler, dsl

from shardline.components.register import ModelUpload
from shardline.components.register.component import serving_model, upload_task
from shardline.components.register.registration import PIPELINE_LABEL
from shardline.pipelines.local.localize import localize
from tests.contract.fake.services import PROJECT, PROJECT_NUMBER
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex
from tests.helpers.execution import execute

pytestmark = [pytest.mark.timeout(120), pytest.mark.e2e]

IMAGE = "europe-west4-docker.pkg.dev/acme-vision/images/serving:2.19"
OLD = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/models/7"
UPLOAD = ModelUpload(
    display_name="digits 'näïve' ☃",
    serving_image_uri=IMAGE,
    parent_model=f"projects/{PROJECT}/locations/{LOCATION}/models/7",
    tags={"team": "vision"},
)


@dsl.component(base_image="image:1", install_kfp_package=False)
def export(exported: dsl.Output[dsl.Model]) -> None:
    """Writes what a validation leaves."""
    from pathlib import Path

    from tests.helpers.exports import write_export

    write_export(Path(exported.path), **{'"5".accuracy': 0.9712})


@dsl.component(base_image="image:1", install_kfp_package=False)
def store(
    here: dsl.Input[UnmanagedContainerModel],
    serving: dsl.Output[UnmanagedContainerModel],
    text: str,
    bucket: str,
) -> str:
    """Says that the model is in Cloud Storage, as everything is on the platform."""
    serving.uri, serving.metadata = f"gs://{bucket}{here.uri}", here.metadata
    return text


@dsl.component(base_image="image:1", install_kfp_package=False)
def look(model: dsl.Input[dsl.Artifact], serving: dsl.Input[dsl.Artifact], result: str) -> None:
    """Writes down what the next step sees."""
    import json
    from pathlib import Path

    files = sorted(str(p.relative_to(serving.path)) for p in Path(serving.path).rglob("*") if p.is_file())
    seen = {"uri": model.uri, "metadata": model.metadata, "files": files}
    Path(result).write_text(json.dumps(seen))


def run(vertex: FakeVertex, directory: Path, upload: ModelUpload) -> subprocess.CompletedProcess[str]:
    """Runs a pipeline with the launchers where kfp.local will start them."""
    component = functools.partial(dsl.component, base_image="image:1", install_kfp_package=False)
    serving_model_op = component()(serving_model)

    @dsl.pipeline(name="upload")
    def pipeline(result: str) -> None:
        exported = export().outputs["exported"]
        ready = serving_model_op(exported=exported, image_uri=upload.serving_image_uri)
        stored = store(here=ready.outputs["serving"], text=ready.outputs["Output"], bucket=BUCKET)
        uploaded = upload_task(upload, stored, pipeline="retrain")
        look(model=uploaded.outputs["model"], serving=ready.outputs["serving"], result=result)

    compiler.Compiler().compile(pipeline, str(directory / "upload.yaml"))
    parameters = {"result": str(directory / "result.json")}
    text = yaml.safe_dump(localize(yaml.safe_load((directory / "upload.yaml").read_text())))
    text = text.replace("shardline.pipelines.local.launcher_stubs", "tests.contract.fake.launch")
    return execute(directory, text, parameters, vertex.environment)


def test_a_new_version_of_a_registered_model(vertex: FakeVertex, tmp_path: Path) -> None:
    vertex.services.models[OLD] = [Model()]
    done = run(vertex, tmp_path, UPLOAD)

    assert done.returncode == 0, done.stdout + done.stderr
    assert list(vertex.services.models) == [OLD]
    _, model = vertex.services.models[OLD]
    assert model.display_name == UPLOAD.display_name
    assert model.description == '"5".accuracy 0.9712, 0 parameters, dataset sha256:abc'
    assert {PIPELINE_LABEL: "retrain", "team": "vision"}.items() <= dict(model.labels).items()
    assert model.artifact_uri.startswith(f"gs://{BUCKET}/")
    seen = json.loads((tmp_path / "result.json").read_text())
    assert seen["uri"] == f"https://{LOCATION}-aiplatform.googleapis.com/v1/{OLD}@2"
    assert seen["metadata"]["resourceName"] == f"{OLD}@2"


def test_a_new_model_is_one_that_tensorflow_serving_finds(vertex: FakeVertex, tmp_path: Path) -> None:
    done = run(vertex, tmp_path, ModelUpload(display_name="digits", serving_image_uri=IMAGE))

    assert done.returncode == 0, done.stdout + done.stderr
    ((model,),) = vertex.services.models.values()
    container = model.container_spec
    assert container.image_uri == IMAGE
    assert list(container.command) == ["/usr/bin/tensorflow_model_server"]
    options = {"--rest_api_port=8080", "--model_name=model", "--model_base_path=$(AIP_STORAGE_URI)"}
    assert options <= set(container.args)
    address = "/v1/models/model"
    assert (container.predict_route, container.health_route) == (f"{address}:predict", address)
    seen = json.loads((tmp_path / "result.json").read_text())
    assert seen["files"] == ["1/saved_model.pb", "1/variables/variables.index"]
