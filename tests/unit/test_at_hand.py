"""What a local run changes in a pipeline is listed, and what cannot run here is said before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shardline.pipelines.cli.main import main
from shardline.pipelines.local.at_hand import require_parts
from shardline.pipelines.local.changes import CHANGES, listed, table
from shardline.pipelines.spec import load_pipeline
from shardline.trainer.errors import PipelineError
from tests.helpers.anybodys_pipeline import IMAGE, anybodys, elsewhere, write_pipeline

ROOT = Path(__file__).parents[2]


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


def test_what_is_changed_is_shown_and_nothing_runs(pipeline: Path, tmp_path: Path) -> None:
    command = ["run", str(pipeline), "--show-localized", "--runs-dir", str(tmp_path / "runs")]

    shown = CliRunner().invoke(main, command)

    assert shown.exit_code == 0, shown.output
    rows = [line.split(maxsplit=1) for line in shown.stdout.splitlines()]
    assert ["retries", "up to 3 times there, here not at all  count"] in [
        [name, "  ".join(rest.split("  ")[:1] + rest.split("  ")[-1:])] for name, rest in rows
    ]
    assert not (tmp_path / "runs").exists()


def test_every_change_of_our_own_pipeline_is_one_of_the_table() -> None:
    rows = listed(load_pipeline(ROOT / "compiled" / "retrain.yaml"), {})

    names = [change.what for change in CHANGES]
    assert {row[0] for row in rows} == set(names) - {"container", "packages", "unset"}
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), key=names.index)
    assert ("retries", "up to 2 times there, here at once", "train") in rows
    assert ("placeholder", "{{$.pipeline_google_cloud_location}} -> local", "everywhere") in rows


def test_the_page_has_the_table() -> None:
    assert table() in (ROOT / "docs" / "local-runs.md").read_text()
