"""The notebook of one's own pipeline: its code, from the first cell to the last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import programs
from tests.helpers.markdown import own_pipeline_cells

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


# A run of the same tasks as the main job's; tests/compile compares its pipeline with that of the page.
@pytest.mark.matrix
def test_the_notebook_ends_with_a_champion(tmp_path: Path) -> None:
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join(own_pipeline_cells()))

    done = programs.run(
        ["python", "-c", f"import runpy; runpy.run_path({str(program)!r})"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "runs" / "latest" / "run.json").read_text())
    assert record["facts"]["blessed"] is True
    assert record["parameters"]["examples"] == 10_000
    # 1,256 examples in an epoch: the component between has chosen the number of epochs.
    assert "epoch 7/7" in done.stdout
    assert list((tmp_path / "champions" / "versions").iterdir())
