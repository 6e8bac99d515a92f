"""A report of each kind of label: what it shows, also compared with a champion, and what it does not."""

import dataclasses

import pytest
from kfp import dsl

from shardline.components.validate.metrics.evaluation import Lead
from shardline.components.validate.report import make_card
from shardline.components.validate.validation import _log_metrics
from tests.helpers.labels import LABELLED
from tests.helpers.reports import EXPORT, TRAINING, make_blessing, make_kind, make_manifest, make_report

CLASSES_ONLY = ("Confusion matrix", "Calibration and thresholds")


def shown(kind, **changes):
    """Returns the report on made-up labels of a kind."""
    labels = LABELLED[kind]
    return make_report(
        dataclasses.replace(make_kind(kind), **changes),
        manifest=dataclasses.replace(make_manifest(("a", "b")), labels=labels),
        export=dataclasses.replace(EXPORT, labels=labels),
    )


def test_numbers_are_shown_by_their_errors():
    page = shown("regression")

    for part in ("<h2>Errors</h2>", "Predicted and true", "139.2</b>, predicted <b>88.5"):
        assert part in page
    assert "root mean squared error (RMSE)" in page
    assert 'aria-label="Predicted over true price, 200 examples from' in page
    assert "true, EUR" in page
    assert "<td>price (EUR)</td>" in page
    assert not [part for part in CLASSES_ONLY if part in page]


def test_several_labels_have_a_table():
    page = shown("multilabel")

    assert "<h2>Labels</h2>" in page
    assert "<b>upper, large</b>, predicted <b>small</b>" in page
    assert not [part for part in CLASSES_ONLY if part in page]


def test_of_two_labels_each_has_its_sections():
    page = shown("two")

    for title in ("kind: Confusion matrix", "kind: Slices", "price: Errors", "price: Slices"):
        assert f"<h2>{title}</h2>" in page
    assert "<dt>price: rmse</dt><dd>13.25</dd>" in page
    assert "<dt>kind: accuracy</dt><dd>0.9000</dd>" in page
    drawn = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(drawn) == len(set(drawn))


def test_a_smaller_error_is_better_than_the_champions():
    champion = make_kind("regression")
    champion = dataclasses.replace(champion, metrics={**champion.metrics, "rmse": 15.0, "r2": 0.9})

    page = shown("regression", champion=champion, leads={"rmse": Lead(-1.75, (-3.0, -0.5), 0.01)})

    assert '-1.75<span class="note">better</span><span class="note">-3 to -0.5</span>' in page
    assert "-0.0290</td>" in page  # without an interval it is neither


def test_the_champion_of_several_labels_stands_beside_each():
    page = shown("two", champion=make_kind("two"), leads={"price.rmse": Lead(0.0, (-1.0, 1.0), 0.5)})

    assert page.count('<th scope="col" class="number">champion</th>') == 4
    assert "-1 to 1" in page


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        ("regression", "Predicts price (EUR) from images."),
        ("numbers", "Predicts price (EUR), area from images."),
        ("multilabel", "Predicts which of 4 labels images have, or none: upper, large, central, small."),
        ("two", "price: Predicts price (EUR) from images."),
    ],
)
def test_the_card_says_what_the_model_is_for(kind, use):
    manifest = dataclasses.replace(make_manifest(("a", "b")), labels=LABELLED[kind])

    card = make_card(manifest, EXPORT, TRAINING, make_kind(kind), make_blessing()).to_markdown()

    assert use in card


@pytest.mark.parametrize("kind", ["regression", "numbers", "multilabel", "two"])
def test_the_console_gets_the_metrics_of_every_kind(kind):
    metrics, confusion = dsl.Metrics(), dsl.ClassificationMetrics()

    _log_metrics(make_kind(kind), metrics, confusion, dsl.SlicedClassificationMetrics())

    assert metrics.metadata == dict(make_kind(kind).metrics)
    assert bool(confusion.metadata) == (kind == "two")
