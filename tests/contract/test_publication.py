"""A blessed model is prepared for the upload, and becomes the champion, even if a task fails in between.

What is not of its pipeline is not replaced.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import DeployedModel, Endpoint, Model
from google.rpc import code_pb2
from kfp import dsl

from shardline.components.model_store.champions import current, versions
from shardline.components.register.component import register, serving_model
from shardline.components.register.registration import PIPELINE_LABEL
from shardline.components.runs import directory as run_directory
from shardline.components.storage import Storage
from tests.contract.fake.services import PROJECT_NUMBER
from tests.contract.fake.vertex import LOCATION, FakeVertex
from tests.helpers.exports import judge_again, write_export

OTHER = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/models/7"
OWN = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/models/8"
ENDPOINT = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/endpoints/9"


class Publication:
    """The tasks of one run after its model was blessed, in the pipeline's order; a failed one is repeated."""

    def __init__(self, directory: Path, run: str = "retrain-1") -> None:
        self.champion = directory / "champion"
        self._exported = dsl.Model(uri=str(directory / run))
        if not Path(self._exported.path).exists():
            write_export(Path(self._exported.path), weights=run.encode())
            judge_again(Path(self._exported.path), self.champion)
        self._serving = dsl.Artifact(uri=str(directory / "serving" / run))
        self._run, self.uploads = run, 0

    def do(self) -> None:
        """Does all tasks that are still to be done, as an attempt that knows nothing of the one before."""
        of_run: dict[str, Any] = {"champion_uri": str(self.champion), "job_name": self._run}
        serving_model(exported=self._exported, serving=self._serving, image_uri="s:1", **of_run)
        self.uploads += 1  # Google's own, which has a test of its own
        register(exported=self._exported, **of_run)


@pytest.mark.parametrize("where", ["put", "after put", "replace", "after replace"])
def test_one_champion_whatever_failed_before(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication = Publication(tmp_path)
    step = where.removeprefix("after ")
    method = getattr(Storage, step)

    def failing(*arguments: Any) -> Any:
        monkeypatch.setattr(Storage, step, method)
        if where != step:
            method(*arguments)
        raise SystemExit(1)

    monkeypatch.setattr(Storage, step, failing)
    with pytest.raises(SystemExit):
        publication.do()
    publication.do()
    publication.do()  # its answer was lost on the way to the platform

    assert versions(publication.champion) == [current(publication.champion)]
    # A copy without a record stays: its publisher may be at work.
    left = 2 if where == "after put" else 1
    assert len(list((publication.champion / "versions").iterdir())) == left


def test_the_next_run_publishes_its_own(tmp_path: Path) -> None:
    first = Publication(tmp_path, "retrain-1")
    first.do()
    second = Publication(tmp_path, "retrain-2")
    second.do()
    first.do()  # an old attempt that comes late replaces nothing

    found = current(second.champion)
    assert found is not None
    assert (found.run, len(versions(second.champion))) == ("retrain-2", 2)


def test_the_loser_is_not_uploaded(tmp_path: Path) -> None:
    late, fast = (Publication(tmp_path, name) for name in ("retrain-1", "retrain-2"))
    fast.do()
    with pytest.raises(SystemExit) as ended:
        late.do()

    assert ended.value.code == 2
    assert late.uploads == 0
    assert [item.run for item in versions(fast.champion)] == ["retrain-2"]


@pytest.fixture
def platform(vertex_environ: FakeVertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVertex:
    """The fake, with a model of the pipeline and one of someone else, on an endpoint without traffic."""
    monkeypatch.setattr(run_directory, "_BUCKETS", tmp_path)
    monkeypatch.delenv(run_directory.RunDirectory.VARIABLE, raising=False)
    services = vertex_environ.services
    services.models[OTHER] = [Model(labels={"pipeline": "retrain"})]
    services.models[OWN] = [Model(), Model(labels={PIPELINE_LABEL: "retrain"})]
    deployed = [
        DeployedModel(id="1", model=OTHER, model_version_id="1"),
        DeployedModel(id="2", model=OWN, model_version_id="2"),
    ]
    services.endpoints[ENDPOINT] = Endpoint(deployed_models=deployed)
    return vertex_environ


def prepare(directory: Path, **names: str) -> int | str | None:
    """Prepares an upload of the pipeline retrain, and returns the exit code."""
    directory = Path(tempfile.mkdtemp(dir=directory))
    exported, serving = dsl.Model(uri=str(directory / "exported")), dsl.Artifact(uri=str(directory / "out"))
    write_export(Path(exported.path))
    common: dict[str, Any] = {"image_uri": "s:1", "pipeline": "retrain"}
    try:
        serving_model(exported=exported, serving=serving, **common, **names)
    except SystemExit as ended:
        assert not Path(serving.path).exists()
        return ended.code
    return 0


@pytest.mark.parametrize(
    ("label", "code"), [({}, 2), ({PIPELINE_LABEL: "tune"}, 2), ({PIPELINE_LABEL: "retrain"}, 0)]
)
def test_a_parent_model_of_someone_else_gets_no_version(
    label: dict[str, str], code: int, platform: FakeVertex, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    platform.services.models[OTHER] = [Model(labels=label), Model(labels={PIPELINE_LABEL: "retrain"})]

    assert prepare(tmp_path, parent_model=OTHER) == code
    said = capfd.readouterr().err
    assert (OTHER in said, "another parent_model" in said) == (code > 0, code > 0)


@pytest.mark.parametrize(
    ("traffic", "code"),
    [({}, 0), ({"2": 100}, 0), ({"2": 100, "1": 0}, 0), ({"2": 99, "1": 1}, 2), ({"3": 100}, 3)],
)
def test_only_a_model_of_this_pipeline_loses_its_traffic(
    traffic: dict[str, int],
    code: int,
    platform: FakeVertex,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    platform.services.endpoints[ENDPOINT].traffic_split = traffic

    assert prepare(tmp_path, endpoint=ENDPOINT) == code
    assert (ENDPOINT in capfd.readouterr().err) == (code > 0)


@pytest.mark.parametrize("method", ["GetEndpoint", "GetModel"])
def test_what_cannot_be_read_is_not_replaced(
    method: str, platform: FakeVertex, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    platform.services.endpoints[ENDPOINT].traffic_split = {"2": 100}
    platform.services.fail(method, code_pb2.PERMISSION_DENIED)

    assert prepare(tmp_path, endpoint=ENDPOINT)
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert prepare(tmp_path, parent_model=f"{OTHER}0")
    assert prepare(tmp_path, endpoint=f"{ENDPOINT}0")


def test_a_run_on_this_machine_asks_for_nothing(
    platform: FakeVertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(run_directory.RunDirectory.VARIABLE, str(tmp_path))

    assert prepare(tmp_path, endpoint=ENDPOINT, parent_model=OTHER) == 0
    assert platform.services.calls == []
