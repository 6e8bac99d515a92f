"""`shardline new`: a project of one's own, of each kind of data."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardline.pipelines.cli.main import main
from shardline.pipelines.parameters import check_parameters, read_parameters
from shardline.pipelines.project import KINDS, own_requirement, write_project
from shardline.pipelines.settings import load_settings
from shardline.pipelines.spec import load_pipeline
from shardline.trainer.base import plugins
from tests.helpers.markdown import ROOT


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A project of each kind, all called leafnet."""
    root = tmp_path_factory.mktemp("projects")
    for kind in KINDS:
        write_project(root / kind, kind, "leafnet", "shardline[local]==0.1.0")
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(params=KINDS)
def project(request: pytest.FixtureRequest, projects: dict[str, Path]) -> Path:
    return projects[request.param]


def shardline(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_it_holds_all_that_is_needed_and_no_placeholder_of_the_template(project: Path) -> None:
    written = {path.relative_to(project): path for path in project.rglob("*") if path.is_file()}
    text = "\n".join(path.read_text() for path in written.values())

    wanted = "Makefile README.md AGENTS.md settings.toml schedules.toml params.toml params/vertex.toml "
    wanted += "requirements.txt leafnet/model.py leafnet/source.py tests/test_leafnet.py .gitignore "
    wanted += ".github/workflows/ci.yaml Dockerfile .dockerignore cloudbuild.yaml constraints.txt"
    assert {Path(name) for name in wanted.split()} <= set(written)
    assert "my_package" not in f"{text}{list(written)}"
    assert not re.findall(r"@[A-Z_]+@", text)
    assert len(written[Path("README.md")].read_text().splitlines()) < 40, "one screen"


@pytest.mark.parametrize("command", [["format", "--check"], ["check"]], ids=" ".join)
def test_its_own_lint_passes(project: Path, command: list[str]) -> None:
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache"]
    done = subprocess.run(ruff, cwd=project, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout


def test_settings_and_parameters_are_of_the_pipeline(project: Path) -> None:
    settings = load_settings(project / "settings.toml")

    assert settings.image.endswith("/leafnet:0.1.0")
    shared, sent = (read_parameters(project / name) for name in ("params.toml", "params/vertex.toml"))
    check_parameters(load_pipeline(ROOT / "compiled" / "retrain.yaml"), sent)
    assert sent == {**shared, **{name: sent[name] for name in ("champion_uri", "history_uri")}}


def test_plug_ins_are_where_the_parameters_say(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])
    given = read_parameters(project / "params.toml")
    plugins.check_reference(given["source"], "source")
    plugins.check_reference(given["model"], "model")


def test_the_command_shows_the_tree_and_what_to_do_next(tmp_path: Path) -> None:
    done = shardline("new", tmp_path / "leaf-net", "--kind", "table")

    assert done.exit_code == 0, done.output
    assert (tmp_path / "leaf-net" / "leaf_net" / "penguins.csv").is_file()
    lines = done.output.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'leaf-net'}: a package leaf_net with 333 penguins")
    assert "leaf_net/penguins.csv" in lines
    assert [line.strip() for line in lines[-3:]] == [f"cd {tmp_path / 'leaf-net'}", "make run", "make test"]


def test_it_may_be_written_into_a_new_repository_and_into_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert shardline("new", tmp_path, "--name", "leafnet").exit_code == 0

    again = shardline("new", tmp_path, "--name", "leafnet")
    assert again.exit_code == 2
    assert f"{tmp_path} is not an empty directory; name a new one" in again.output
    file = shardline("new", tmp_path / "Makefile", "--name", "leafnet")
    assert (file.exit_code, "is not an empty directory" in file.output) == (2, True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my-net", "is not a name of a package"),
        ("class", "is not a name of a package"),
        ("a__b", "is not a name of a package"),  # nor of an image
        ("leaf" * 11, "is not a name of a package"),
        ("json", "json is the name of another module"),
        ("trainer", "trainer is the name of another module"),
        ("wheels", "wheels is the name of another module or directory"),
        ("click", "click is the name of another module"),
    ],
)
def test_a_name_that_something_else_has_is_refused(tmp_path: Path, name: str, words: str) -> None:
    done = shardline("new", tmp_path / "x", "--name", name)

    assert done.exit_code == 2
    assert words in done.output
    assert "--name" in done.output
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("recorded", "requirement"),
    [
        (None, "shardline[local]==0.1.0"),
        ({"url": "file:///tmp/a.whl", "archive_info": {}}, "shardline[local] @ file:///tmp/a.whl"),
        ({"url": "file:///clone", "dir_info": {"editable": True}}, "shardline[local] @ file:///clone"),
        (
            {"url": "https://example.com/s.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "shardline[local] @ git+https://example.com/s.git@abc",
        ),
    ],
)
def test_it_installs_what_has_written_it(
    monkeypatch: pytest.MonkeyPatch, recorded: dict[str, object] | None, requirement: str
) -> None:
    class Installed:
        version = "0.1.0"

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return recorded and json.dumps(recorded)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())

    assert own_requirement() == requirement


