"""Every input of the battery ends as it must: in time, with its exit code and last line, leaving nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.battery import battery
from tests.battery.battery import Outcome, Row
from tests.battery.inputs import DAMAGED

ROWS = battery.rows()


def _usual() -> set[str]:
    """Returns the commands of the rows that are not left to make test-all.

    They are the first of each verb and kind. Damaged files are the same wherever a file is expected: each
    place has one of them, and the next place the next one.
    """
    damaged = [row.command for row in ROWS if row.kind in DAMAGED]
    first = {(row.verb, row.kind): row.command for row in reversed(ROWS) if row.kind not in DAMAGED}
    return {*first.values(), *damaged[:: len(DAMAGED) + 1]}


USUAL = _usual()


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


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, made: Path) -> Iterator[dict[str, Future[Outcome]]]:
    """What comes of the rows that are to be tested, by command: two are played at a time."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    chosen = [item.callspec.params["row"] for item in items if hasattr(item, "callspec")]
    pool = ThreadPoolExecutor(2)
    yield {row.command: pool.submit(battery.play, row, made) for row in chosen}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row.command in USUAL else pytest.mark.matrix) for row in ROWS],
    ids=lambda row: row.command[:100],
)
def test_an_input_ends_as_it_must(row: Row, outcomes: dict[str, Future[Outcome]]) -> None:
    outcome = outcomes[row.command].result()

    assert not outcome.faults(row), f"{outcome.code}, left {outcome.left}\n{outcome.output[-2000:]}"
    assert battery.shown(outcome.answer) == battery.read_answers()[row.command], (
        "after a look at the new words: python -m tests.battery.battery --write"
    )
