"""What cannot run here is said before a pipeline starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.pipelines.local.at_hand import require_parts
from shardline.pipelines.spec import load_pipeline
from shardline.trainer.errors import PipelineError
from tests.helpers.anybodys_pipeline import IMAGE, MODEL, anybodys, elsewhere, usual, write_pipeline


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(anybodys, tmp_path_factory.mktemp("anybodys") / "anybodys.yaml")


def test_all_that_cannot_run_here_is_said_at_once(tmp_path: Path) -> None:
    spec = load_pipeline(write_pipeline(elsewhere, tmp_path / "p.yaml"))

    with pytest.raises(PipelineError) as caught:
        require_parts(spec, {})

    words, _, reasons = str(caught.value).partition(": ")
    assert words == "the pipeline cannot run here"
    assert sorted(reasons.split("; ")) == [
        f"task baked has its code in the image {IMAGE} only",
        "task bigquery-query-job asks the platform by way of a launcher of Google's without stand-in here",
        f"task entrypoint runs what the image {IMAGE} starts by itself, which only the image knows",
        "task importer imports gs://somebodys/data, which is not on this machine",
        f"task module runs python3 -m somebodys.task of the image {IMAGE}, which is not on this machine",
        f"task program runs somebodys-trainer of the image {IMAGE}, which is not on this machine",
        f"task script runs sh /opt/train.sh of the image {IMAGE}, which is not on this machine",
        "task unmet needs no-such-package==1, numpy<1: pip install it first",
    ]


def test_a_pipeline_whose_parts_are_here_passes_and_its_artifact_has_to_be_there(
    pipeline: Path, tmp_path: Path
) -> None:
    spec = load_pipeline(pipeline)

    require_parts(spec, {"place": str(tmp_path)})
    require_parts(spec, {"place": f"file://{tmp_path}"})
    with pytest.raises(PipelineError, match=r"task importer imports \S+/none, which is not on this machine"):
        require_parts(spec, {"place": str(tmp_path / "none")})


def test_what_a_task_may_write_before_is_not_demanded_and_a_bucket_is_where_it_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_pipeline(write_pipeline(usual, tmp_path / "usual.yaml"))
    require_parts(spec, {})

    del spec["root"]["dag"]["tasks"]["importer"]["dependentTasks"]
    with pytest.raises(PipelineError, match=f"task importer imports {MODEL}, which is not on this machine"):
        require_parts(spec, {})
    monkeypatch.setenv("SHARDLINE_GCS_ROOT", str(tmp_path))
    (tmp_path / "acme" / "out" / "model").mkdir(parents=True)
    require_parts(spec, {})

    monkeypatch.delenv("SHARDLINE_GCS_ROOT")
    del spec["root"]["dag"]["tasks"]["look"]  # the upload, which is not done here, looks at no file
    require_parts(spec, {})
