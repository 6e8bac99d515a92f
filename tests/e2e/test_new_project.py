"""What `shardline new` has written runs as it is: `make run` and `make test`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from shardline.pipelines.project import write_project
from shardline.pipelines.project.data import inspect_data

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


# The template of images is the example that the tests of the main job train.
@pytest.mark.parametrize("kind", ["text", pytest.param("table", marks=pytest.mark.matrix)])
def test_a_new_project_ends_with_a_champion_and_its_tests_pass(tmp_path: Path, kind: str) -> None:
    project = tmp_path / "leafnet"
    write_project(project, kind, "leafnet", "never installed here")

    make(project, "run")
    make(project, "test")

    record = json.loads((project / "runs" / "latest" / "run.json").read_text())
    assert record["state"] == "succeeded"
    assert record["facts"]["blessed"] is True
    assert Path(record["facts"]["champion"]).is_dir()


@pytest.mark.matrix
def test_a_project_of_a_table_with_prices_ends_with_a_champion(tmp_path: Path) -> None:
    table, project = tmp_path / "orders.csv", tmp_path / "leafnet"
    rows = [
        f"A-{i},{i % 7},{'' if i % 9 == 0 else i % 5},{'east' if i % 2 else 'west'},"
        f"about {'a big' if i % 3 else 'one small'} order of {i},{200_000 + 30_000 * (i % 7)}"
        for i in range(300)
    ]
    table.write_text("\n".join(["order_id,pieces,km/h,shop,note,price", *rows]))
    write_project(project, "text", "leafnet", "never installed here", inspect_data(str(table), "price", ""))

    make(project, "run")
    tested = make(project, "test")

    facts = json.loads((project / "runs" / "latest" / "run.json").read_text())["facts"]
    assert facts["blessed"] is True
    assert "3 passed" in tested
    table.unlink()
    assert "3 skipped" in make(project, "test")


@pytest.mark.matrix
def test_a_messy_table_with_a_rare_class_ends_with_a_champion_without_an_edit(tmp_path: Path) -> None:
    table, drawn = tmp_path / "returns.csv", random.Random(0)
    rows = []
    for i in range(1_500):
        amount, kind = drawn.uniform(10, 5_000), drawn.choice(("Schuhe", "Hemden"))
        cells = [f"{drawn.randint(1, 28):02}/{drawn.randint(1, 12):02}/2025 {drawn.randint(0, 23):02}:15"]
        cells += [f"{amount:,.2f}".translate({44: ".", 46: ","}), f"0{drawn.randint(1000, 9999)}"]
        cells += [kind, "?" if i % 11 == 0 else str(drawn.randint(18, 80))]
        rows.append(";".join([*cells, "ja" if amount > 4_200 and kind == "Schuhe" else "nein"]))
    table.write_text("\n".join(["Datum;Betrag;PLZ;Art;Alter;zurück", *rows]))
    data = inspect_data(str(table), "zurück", "")
    write_project(tmp_path / "leafnet", data.kind, "leafnet", "never installed here", data)

    make(tmp_path / "leafnet", "run")

    facts = json.loads((tmp_path / "leafnet" / "runs" / "latest" / "run.json").read_text())["facts"]
    assert facts["blessed"] is True


def make(project: Path, target: str) -> str:
    command = ["make", target, f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
