"""A pipeline that uploads a model, on this machine: the upload is said, and nothing is uploaded."""

import functools
import subprocess
from pathlib import Path

import pytest
import yaml
from kfp import compiler, dsl

from shardline.components.register.component import registry_evaluation, serving_model
from shardline.components.register.settings import ModelUpload
from shardline.components.register.tasks import upload_task
from shardline.pipelines.local import stand_ins
from shardline.pipelines.local.localize import localize
from tests.helpers.execution import execute

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

PARENT = "projects/my-project/locations/europe-west4/models/7"


@dsl.component(base_image="image:1", install_kfp_package=False)
def export(exported: dsl.Output[dsl.Model]) -> None:
    """Writes what a validation leaves."""
    import json
    from pathlib import Path

    from tests.helpers.evaluations import EVALUATION
    from tests.helpers.exports import write_export

    write_export(Path(exported.path))
    Path(exported.path, "evaluation.json").write_text(json.dumps(EVALUATION))


def run(directory: Path, upload: ModelUpload) -> subprocess.CompletedProcess[str]:
    component = functools.partial(dsl.component, base_image="image:1", install_kfp_package=False)
    serving_model_op, evaluation_op = component()(serving_model), component()(registry_evaluation)

    @dsl.pipeline(name="upload")
    def pipeline() -> None:
        exported = export().outputs["exported"]
        ready = serving_model_op(
            exported=exported, quality="accuracy 0.97", image_uri=upload.serving_image_uri, gate={}
        )
        uploaded = upload_task(component(), upload, ready, labels={})
        evaluation_op(exported=exported, model=uploaded.outputs["model"])

    compiler.Compiler().compile(pipeline, str(directory / "upload.yaml"))
    spec = yaml.safe_load((directory / "upload.yaml").read_text())
    return execute(directory, localize(spec))


@pytest.mark.parametrize(
    ("parent", "words"), [(PARENT, f"as a new version of {PARENT}"), ("", "as a new model")]
)
def test_the_upload_is_said_and_not_done(tmp_path, parent, words):
    done = run(tmp_path, ModelUpload(display_name="digits", serving_image_uri="s:1", parent_model=parent))

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"'digits' is not uploaded; on Vertex AI it would be, {words}" in done.stdout
    assert "nothing was uploaded: the evaluation is not imported" in done.stdout
    assert [path.parent.name for path in tmp_path.rglob("saved_model.pb")].count("1") == 1


def test_a_payload_that_is_no_json_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        stand_ins.main(
            [
                "UploadModel",
                "--executor_input",
                "{}",
                "--payload",
                '{"display_name": "a "b""}',
                "--gcp_resources",
                str(tmp_path),
            ]
        )

    assert ended.value.code == 2
    assert "the payload of UploadModel is not JSON" in capsys.readouterr().err
