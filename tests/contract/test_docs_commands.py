"""What the documentation tells to type for the platform is typed here, against the fake."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from google.cloud.aiplatform_v1.types import PipelineJob, PipelineTaskDetail

from shardline.pipelines.cli.main import main
from tests.contract.conftest import enter
from tests.contract.fake.pipeline_jobs import PipelineOutcome
from tests.contract.fake.services import PROJECT
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex, fake_vertex
from tests.helpers.fake_bigquery import FakeBigQuery, FakeTable, at, fake_bigquery
from tests.helpers.markdown import Command, commands, shown_files

pytestmark = pytest.mark.timeout(240)

#: make builds images, which needs docker.
MARKED = [command for command in commands() if command.marked and command.words[0] != "make"]
#: The page whose commands read tables of BigQuery, and nothing else of Google Cloud.
ON_BIGQUERY = "tables.md"


def train(job: PipelineJob) -> PipelineOutcome:
    """A run whose training step was a custom job."""
    custom_job = f"projects/{PROJECT}/locations/{LOCATION}/customJobs/1"
    task = PipelineTaskDetail(
        task_id=1,
        task_name="train",
        state=PipelineTaskDetail.State.SUCCEEDED,
        executor_detail={"custom_job_detail": {"job": custom_job}},
    )
    return PipelineOutcome(tasks=[task])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    """The fake, a directory with the files that the pages show, and a compiled pipeline."""
    with fake_vertex(tmp_path, run_pipeline=train) as fake:
        enter(fake.environment, monkeypatch)
        _set_up(tmp_path, monkeypatch)
        yield fake


@pytest.fixture
def orders(project: FakeVertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBigQuery]:
    """The table of which a page speaks, where clients look for BigQuery."""
    labels = ["kept", "returned"] * 100
    table = pa.table(
        {
            "id": [f"order-{number}" for number in range(200)],
            "label": labels,
            "price": [number / 4 for number in range(200)],
        }
    )
    with fake_bigquery(tmp_path) as (fake, environment):
        enter(environment, monkeypatch)
        fake.tables["acme.shop.orders"] = FakeTable([(at("10:00"), table)])
        yield fake


def _set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERTEX_PROJECT", PROJECT)
    monkeypatch.setenv("VERTEX_PIPELINE_ROOT", f"gs://{BUCKET}/runs")
    for name, text in shown_files():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(own(text))
    shutil.copy(tmp_path / "settings" / "minimal.toml", tmp_path / "settings" / "vertex.toml")
    shardline("compile", "--settings", "settings/vertex.toml")


def _begin_project() -> None:
    """Makes the project that a page begins with, and goes there."""
    shardline("new", "leafnet")
    os.chdir("leafnet")
    for path in (Path("settings.toml"), Path("params/vertex.toml")):
        path.write_text(own(path.read_text()))
    shardline("compile", "--settings", "settings.toml")


def own(text: str) -> str:
    """Returns what a page shows with the reader's own project and bucket."""
    return text.replace("my-project", PROJECT).replace("my-bucket", BUCKET)


def shardline(*words: str, codes: tuple[int, ...] = (0,)) -> str:
    done = CliRunner().invoke(main, words)

    assert done.exit_code in codes, f"{words} ended with {done.exit_code}: {done.output}"
    return done.output


@pytest.mark.parametrize("page", sorted({command.page.name for command in MARKED} - {ON_BIGQUERY}))
def test_the_commands_of_a_page_do_what_it_says(project: FakeVertex, page: str) -> None:
    if page == "new-project.md":
        _begin_project()
    for command in MARKED:
        if command.page.name == page:
            _type(project, command)


def test_the_commands_for_bigquery_do_what_the_page_says(project: FakeVertex, orders: FakeBigQuery) -> None:
    for command in MARKED:
        if command.page.name == ON_BIGQUERY:
            _type(project, command)
    assert orders.called("ReadRows")


def _type(project: FakeVertex, command: Command) -> None:
    words = [_run_id(project) if word == "RUN" else own(word) for word in command.words[1:]]
    # explain: the run has failed, or was cancelled; doctor: the fake has no image.
    codes = {"explain": (0, 1, 4), "doctor": (0, 1)}
    shardline(*words, codes=codes.get(words[0], (0,)))


def _run_id(project: FakeVertex) -> str:
    return list(project.services.pipeline_jobs)[-1].rpartition("/")[2]
