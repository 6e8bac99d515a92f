"""Metrics, added losses and layers with states that do not just add up, on two replicas and on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardline.trainer.base.errors import EXIT_BAD_INPUT
from tests.helpers import replicas
from tests.multiworker.test_fit import assert_close

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]


def run(out: Path, devices: int, processes: int) -> tuple[list[dict[str, Any]], list[str]]:
    outputs = replicas.run(["-m", "tests.helpers.replica_state", str(out), str(devices)], processes)
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))], outputs


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("one"), 0, 1)[0][0]


@pytest.mark.parametrize(("devices", "processes"), [(2, 1), (0, 2)], ids=["mirrored", "workers"])
def test_two_replicas_have_the_states_of_one_or_a_line_says_which_differ(
    tmp_path: Path, one: dict[str, Any], devices: int, processes: int
) -> None:
    found, outputs = run(tmp_path, devices, processes)
    assert len(found) == processes
    for each in found:
        assert each.pop("texts") == one["texts"]
        assert_close(each, {name: value for name, value in one.items() if name != "texts"})
    assert one["refusals"] == [[EXIT_BAD_INPUT, True]] * 2
    (line,) = [line for line in outputs[0].splitlines() if "differ between replicas" in line]
    # Not the number of calls, which is the same on all, nor BatchNormalization, which has a line of its own.
    assert "(counting/total, counting/rows)" in line
    assert "a loss is computed of a batch as a whole" not in outputs[0]
