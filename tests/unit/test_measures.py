import dataclasses

import pytest

from shardline.components.validate import report
from shardline.components.validate.evaluation import Lead
from shardline.components.validate.metrics import QUALITY, SERVING
from tests.helpers.reports import make_evaluation, with_champion

LOG_LOSS = next(one for one in QUALITY if one.name == "log_loss")
ACCURACY = next(one for one in QUALITY if one.name == "accuracy")


def row(measure, value, before, lead=None):
    evaluation = with_champion(make_evaluation(("a", "b")))
    champion = dataclasses.replace(evaluation.champion, metrics={measure.name: before})
    leads = {measure.name: lead} if lead else {}
    changed = dataclasses.replace(evaluation, metrics={measure.name: value}, leads=leads, champion=champion)
    return report.metric_rows(changed, (measure,))[0]


@pytest.mark.parametrize(
    ("measure", "value", "before", "lead", "difference", "change"),
    [
        (ACCURACY, 0.9, 0.8, None, "+0.1000", "better"),
        (ACCURACY, 0.8, 0.9, None, "-0.1000", "worse"),
        (ACCURACY, 0.9, 0.9, None, "±0.0000", ""),
        (LOG_LOSS, 0.3, 0.2, None, "+0.1000", "worse"),  # less is better here
        (LOG_LOSS, 0.2, 0.3, None, "-0.1000", "better"),
        (ACCURACY, 0.9, 0.8, Lead(0.1, (0.05, 0.15), 0.0), "+0.1000", "better"),
        (ACCURACY, 0.9, 0.89, Lead(0.01, (-0.02, 0.04), 0.3), "+0.0100", "unclear"),  # may be chance
    ],
)
def test_a_difference_from_the_champion(measure, value, before, lead, difference, change):
    shown = row(measure, value, before, lead)

    assert (shown.difference, shown.change) == (difference, change)


def test_what_was_not_measured_is_left_out():
    evaluation = make_evaluation(("a", "b"))

    rows = report.metric_rows(evaluation, QUALITY + SERVING)

    assert {one.name for one in rows} == set(evaluation.metrics)
    assert rows[0].champion == rows[0].difference == rows[0].change == ""


def test_values_carry_their_units():
    rows = report.metric_rows(make_evaluation(("a", "b")), SERVING)

    assert [one.value for one in rows] == ["12.50 ms", "1.50 MB"]


def test_intervals():
    assert report.show_interval(None) == ""
    assert report.show_interval((-0.01, 0.02)) == "-0.0100 to 0.0200"
