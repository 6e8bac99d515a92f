"""The best of the last champions, which a new model is compared with: which it is, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from shardline.components.model_store.champions import Version
from shardline.components.validate.gate.champion import compare_with_best
from shardline.components.validate.metrics.evaluation import BestLead, Evaluation
from shardline.components.validate.metrics.outcomes import ClassOutcomes, Outcomes, RegressionOutcomes
from shardline.components.validate.rules import GateRule, parse_rule
from shardline.trainer.manifest import CLASS, REGRESSION, Label

KIND, PRICE = Label("kind", CLASS, ("no", "yes")), Label("price", REGRESSION, ("price",))
N = 200
TRUE = np.arange(N) % 2
ACCURACY = parse_rule("accuracy >= best(8) (within 0.01)")


def kinds(wrong: int) -> ClassOutcomes:
    """Returns predictions that are wrong on the first examples."""
    predicted = np.where(np.arange(N) < wrong, 1 - TRUE, TRUE)
    outputs = np.where(np.eye(2)[predicted] == 1, 0.9, 0.1).astype(np.float32)
    return ClassOutcomes(KIND, TRUE, outputs, {}, predicted=predicted)


def prices(error: float) -> RegressionOutcomes:
    true = np.arange(N, dtype=np.float64)[:, None]
    return RegressionOutcomes(PRICE, true, true + error * np.random.default_rng(1).normal(1, 0.1, (N, 1)), {})


@dataclass
class Challenger:
    """What of an assessment a comparison needs."""

    outcomes: Mapping[str, Outcomes]

    @property
    def evaluation(self) -> Evaluation:
        several = len(self.outcomes) > 1
        metrics = {
            f"{name}.{metric}" if several else metric: value
            for name, outcome in self.outcomes.items()
            for metric, value in outcome.summarize(10)["metrics"].items()
        }
        return Evaluation(fingerprint="", split="test", examples=N, metrics=metrics)

    def select(self, mask: Any) -> Challenger:
        return Challenger({name: outcome.select(mask) for name, outcome in self.outcomes.items()})


@dataclass
class Store:
    """Champions, newest first, by the metrics that are recorded of them, and what they predict."""

    recorded: list[Mapping[str, float | None]]
    predictions: Mapping[int, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def compare(self, challenger: Mapping[str, Outcomes], *rules: GateRule) -> dict[str, BestLead]:
        last = [
            Version(version=f"v{number}", fingerprint="", created="", metrics=metrics)
            for number, metrics in enumerate(self.recorded)
        ]

        def predict(version: Version) -> Any:
            self.asked.append(version.version)
            return self.predictions[last.index(version)]

        return compare_with_best(Challenger(challenger), last, rules, predict)  # type: ignore[arg-type]


def accuracies(*values: float | None) -> list[Mapping[str, float | None]]:
    return [{"accuracy": value} for value in values]


def test_the_best_by_its_record_is_measured_and_the_lead_over_it_known() -> None:
    store = Store(accuracies(0.95, 0.97, 0.99, 0.98), {2: ({"kind": kinds(2)}, np.zeros(N, np.bool_))})

    best = store.compare({"kind": kinds(22)}, ACCURACY)["accuracy"]

    assert store.asked == ["v2"]
    assert (best.version, best.compared, best.note) == ("v2", 4, "")
    assert best.value == pytest.approx(0.99)
    assert best.lead is not None
    assert best.lead.difference == pytest.approx(-0.1)
    assert best.lead.p > 0.999


@pytest.mark.parametrize(
    ("recorded", "compared", "note"),
    [
        (accuracies(0.9), 1, "there is no other champion to compare with"),
        (accuracies(0.99, 0.98, 0.99), 3, "the champion is the best of 3"),
        (accuracies(0.98, None), 1, "1 of 2 champions have no recorded accuracy"),
        ([{}, {}], 0, "2 of 2 champions have no recorded accuracy"),
    ],
)
def test_nothing_is_measured_where_the_champion_is_the_best(recorded: Any, compared: int, note: str) -> None:
    store = Store(recorded)

    best = store.compare({"kind": kinds(2)}, ACCURACY)["accuracy"]

    assert (store.asked, best.version, best.lead, best.compared) == ([], "", None, compared)
    assert note in best.note


@pytest.mark.parametrize(
    ("champions", "accuracy", "last", "version", "compared"),
    [
        (4, {3: 0.99}, 3, "v1", 3),  # the third before it is not asked; of equal ones, the newest
        (40, {3: 0.99, 4: 0.98}, 8, "v4", 8),  # 1, 2, 4, 8, 16, 32 before it, and the oldest
        (40, {38: 0.99, 39: 0.98}, 8, "v39", 8),
        (100, {64: 0.98, 99: 0.99}, 8, "v64", 8),
    ],
)
def test_the_champions_are_spaced(
    champions: int, accuracy: Mapping[int, float], last: int, version: str, compared: int
) -> None:
    predictions = {number: ({"kind": kinds(2)}, np.zeros(N, np.bool_)) for number in range(champions)}
    values = [accuracy.get(number, 0.95 if number else 0.9) for number in range(champions)]
    rule = parse_rule(f"accuracy >= best({last}) (within 0.01)")

    best = Store(accuracies(*values), predictions).compare({"kind": kinds(2)}, rule)["accuracy"]

    assert (best.version, best.compared) == (version, compared)


def test_one_that_cannot_be_measured_is_left_out_with_a_note_and_the_next_best_taken() -> None:
    store = Store(
        accuracies(0.9, 0.99, 0.98),
        {1: "no export.json in it", 2: ({"kind": kinds(4)}, np.zeros(N, np.bool_))},
    )
    best = store.compare({"kind": kinds(2)}, ACCURACY)["accuracy"]

    assert (best.version, best.compared, best.note) == ("v2", 2, "v1 is left out: no export.json in it")

    alone = Store(accuracies(0.9, 0.99), {1: "no export.json in it"})
    best = alone.compare({"kind": kinds(2)}, ACCURACY)["accuracy"]

    assert (best.version, best.compared, best.lead) == ("", 1, None)
    assert best.note == "there is no other champion to compare with; v1 is left out: no export.json in it"


def test_examples_that_it_was_trained_on_are_left_out_for_both() -> None:
    trained_on = np.arange(N) < 50
    store = Store(accuracies(0.9, 0.99), {1: ({"kind": kinds(0)}, trained_on)})

    best = store.compare({"kind": kinds(65)}, ACCURACY)["accuracy"]

    assert best.lead is not None
    assert best.lead.difference == pytest.approx(-0.1)  # wrong on 15 of the 150 others
    assert best.value == pytest.approx(1.0)
    assert best.note == "on 150 of the 200 examples: it was trained on the others"

    unknown = Store(accuracies(0.9, 0.99), {1: ({"kind": kinds(0)}, None)})
    best = unknown.compare({"kind": kinds(65)}, ACCURACY)["accuracy"]

    assert best.value == pytest.approx(1.0)
    assert best.note == "it is not known which examples it was trained on"


def test_each_label_has_its_best_less_is_better_for_errors_and_each_version_is_asked_once() -> None:
    recorded: list[Mapping[str, float | None]] = [
        {"kind.accuracy": 0.90, "price.rmse": 5.0},
        {"kind.accuracy": 0.99, "price.rmse": 9.0},
        {"kind.accuracy": 0.95, "price.rmse": 2.0},
    ]
    both = {number: ({"kind": kinds(number), "price": prices(number)}, None) for number in (1, 2)}
    store = Store(recorded, both)
    rules = [
        parse_rule(f"{metric} best(8) (within 1 %)")
        for metric in ("kind.accuracy >=", "price.rmse <=", "price.mae <=")
    ]

    best = store.compare({"kind": kinds(11), "price": prices(4.0)}, *rules)

    assert {name: lead.version for name, lead in best.items()} == {
        "kind.accuracy": "v1", "price.rmse": "v2", "price.mae": "",
    }  # fmt: skip
    assert best["price.rmse"].value == pytest.approx(2.0, abs=0.1)
    assert store.asked == ["v1", "v2"]
    store = Store([{"kind.accuracy": 0.9}, {"kind.accuracy": 0.99, "price.rmse": 1.0}], {1: "damaged"})
    store.compare({"kind": kinds(11), "price": prices(4.0)}, *rules)
    assert store.asked == ["v1"]
