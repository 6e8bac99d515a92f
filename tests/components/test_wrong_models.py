"""What the gate says to wrong models is what the page on judging says."""

from pathlib import Path

import pytest

from tests.components import wrong_models

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]


def test_the_table_of_wrong_models_is_what_the_gate_says(tmp_path: Path) -> None:
    page = (ROOT / "benchmarks" / "GATE.md").read_text(encoding="utf-8")

    table = wrong_models.table(tmp_path)

    assert [row for row in table.splitlines() if row not in page] == []  # shows what differs
    assert table in page
