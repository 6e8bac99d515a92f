"""The wheel of the image, built and installed by the Dockerfile's own commands, without an index.

It works in a directory with packages of the reader's own called trainer, components and pipelines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rehearse_image import ROOT, build_stage, copy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

RINGS = ("trainer", "components", "pipelines")


def own_commands() -> list[str]:
    """Returns the Dockerfile's commands for our own package: to build its wheel, and to install it."""
    (run,) = (text for name, text in build_stage("cpu") if name == "RUN" and "--wheel-dir wheels ." in text)
    wheel, _, install = (command.strip() for command in run.split("&&"))
    return [wheel, install]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package as the image has it."""
    work = tmp_path_factory.mktemp("build")
    for name, argument in build_stage("cpu"):
        if name == "COPY":
            copy(argument, work)
    wheel, install = own_commands()
    # Into a directory instead of a virtual environment: what it depends on is in the tests' own.
    install = install.replace("--python /opt/venv/bin/python install", "install --target installed")
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in (wheel, install):
        assert "python -m pip" in command
        done = subprocess.run(command, shell=True, cwd=work, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return work / "installed"


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


def test_the_trainer_and_the_templates_are_found_where_the_clone_is_not(
    installed: Path, tmp_path: Path
) -> None:
    trainer = run(installed, tmp_path, "-m", "shardline.trainer.task", "--help")
    assert trainer.returncode == 0, trainer.stderr
    assert "--per-replica-batch-size" in trainer.stdout

    program = (
        "import jinja2, shardline.trainer\n"
        "for package in ('components.validate', 'components.preprocess.inspect', 'components'):\n"
        "    names = jinja2.PackageLoader('shardline.' + package, '').list_templates()\n"
        "    print(package, sum(name.endswith('.html.j2') for name in names))\n"
        "print(shardline.trainer.__file__)"
    )
    done = run(installed, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    *templates, where = done.stdout.splitlines()
    assert [int(line.split()[1]) > 0 for line in templates] == [True, True, True]
    assert Path(where).is_relative_to(installed)


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
        "from shardline.trainer import plugins\nplugins.load('trainer.model:create_model', 'model')(None)"
    )
    done = run(installed, tmp_path, "-c", program)
    assert (done.stdout, done.stderr) == ("their trainer\n", "made\n")
