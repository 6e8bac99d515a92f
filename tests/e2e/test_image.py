"""Shardline as the image has it, where no clone is: its wheel, its build context.

It works in a directory with packages of the reader's own called trainer, components and pipelines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardline.pipelines.image import context as contexts
from shardline.pipelines.image.context import build_own_wheel
from shardline.pipelines.image.settings import ImageSettings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
RINGS = ("trainer", "components", "pipelines")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this clone."""
    return build_own_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A directory with the package as the image has it."""
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


def test_what_is_installed_is_packed_again(installed: Path, wheel: Path, tmp_path: Path) -> None:
    program = (
        "import pathlib\n"
        "from shardline.pipelines.image.context import build_own_wheel\n"
        "build_own_wheel(pathlib.Path())"
    )
    done = run(installed, tmp_path, "-c", program)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_what_a_build_context_has_installs_and_a_users_package_is_imported(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Dockerfile's step for them, and an import where the package's own directory is not."""
    package = tmp_path / "mine" / "leafnet"
    package.mkdir(parents=True)
    (package / "source.py").write_text("import shardline\n\nclass Leaves: ...\n")
    (package / "data").mkdir()
    (package / "data" / "names.txt").touch()
    monkeypatch.setattr(contexts, "build_own_wheel", lambda directory: shutil.copy(wheel, directory))
    settings = ImageSettings(name="leafnet:1", packages=(str(package),), variant="control")
    contexts.assemble(settings, "abc", tmp_path / "context")

    target = tmp_path / "target"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    found = [str(path) for kind in ("wheels", "projects") for path in (tmp_path / "context" / kind).iterdir()]
    subprocess.run([*command, "--no-build-isolation", "--target", str(target), *found], check=True)
    assert (target / "leafnet" / "data" / "names.txt").is_file()
    assert {path.name.partition("-")[0] for path in target.glob("*.dist-info")} == {"leafnet", "shardline"}
    program = (
        "from shardline.trainer.base import plugins\n"
        "print(plugins.load('leafnet.source:Leaves', 'source').__module__)\n"
        "import shardline\nprint(shardline.__file__)"
    )
    done = run(target, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    module, where = done.stdout.splitlines()
    assert module == "leafnet.source"
    assert Path(where).is_relative_to(target)
