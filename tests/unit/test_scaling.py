"""The model of what a step on N workers costs."""

import json

import pytest
from click.testing import CliRunner

from shardline.pipelines.cli.main import main
from shardline.pipelines.cli.scaling import HANDLING_S_PER_BYTE, Step
from shardline.trainer.errors import SettingsError

STEP = Step(seconds=0.1, gradient_bytes=1e8, bandwidth=1e9, latency=1e-3)
HANDLING = 1e8 * HANDLING_S_PER_BYTE


@pytest.mark.parametrize(
    ("workers", "exchange"),
    [
        (1, 0.0),
        (2, 0.1 + 2e-3 + HANDLING),
        (4, 0.15 + 6e-3 + HANDLING),
        (100, 0.198 + 0.198 + HANDLING),
    ],
)
def test_a_ring_sends_twice_the_gradients_at_most_in_ever_more_turns(workers, exchange):
    assert STEP.exchange(workers) == pytest.approx(exchange)
    assert STEP.on(workers) == pytest.approx(0.1 + exchange)
    assert STEP.efficiency(workers) == pytest.approx(0.1 / (0.1 + exchange))


def test_a_batch_of_the_predicted_size_has_the_efficiency():
    factor = STEP.batch_factor(4, 0.8)
    larger = Step(seconds=0.1 * factor, gradient_bytes=1e8, bandwidth=1e9, latency=1e-3)

    assert larger.efficiency(4) == pytest.approx(0.8)


def test_workers_that_share_machines_wait_for_each_other():
    shared = Step(seconds=0.1, gradient_bytes=1e8, bandwidth=1e9, latency=1e-3, machines=2)

    assert shared.on(2) == STEP.on(2)
    assert shared.on(8) == pytest.approx(4 * (0.1 + shared.exchange(8)))


def test_an_exchange_every_few_steps_is_shared_among_them():
    rare = Step(seconds=0.1, gradient_bytes=1e8, bandwidth=1e9, latency=1e-3, accumulation=4)

    assert rare.on(2) - 0.1 == pytest.approx((STEP.on(2) - 0.1) / 4)


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"bandwidth": -1}, {"accumulation": 0}, {"latency": -1}])
def test_what_cannot_be_is_refused(wrong):
    values = {"seconds": 0.1, "gradient_bytes": 1e8, "bandwidth": 1e9, "latency": 1e-3}
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        Step(**{**values, **wrong})


def test_the_command_prints_the_model():
    arguments = [
        "scaling",
        "--step-ms",
        "100",
        "--batch",
        "16",
        "--gradient-mb",
        "100",
        "--bandwidth-gbit",
        "8",
    ]
    arguments += ["--latency-ms", "1", "--workers", "1,4"]
    rows = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)["rows"]
    text = CliRunner().invoke(main, arguments).output

    assert [row["workers"] for row in rows] == [1, 4]
    assert rows[1]["efficiency"] == pytest.approx(STEP.efficiency(4))
    assert rows[1]["batch_for"]["0.8"] == pytest.approx(16 * STEP.batch_factor(4, 0.8))
    assert f"{STEP.efficiency(4):.2f}" in text.splitlines()[2]
    assert CliRunner().invoke(main, [*arguments[:-1], "1,x"]).exit_code == 2
