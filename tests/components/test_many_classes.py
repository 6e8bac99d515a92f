"""Many classes, columns and labels: what is written stays within what is read, and time is linear."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kfp import dsl

from shardline.components.model_store import BLESSING_FILE, EVALUATION_FILE, champions
from shardline.components.validate.evaluate import Assessment, Examples, collect_outcomes
from shardline.components.validate.export.signatures import Predictions
from shardline.components.validate.gate import judge
from shardline.components.validate.gate.champion import compare_models
from shardline.components.validate.metrics.evaluation import Evaluation, join
from shardline.components.validate.metrics.outcomes import (
    ClassOutcomes,
    MultilabelOutcomes,
    Outcomes,
    RegressionOutcomes,
)
from shardline.components.validate.report import make_card
from shardline.components.validate.rules import parse_rules
from shardline.components.validate.validation import _log_metrics, _write_outcome
from shardline.trainer.base import files
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.manifest import CLASS, MULTILABEL, REGRESSION, Label
from tests.helpers.datasets import write_labelled
from tests.helpers.exports import write_export
from tests.helpers.labels import class_label
from tests.helpers.reports import EXPORT, TRAINING, make_manifest, make_report

MANY, N = 10_000, 200
#: Bytes of the metadata of a task's artifacts on Vertex.
MOST = 131_072
NAMES = tuple(f"species {index}" for index in range(MANY))


def many_classes(right: float) -> Assessment:
    random = np.random.default_rng(0)
    true, outputs = random.permutation(MANY)[:N], np.full((N, MANY), 0.5 / MANY, np.float32)
    found = np.where(random.random(N) < right, true, (true + 1) % MANY)
    outputs[np.arange(N), found] += 0.5
    outcomes = ClassOutcomes(Label("label", CLASS, NAMES), true, outputs, {}, predicted=found)
    fields = {"outputs": NAMES, **outcomes.summarize(1)}
    return Assessment(Evaluation(fingerprint="sha256:0", split="test", **fields), {"label": outcomes}, 1)


def test_a_model_of_ten_thousand_classes_is_judged_and_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    better, worse = many_classes(0.9).with_counts(), many_classes(0.8)
    evaluation = compare_models(better, worse)
    gate = parse_rules(["accuracy >= champion", "worst_slice(f1) >= 0"])

    blessing = judge(evaluation, gate, champion="")

    exported, store = write_export(tmp_path / "exported"), tmp_path / "champions"
    card = make_card(make_manifest(NAMES), EXPORT, TRAINING, evaluation, blessing)
    _write_outcome(evaluation, blessing, card, exported)
    written = files.read_json(exported / EVALUATION_FILE, ModelError)
    assert sum(count for *_, count in written["confusion"]) == N == written["examples"]
    assert written["champion"]["metrics"]["accuracy"] < written["metrics"]["accuracy"]
    assert (exported / EVALUATION_FILE).stat().st_size < 8e6
    assert (exported / BLESSING_FILE).stat().st_size < 5_000, "all that publishing reads"
    assert len(card.to_html()) + len(make_report(evaluation, blessing=blessing)) < 1e6
    assert measure_metadata(evaluation) < MOST

    published = champions.publish(exported, store)
    assert published.metrics == evaluation.metrics

    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 1 << 20)
    with pytest.raises(SettingsError, match=r"evaluation\.json would have \d MiB, .* fewer classes"):
        _write_outcome(evaluation, blessing, card, write_export(tmp_path / "larger"))


def measure_metadata(evaluation: Evaluation) -> int:
    found = dsl.Metrics(), dsl.ClassificationMetrics(), dsl.SlicedClassificationMetrics()
    _log_metrics(evaluation, *found)
    return sum(len(json.dumps(each.metadata)) for each in found)


def test_the_console_gets_no_more_of_twenty_labels_than_a_task_may_write() -> None:
    random, n, labels = np.random.default_rng(0), 400, [f"label{index}" for index in range(20)]
    parts = []
    for name in labels:
        true, outputs = random.integers(0, 12, n), random.dirichlet(np.ones(12), n).astype(np.float32)
        label = class_label((f"a rather long name {index}" for index in range(12)), name)
        outcomes = ClassOutcomes(label, true, outputs, {}, predicted=outputs.argmax(axis=1))
        parts.append(Evaluation(fingerprint="", split="test", label=name, **outcomes.summarize(10)))

    assert 10_000 < measure_metadata(join(tuple(parts), {})) < MOST


def test_of_many_numbers_the_first_are_drawn_and_all_are_written() -> None:
    label = Label("label", REGRESSION, tuple(f"number {index}" for index in range(500)))
    true = np.random.default_rng(0).normal(size=(100, 500))
    fields = RegressionOutcomes(label, true, true + 0.1, {}).summarize(10)
    evaluation = Evaluation(fingerprint="", split="test", kind=REGRESSION, outputs=label.outputs, **fields)

    page = make_report(evaluation, manifest=replace(make_manifest(()), labels=(label,)))

    assert page.count("<figcaption>Predicted and true") == 6
    assert "Shown are the first 40 of 500 numbers" in page
    assert len(json.dumps(evaluation.to_json())) < 500 * 1_000


class Counted(np.ndarray[Any, Any]):
    """A column that counts how often its examples are selected."""

    selected = 0

    def __getitem__(self, key: Any) -> Any:
        Counted.selected += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("kind", [CLASS, MULTILABEL, REGRESSION])
def test_the_time_for_slices_is_linear_in_the_columns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random, found = np.random.default_rng(0), []

    def make(columns: int) -> Outcomes:
        label, outputs = Label("y", kind, ("a", "b")), random.random((80, 2)).astype(np.float32)
        more = {f"c{i}": random.normal(size=80).view(Counted) for i in range(columns)}
        if kind == REGRESSION:
            return RegressionOutcomes(label, random.random((80, 2)), outputs, more)
        true, predicted = (random.random((80, 2)) < 0.5).astype(np.int64), (outputs > 0.5).astype(np.int64)
        if kind == MULTILABEL:
            return MultilabelOutcomes(label, true, outputs, more, predicted=predicted)
        return ClassOutcomes(label, true[:, 0], outputs, more, predicted=predicted[:, 0])

    for columns in (2, 8):
        outcomes = make(columns)
        monkeypatch.setattr(Counted, "selected", 0)
        assert len([each for each in outcomes.slices(10) if "=" in each.name]) == 4 * columns
        outcomes.leads(outcomes)
        outcomes.baseline(None)
        found.append(Counted.selected)
    assert found[1] == 4 * found[0]


class Guess:
    """A model of three classes that always gives the same answer."""

    def predict(self, serialized: Any) -> Predictions:
        shares = np.tile(np.array([0.5, 0.3, 0.2], np.float32), (len(serialized), 1))
        return Predictions({"label": shares}, {"label": shares.argmax(axis=1)})


@pytest.mark.parametrize("cities", [3, 40])
def test_one_long_text_does_not_make_the_others_long(cities: int, tmp_path: Path) -> None:
    names = ["x" * 100_000, *(f"city {index}" for index in range(cities - 1))]
    rows = {"train": 3, "test": 240}
    manifest = write_labelled(tmp_path, [class_label("abc")], records=rows, cities=names[::-1])
    guess: Any = Guess()

    tracemalloc.start()
    outcomes, _ = collect_outcomes(guess, Examples(tmp_path, manifest), 60)
    slices = outcomes["label"].slices(1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    found = [each for each in slices if each.name.startswith("city=")]
    assert (len(found), sum(each.examples for each in found)) == ((3, 240) if cities == 3 else (0, 0))
    assert peak < 20e6, "in one array of text they have 96 MB"
