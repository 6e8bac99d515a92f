"""A blessed model is uploaded, evaluated in the registry, and made the champion, whatever fails between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.cloud.aiplatform_v1.types import Model, ModelEvaluation
from google.rpc import code_pb2
from kfp import dsl

from shardline.components.model_store.champions import complete_versions, current
from shardline.components.model_store.places import Disk
from shardline.components.register.component import register, registry_evaluation, serving_model
from shardline.components.validate.evaluate import join
from shardline.components.validate.evaluation import Evaluation
from shardline.components.validate.numbers import NumberOutcomes
from shardline.components.validate.several import SeveralOutcomes
from shardline.trainer.data.features import MULTILABEL, REGRESSION, Label
from tests.contract.fake.services import PROJECT_NUMBER
from tests.contract.fake.vertex import LOCATION, FakeVertex
from tests.helpers.evaluations import EVALUATION
from tests.helpers.exports import judge_again, write_export

PARENT = f"projects/{PROJECT_NUMBER}/locations/{LOCATION}/models/7"


class Publication:
    """The tasks of one run after its model was blessed, in the pipeline's order; a failed one is repeated."""

    def __init__(self, directory: Path, models: dict[str, list[Model]], run: str = "retrain-1") -> None:
        self.champion = directory / "champion"
        self._exported = dsl.Model(uri=str(directory / run))
        if not Path(self._exported.path).exists():
            write_export(Path(self._exported.path), weights=run.encode())
            self.write_evaluation(EVALUATION)
            judge_again(Path(self._exported.path), self.champion)
        self._serving = dsl.Artifact(uri=str(directory / "serving" / run))
        self._models, self._run = models, run

    def write_evaluation(self, evaluation: dict[str, Any]) -> None:
        (Path(self._exported.path) / "evaluation.json").write_text(json.dumps(evaluation))

    def do(self) -> None:
        """Does all tasks that are still to be done, as an attempt that knows nothing of the one before."""
        common: dict[str, Any] = {"quality": "accuracy 0.9700"}
        of_run: dict[str, Any] = {"gate": {"champion_uri": str(self.champion)}, "job_name": self._run}
        serving_model(exported=self._exported, serving=self._serving, image_uri="s:1", **common, **of_run)
        # The upload is Google's own, and has a test of its own.
        self._models[PARENT] = [Model()]
        registry_evaluation(
            exported=self._exported, model=dsl.Artifact(metadata={"resourceName": f"{PARENT}@1"})
        )
        register(exported=self._exported, **common, **of_run)


#: What fails, and how: a call of the platform, refused or with its answer lost, or a step of the publication.
FAULTS = [
    ("ListModelEvaluations", {"code": code_pb2.PERMISSION_DENIED}),
    ("ImportModelEvaluation", {"code": code_pb2.PERMISSION_DENIED}),
    ("ImportModelEvaluation", {"drop": "answer"}),
    ("put", {}),
    ("after put", {}),
    ("replace", {}),
    ("after replace", {}),
]


def fail_once(where: str, how: dict[str, Any], vertex: FakeVertex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets one step fail, once."""
    if how:
        vertex.services.fail(where, **how)
        return
    step, method = where.removeprefix("after "), getattr(Disk, where.removeprefix("after "))

    def failing(*arguments: Any) -> Any:
        monkeypatch.setattr(Disk, step, method)
        if where.startswith("after "):
            method(*arguments)
        raise SystemExit(1)

    monkeypatch.setattr(Disk, step, failing)


@pytest.mark.parametrize(("where", "how"), FAULTS)
def test_one_evaluation_and_one_champion_whatever_failed_before(
    where: str,
    how: dict[str, Any],
    vertex_environ: FakeVertex,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = vertex_environ.services
    publication = Publication(tmp_path, services.models)
    fail_once(where, how, vertex_environ, monkeypatch)

    with pytest.raises(SystemExit):
        publication.do()
    if current(publication.champion):
        assert services.evaluations, "the champion is not in the registry"
    publication.do()
    publication.do()  # its answer was lost on the way to the platform

    assert len(services.evaluations) == 1
    assert services.calls.count("ImportModelEvaluation") <= 2
    assert complete_versions(publication.champion) == [current(publication.champion)]
    # A copy that is not listed stays until prune finds it a day old: its publisher may be at work.
    left = 2 if where == "after put" else 1
    assert len(list((publication.champion / "versions").iterdir())) == left


def test_the_next_run_publishes_its_own(vertex_environ: FakeVertex, tmp_path: Path) -> None:
    first = Publication(tmp_path, vertex_environ.services.models, "retrain-1")
    first.do()
    second = Publication(tmp_path, vertex_environ.services.models, "retrain-2")
    second.do()
    first.do()  # an old attempt that comes late replaces nothing

    found = current(second.champion)
    assert found is not None
    assert (found.run, len(complete_versions(second.champion))) == ("retrain-2", 2)


def test_there_is_an_evaluation_of_each_label_in_the_schema_of_its_kind(
    vertex_environ: FakeVertex, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    fare = random.normal(20, 5, (50, 1))
    price = NumberOutcomes(
        Label("fare", REGRESSION, ("fare",)), fare, fare + random.normal(0, 1, (50, 1)), {}
    )
    tags = SeveralOutcomes(
        Label("tags", MULTILABEL, ("a", "b")), random.integers(0, 2, (50, 2)), random.random((50, 2)), {}
    )
    parts = tuple(
        Evaluation(
            fingerprint="sha256:0", split="test", label=one.label.name, kind=one.label.kind,
            outputs=one.label.outputs, **one.summarize(10),
        )
        for one in (price, tags)
    )  # fmt: skip
    publication = Publication(tmp_path, vertex_environ.services.models)
    publication.write_evaluation({**join(parts, {}).to_json(), "label": ""})

    publication.do()
    publication.do()

    found = vertex_environ.services.evaluations.values()
    of_fare, of_tags = (json.loads(ModelEvaluation.to_json(one)) for one in found)
    assert (of_fare["displayName"], of_tags["displayName"]) == ("test split, fare", "test split, tags")
    assert of_fare["metrics"]["rootMeanSquaredError"] == parts[0].metrics["rmse"]
    assert of_tags["metrics"]["confidenceMetrics"][0]["f1ScoreMacro"] == parts[1].metrics["macro_f1"]


def test_the_loser_is_not_uploaded(vertex_environ: FakeVertex, tmp_path: Path) -> None:
    models = vertex_environ.services.models
    late, fast = (Publication(tmp_path, models, name) for name in ("retrain-1", "retrain-2"))
    fast.do()
    models.clear()
    with pytest.raises(SystemExit) as ended:
        late.do()

    assert ended.value.code == 2
    assert not models
    assert [item.run for item in complete_versions(fast.champion)] == ["retrain-2"]
