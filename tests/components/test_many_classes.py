"""Many classes, columns and labels: what is written stays within what is read, and time is linear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kfp import dsl

from shardline.components.model_store import BLESSING_FILE, EVALUATION_FILE, champions
from shardline.components.validate.evaluate import Assessment
from shardline.components.validate.gate.champion import compare
from shardline.components.validate.gate.gate import Gate
from shardline.components.validate.gate.power import Measured
from shardline.components.validate.gate.rules import parse_rules
from shardline.components.validate.gate.verdict import judge
from shardline.components.validate.metrics.evaluation import Evaluation
from shardline.components.validate.metrics.outcomes import Outcomes
from shardline.components.validate.metrics.scores import (
    ClassOutcomes,
    MultilabelOutcomes,
    RegressionOutcomes,
)
from shardline.components.validate.report.model_card import make_card
from shardline.components.validate.validation import _log_metrics, _write_outcome
from shardline.trainer.base import files
from shardline.trainer.base.errors import ModelError, SettingsError
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Label
from tests.helpers.exports import write_export
from tests.helpers.reports import EXPORT, TRAINING, make_manifest, make_report

MANY, N = 10_000, 200
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
    evaluation = compare(better, worse)
    gate = Gate(parse_rules(["accuracy >= champion", "worst_slice(f1) >= 0"]))

    blessing = judge(evaluation, gate, champion="")

    exported, store = write_export(tmp_path / "exported"), tmp_path / "champions"
    card = make_card(make_manifest(NAMES), EXPORT, TRAINING, evaluation, blessing)
    _write_outcome(evaluation, blessing, card, exported)
    written = files.read_json(exported / EVALUATION_FILE, ModelError)
    assert sum(count for *_, count in written["confusion"]) == N == written["examples"]
    assert written["champion"]["metrics"]["accuracy"] < written["accuracy"]
    assert (exported / EVALUATION_FILE).stat().st_size < 8e6
    assert (exported / BLESSING_FILE).stat().st_size < 5_000, "all that publishing reads"
    assert len(card.to_html()) + len(make_report(evaluation, blessing=blessing)) < 1e6
    metrics, confusion = dsl.Metrics(), dsl.ClassificationMetrics()
    _log_metrics(evaluation, metrics, confusion)
    assert len(metrics.metadata) < 20
    assert not confusion.metadata

    published = champions.publish(exported, store, quality="")
    assert published.metrics == evaluation.metrics
    assert Measured.of_champion(str(store)).leads == evaluation.leads

    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 1 << 20)
    with pytest.raises(SettingsError, match=r"evaluation\.json would have \d MiB, .* fewer classes"):
        _write_outcome(evaluation, blessing, card, write_export(tmp_path / "larger"))


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
