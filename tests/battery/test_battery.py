"""Every input of the battery ends as it must: in time, with its exit code and last line, leaving nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.battery import battery
from tests.battery.battery import Row

ROWS = battery.rows()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the good inputs are copies of."""
    directory = tmp_path_factory.mktemp("battery")
    battery.prepare(directory)
    return directory


def test_every_verb_has_rows() -> None:
    from shardline.pipelines.cli.main import main

    missing = [name for name in main.commands if not any(f"shardline {name} " in row.command for row in ROWS)]

    assert not missing
    assert len(ROWS) >= 300


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.command[:100])
def test_an_input_ends_as_it_must(row: Row, made: Path) -> None:
    outcome = battery.play(row, made)

    assert not outcome.faults(row), f"{outcome.code}, left {outcome.left}\n{outcome.output[-2000:]}"
    assert battery.shown(outcome.answer) == battery.read_answers()[row.command], (
        "after a look at the new words: python -m tests.battery.battery --write"
    )
