"""Runs in Vertex Experiments: what `shardline submit --experiment` sends, seen by Google's own SDK."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from google.cloud import aiplatform
from google.cloud.aiplatform_v1.types import Context, PipelineJob
from google.rpc import code_pb2

from shardline.components.runs import platform_run
from shardline.pipelines.cli.main import main
from tests.contract.conftest import enter
from tests.contract.fake.pipeline_jobs import PipelineOutcome
from tests.contract.fake.services import PROJECT, PROJECT_NUMBER
from tests.contract.fake.vertex import BUCKET, LOCATION, FakeVertex, fake_vertex
from tests.helpers.checks import pipeline

pytestmark = pytest.mark.timeout(120)

STORE = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/metadataStores/default"
PIPELINE = pipeline(parameters={"count": "NUMBER_INTEGER"}, schemaVersion="2.1.0", sdkVersion="kfp-2")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVertex]:
    """A platform whose runs go on until the test has ended."""
    end = threading.Event()

    def run(job: PipelineJob) -> PipelineOutcome:
        end.wait(60)
        return PipelineOutcome()

    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(PIPELINE))
    with fake_vertex(tmp_path, run_pipeline=run) as fake:
        enter(fake.environment, monkeypatch)
        monkeypatch.setenv("VERTEX_PROJECT", PROJECT)
        monkeypatch.setenv("VERTEX_LOCATION", LOCATION)
        monkeypatch.setenv("VERTEX_PIPELINE_ROOT", f"gs://{BUCKET}/runs")
        monkeypatch.chdir(tmp_path)
        yield fake
        end.set()
        assert fake.refused == []


@pytest.fixture
def sdk() -> Iterator[None]:
    """Forgets what a test tells Google's SDK."""
    yield
    aiplatform.initializer.global_config.__init__()  # type: ignore[misc]


def submit(*arguments: str, job_id: str = "toy-1") -> Result:
    given = ["submit", "pipeline.yaml", "-p", "count=3", "--job-id", job_id, *arguments]
    return CliRunner().invoke(main, given, catch_exceptions=False)


def test_a_run_is_in_the_experiment_and_nothing_makes_a_tensorboard(fake: FakeVertex, sdk: None) -> None:
    result = submit("--experiment", "digits")

    assert (result.exit_code, result.stderr) == (0, "")
    experiment = fake.services.metadata.contexts[f"{STORE}/contexts/digits"]
    assert (experiment.schema_title, experiment.schema_version) == ("system.Experiment", "0.0.1")
    assert list(fake.services.metadata.children("digits")) == ["toy-1"]
    assert [call for call in fake.services.calls if "ensorboard" in call] == []
    assert len(fake.services.metadata.contexts) == 2

    # Google's own SDK sees it, and shows that the fake would have noticed a TensorBoard instance.
    aiplatform.init(project=PROJECT, location=LOCATION)
    found = aiplatform.PipelineJob.get("toy-1").get_associated_experiment()
    assert found.name == aiplatform.Experiment("digits").name == "digits"
    with pytest.raises(Exception, match="ensorboard"):
        aiplatform.init(experiment="digits")
    assert [call for call in fake.services.calls if "ensorboard" in call] != []


def test_runs_of_an_experiment_that_is_there_are_added_to_it(fake: FakeVertex) -> None:
    submit("--experiment", "digits")
    submit("--experiment", "digits", job_id="toy-2")
    submit(job_id="toy-3")

    assert list(fake.services.metadata.children("digits")) == ["toy-1", "toy-2"]


def test_two_submissions_at_once_share_the_experiment_that_one_of_them_has_made(fake: FakeVertex) -> None:
    submit("--experiment", "digits")
    fake.services.fail("GetContext", code_pb2.NOT_FOUND)  # it was made after this question

    assert submit("--experiment", "digits", job_id="toy-2").stderr == ""
    assert list(fake.services.metadata.children("digits")) == ["toy-1", "toy-2"]


def test_the_experiment_of_the_environment_is_that_of_every_run(
    fake: FakeVertex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERTEX_EXPERIMENT", "digits")

    submit()
    submit("--experiment", "others", job_id="toy-2")

    assert list(fake.services.metadata.children("digits")) == ["toy-1"]
    assert list(fake.services.metadata.children("others")) == ["toy-2"]


def test_dry_run_names_the_experiment_and_makes_none(fake: FakeVertex) -> None:
    result = submit("--experiment", "digits", "--dry-run")

    assert ", in the experiment digits" in result.stdout.splitlines()[0]
    assert fake.services.calls == []


def test_a_name_that_the_platform_would_refuse_is_refused_before_the_run(fake: FakeVertex) -> None:
    for name in ("Digits", "-digits", "a_b_c", "abc", "d" * 129):
        result = submit("--experiment", name)
        assert result.exit_code == 2
        assert "experiment must be 4 to 128 lower-case letters" in result.stderr
        assert "(from --experiment)" in result.stderr
    assert fake.services.calls == []


@pytest.mark.parametrize("method", ["CreateContext", "AddContextChildren"])
def test_a_run_that_cannot_be_added_goes_on(fake: FakeVertex, method: str) -> None:
    fake.services.fail(method, code_pb2.PERMISSION_DENIED)

    result = submit("--experiment", "digits", "--json")

    assert result.exit_code == 0
    (warning,) = result.stderr.splitlines()
    assert warning.startswith("warning: cannot add the run to the experiment digits: permission ")
    assert warning.endswith("; the run toy-1 goes on outside the experiment")
    assert json.loads(result.stdout)["run"] == "toy-1"
    assert len(fake.services.pipeline_jobs) == 1


def test_the_platform_is_not_waited_for_without_end(
    fake: FakeVertex, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.services.metadata.makes_runs = False
    monkeypatch.setattr(platform_run, "_CONTEXT_S", 0.1)

    result = submit("--experiment", "digits")

    assert result.exit_code == 0
    assert "the platform has made no context of the run; the run toy-1 goes on" in result.stderr


def test_no_run_is_added_to_a_context_of_another_kind(fake: FakeVertex) -> None:
    name = f"{STORE}/contexts/digits"
    fake.services.metadata.contexts[name] = Context(name=name, schema_title="system.Pipeline")

    result = submit("--experiment", "digits")

    assert "digits is a system.Pipeline that takes no runs" in result.stderr
    assert fake.services.metadata.children("digits") == {}


def test_a_service_that_is_busy_is_asked_again(fake: FakeVertex) -> None:
    fake.services.fail("AddContextChildren", code_pb2.UNAVAILABLE)

    submit("--experiment", "digits")

    assert list(fake.services.metadata.children("digits")) == ["toy-1"]
