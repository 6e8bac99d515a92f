"""Shardline as the image has it, where no clone is: its wheel, the wheel made of that again, a rehearsal.

It works in a directory with packages of the reader's own called trainer, components and pipelines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shardline.pipelines.image import rehearsal
from shardline.pipelines.image.context import assemble
from shardline.pipelines.image.settings import ImageSettings
from shardline.pipelines.image.wheels import own_wheel
from shardline.trainer.errors import RunError, SettingsError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
RINGS = ("trainer", "components", "pipelines")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this clone."""
    return own_wheel(tmp_path_factory.mktemp("wheel"))


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


def test_the_wheel_of_what_is_installed_is_the_wheel_that_was_installed(
    installed: Path, wheel: Path, tmp_path: Path
) -> None:
    program = (
        "import pathlib\nfrom shardline.pipelines.image.wheels import own_wheel\nown_wheel(pathlib.Path())"
    )
    done = run(installed, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    again = tmp_path / wheel.name

    def content(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as opened:
            return {name: opened.read(name) for name in opened.namelist() if not name.endswith("/RECORD")}

    assert content(again) == content(wheel)
    target = tmp_path / "target"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(again)], check=True)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build context without Shardline's requirements: the tests have no index."""
    package = tmp_path / "mine" / "leafnet"
    package.mkdir(parents=True)
    (package / "source.py").write_text("import shardline\n\nclass Leaves: ...\n")
    (package / "lost.py").write_text("import beside\n\nclass Leaves: ...\n")
    settings = ImageSettings(name="leafnet:1", packages=(str(package),), apt=("libgl1",), variant="control")
    made = tmp_path / "context"
    assemble(settings, "abc", made)
    for lock in (made / "lock").iterdir():
        lock.write_text("")
    dockerfile = (made / "Dockerfile").read_text()
    (made / "Dockerfile").write_text(re.sub(r" \\\n && uv pip check .*", "", dockerfile))
    monkeypatch.setattr(rehearsal, "PROOFS", {"control": (("python", "-c", "import shardline"),)})
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    # Nothing of the tests' own environment is in an image.
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.chdir(package.parent)
    (package.parent / "beside.py").write_text("")
    return made


def test_a_build_is_rehearsed_where_no_docker_is(context: Path, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    done = rehearsal.rehearse(context, room, "control", {"source": "leafnet.source:Leaves"})

    assert [text.split(" && ")[1] for text in done.not_run] == [
        "apt-get install --yes --no-install-recommends libgl1"
    ]
    bill = json.loads((room / "opt" / "shardline" / "sbom.json").read_text())
    held = {item["name"] for item in bill["components"] if item["purl"].startswith("pkg:pypi/")}
    assert held == {"shardline", "leafnet", "pip", "setuptools"}
    assert {"name": "org.opencontainers.image.revision", "value": "abc"} in bill["metadata"]["properties"]
    assert done.distributions == 4

    with pytest.raises(
        SettingsError, match=r"source=leafnet\.lost:Leaves cannot be imported in the image: .*beside"
    ):
        rehearsal.try_plugins(room, {"source": "leafnet.lost:Leaves"})


def test_a_step_that_fails_ends_a_rehearsal(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text('ARG STATUS="3"\nFROM a AS build\nRUN exit $STATUS\n')

    with pytest.raises(RunError, match="this step of the image ended with 3, see above: exit 3"):
        rehearsal.rehearse(tmp_path / "context", tmp_path / "room", "control", {})
