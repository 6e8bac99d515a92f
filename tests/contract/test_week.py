"""A working week goes as it should: see the week itself for what is done, and how each command has to end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract import week as weeks

# Each of its commands has tests of its own.
pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]


def test_a_working_week(tmp_path: Path) -> None:
    with weeks.working_week(tmp_path) as week:
        weeks.live(week)
        assert week.vertex.refused == []
    monday, tuesday, wednesday, thursday, friday = ("\n".join(day.lines) for day in week.days)

    assert "ERROR    image:" in monday
    assert "tag latest now points to it" in monday
    assert tuesday.count("retrain-nightly: created") == 1
    assert tuesday.count("retrain-nightly: nothing to do") == 1
    assert "unchanged (data (160 files" in tuesday
    assert re.search(r"^train +succeeded", wednesday, re.MULTILINE)
    assert "parameters.epochs: 2 -> 3" in thursday
    assert "retrain-nightly: replaced" in thursday
    assert "failed step   preprocess" in friday
    assert "'dark/0000.png': not an image that can be read" in friday
    assert "is the champion" in friday
