"""Shardline as the image has it, where no clone is: its wheel.

It works in a directory with packages of the reader's own called trainer, components and pipelines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.markdown import ROOT
from tests.helpers.wheel import build_wheel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RINGS = ("trainer", "components", "pipelines")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package as the image has it."""
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    # Into a directory instead of a virtual environment: what it depends on is in the tests' own.
    target = wheel.parent / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True)
    return target


def run(installed: Path, directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *command], cwd=directory, env=environ, capture_output=True, text=True
    )


def test_every_file_of_the_rings_is_installed(installed: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *RINGS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    there = [name for name in listed if (ROOT / name).is_file()]

    assert any(name.endswith(".html.j2") for name in there)
    assert [name for name in there if not (installed / "shardline" / name).is_file()] == [], (
        "see package_data in setup.cfg"
    )
    constraints = (
        installed / "shardline" / "pipelines" / "project" / "template" / "common" / "constraints.txt"
    )
    assert constraints.read_bytes() == (ROOT / "constraints.txt").read_bytes()
    assert not constraints.is_symlink()


def test_it_takes_one_name_and_leaves_a_readers_own_packages_alone(installed: Path, tmp_path: Path) -> None:
    """Both ways: their modules are not taken for ours, and ours are not looked for in theirs."""
    assert [
        path.name for path in installed.iterdir() if path.suffix != ".dist-info" and path.name != "bin"
    ] == ["shardline"]
    for name in RINGS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"print('their {name}')\n")
    (tmp_path / "trainer" / "task.py").write_text("print('their task')\n")
    (tmp_path / "trainer" / "model.py").write_text(
        "def create_model(dataset):\n    raise SystemExit('made')\n"
    )

    command = "from shardline.pipelines.cli.main import main; main()"
    for ours in (["-c", command, "--help"], ["-m", "shardline.trainer.task", "--help"]):
        done = run(installed, tmp_path, *ours)
        assert done.returncode == 0, done.stderr
        assert "--help" in done.stdout
        assert "their" not in done.stdout
    assert run(installed, tmp_path, "-m", "trainer.task").stdout == "their trainer\ntheir task\n"

    program = (
        "from shardline.trainer.base import plugins\n"
        "plugins.load('trainer.model:create_model', 'model')(None)"
    )
    done = run(installed, tmp_path, "-c", program)
    assert (done.stdout, done.stderr) == ("their trainer\n", "made\n")