def test_make_hands_the_requirement_to_pip_as_it_is(tmp_path: Path) -> None:
    write_project(tmp_path, "text", "leafnet", "shardline[local] @ https://a/$x.zip#subdirectory=s")
    done = subprocess.run(
        ["make", "--dry-run", ".venv/.installed"], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert "'shardline[local] @ https://a/$x.zip#subdirectory=s' -r requirements.txt " in done.stdout


def planned(project: Path, *words: str) -> str:
    """Returns what make would do, where everything is installed."""
    command = ["make", "--dry-run", "--old-file=.venv/.installed", *words]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("lacks", ["", "its packages", "a requirement", "is not wanted"])
def test_make_uses_the_active_environment_that_has_what_a_run_needs(tmp_path: Path, lacks: str) -> None:
    write_project(tmp_path, "text", "leafnet", "shardline")
    python = "false" if lacks == "its packages" else sys.executable
    if lacks == "a requirement":
        (tmp_path / "requirements.txt").write_text("# ours\n\nno-such-package==1\n")

    commands = planned(tmp_path, "run", f"PYTHON={python}", *["ACTIVE="] * (lacks == "is not wanted"))

    directory = ".venv/bin" if lacks else os.path.dirname(sys.executable)
    assert f"\n{directory}/shardline run compiled/retrain.yaml" in commands


def test_make_takes_its_own_variables_for_no_parameters(tmp_path: Path) -> None:
    write_project(tmp_path, "text", "leafnet", "shardline")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    before = sorted(tmp_path.rglob("*"))

    (run,) = re.findall(r"shardline run .*", planned(tmp_path, "run", "PIPELINE=other.yaml", "epochs=1"))
    assert run == "shardline run other.yaml --param 'epochs=1'"
    assert sorted(tmp_path.rglob("*")) == before


def test_make_builds_the_image_of_the_settings(tmp_path: Path) -> None:
    write_project(tmp_path, "text", "leafnet", "shardline")
    settings = tmp_path / "settings.toml"
    name = "europe-west4-docker.pkg.dev/my-project/shardline/leafnet:0.1.0"

    assert f"--build-arg EXTRA=image --build-arg REVISION= --tag {name} ." in planned(tmp_path, "image")
    text = settings.read_text().replace(name, f"{name}@sha256:{64 * 'a'}")
    settings.write_text(text.replace("# accelerator_", "accelerator_"))
    assert f"--build-arg EXTRA=gpu --build-arg REVISION= --tag {name} ." in planned(tmp_path, "image")
    assert f"podman push {name}\n" in planned(tmp_path, "push", "DOCKER=podman")
    assert f"_IMAGE={name},_EXTRA=gpu" in planned(tmp_path, "cloud-image")


def test_make_compiles_again_when_the_package_has_changed(tmp_path: Path) -> None:
    write_project(tmp_path, "text", "leafnet", "shardline")
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "retrain.yaml").touch()
    assert "shardline compile" not in planned(tmp_path, "run")
    for name in ("leafnet/model.py", "leafnet", "params.toml", "settings.toml"):
        later = time.time() + 10
        os.utime(tmp_path / name, (later, later))
        assert "shardline compile" in planned(tmp_path, "run")
        os.utime(tmp_path / name, (1, 1))


def test_check_names_every_placeholder(project: Path) -> None:
    done = shardline("check", project / "settings.toml", "--params", project / "params" / "vertex.toml")

    assert done.exit_code == 1
    for name in ("project is", "pipeline_root is", "champion_uri is", "history_uri is", "the image is"):
        assert name in done.output
    assert len(re.findall("^error", done.output, re.MULTILINE)) == 5, done.output
