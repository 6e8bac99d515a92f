"""What `shardline new` has written runs as it is: `make run` and `make test`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardline.pipelines.project import new

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


# The template of images is the example that the tests of the main job train.
@pytest.mark.parametrize("kind", ["text", pytest.param("table", marks=pytest.mark.matrix)])
def test_a_new_project_ends_with_a_champion_and_its_tests_pass(tmp_path: Path, kind: str) -> None:
    project = tmp_path / "leafnet"
    new.write(project, kind, "leafnet", "never installed here")
    # The environment of these tests is the one that make would set up.
    (project / ".venv").mkdir()
    (project / ".venv" / ".installed").touch()

    make(project, "run")
    make(project, "test")

    record = json.loads((project / "runs" / "latest" / "run.json").read_text())
    assert record["state"] == "succeeded"
    assert record["facts"]["blessed"] is True
    assert Path(record["facts"]["champion"]).is_dir()


def make(project: Path, target: str) -> None:
    command = ["make", target, f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
