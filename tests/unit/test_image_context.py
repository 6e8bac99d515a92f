"""What docker builds the image from: a user's packages, projects and locked requirements, a Dockerfile."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardline.pipelines.image import context as contexts
from shardline.pipelines.image.contents import LOCKS, pinned, read_requirements
from shardline.pipelines.image.context import assemble, dockerfile, files_of, ignored_files, user_contents
from shardline.pipelines.image.settings import ImageSettings
from shardline.trainer.base.errors import SettingsError

HASH = f"--hash=sha256:{64 * '0'}"


def image(**changes: Any) -> ImageSettings:
    return ImageSettings(**{"name": "leafnet:1", "variant": "cpu", **changes})


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_packages_become_projects_and_projects_are_copied_as_git_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "build_own_wheel", lambda directory: write(directory / "shardline.whl"))
    write(tmp_path / "leafnet" / "data" / "names.txt")
    write(tmp_path / "leafnet" / "model.py")
    write(tmp_path / "heavy" / "pyproject.toml")
    write(tmp_path / "heavy" / "src" / "heavynet" / "__init__.py")
    write(tmp_path / "heavy" / ".venv" / "pip.py")
    write(tmp_path / "heavy" / "runs" / "model.keras")
    packages = (str(tmp_path / "leafnet"), str(tmp_path / "heavy"))
    assemble(image(packages=packages), "abc", tmp_path / "made")

    made = tmp_path / "made"
    assert sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()) == [
        "Dockerfile",
        "lock/build.txt",
        "lock/image.txt",
        "projects/heavy/pyproject.toml",
        "projects/heavy/src/heavynet/__init__.py",
        "projects/leafnet/leafnet/data/names.txt",
        "projects/leafnet/leafnet/model.py",
        "projects/leafnet/pyproject.toml",
        "requirements.txt",
        "wheels/shardline.whl",
    ]


def test_what_git_ignores_stays_here(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    write(tmp_path / ".gitignore", "photos/\n")
    write(tmp_path / "leafnet" / "model.py")
    write(tmp_path / "leafnet" / "photos" / "1.png")

    write(tmp_path / "leafnet" / "__pycache__" / "model.pyc")

    assert files_of(tmp_path / "leafnet") == [Path("model.py")]
    assert ignored_files(tmp_path / "leafnet") == [Path("photos/1.png")]


def test_without_git_what_is_hidden_stays_here(tmp_path: Path) -> None:
    for name in ("model.py", ".env", ".keys/token"):
        write(tmp_path / "leafnet" / name)

    assert files_of(tmp_path / "leafnet") == [Path("model.py")]
    assert ignored_files(tmp_path / "leafnet") == []


def test_two_packages_of_one_name_are_refused(tmp_path: Path) -> None:
    packages = [str(write(tmp_path / place / "leafnet" / "model.py").parent) for place in "ab"]

    for refuse in (contexts.user_contents, lambda image: assemble(image, "", tmp_path / "made")):
        with pytest.raises(SettingsError, match=r"a/leafnet and .*b/leafnet have the same name"):
            refuse(image(packages=packages))


def test_settings_are_lines_of_the_dockerfile() -> None:
    base = f"python:3.12@sha256:{64 * 'b'}"
    text = dockerfile(image(variant="gpu", base=base, apt=("libgl1", "g++=4:12"), user="1000:100"), "abc")

    assert set(re.findall(r"^ARG .*$", text, re.MULTILINE)) == {
        f'ARG BASE="{base}"',
        'ARG VARIANT="gpu"',
        'ARG APT="libgl1 g++=4:12"',
        'ARG RUN_AS="1000:100"',
        'ARG REVISION="abc"',
    }
    without = dockerfile(image(), "")
    assert re.search(r"^ARG BASE=python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}$", without, re.MULTILINE)
    assert 'ENTRYPOINT ["shardline"]' in dockerfile(image(variant="control"), "")


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("leafnet", [], "no directory .*leafnet; write paths relative to the settings file"),
        ("leaf-net", ["model.py"], "leaf-net is neither a package"),
        (
            "photos",
            ["1.png"],
            "photos is neither a package .* nor a project .a directory with",
        ),
        ("keras", ["model.py"], "the image already has a module keras"),
        ("json", ["model.py"], "the image already has a module json"),
    ],
)
def test_a_directory_without_code_or_with_anothers_name_is_refused(
    tmp_path: Path, name: str, files: list[str], message: str
) -> None:
    for file in files:
        write(tmp_path / name / file)

    with pytest.raises(SettingsError, match=message):
        user_contents(image(packages=(str(tmp_path / name),)))


def test_locked_requirements_go_in_without_shardline_itself(tmp_path: Path) -> None:
    text = (
        f"# made by uv\n--index-url https://example.com/simple\ntimm==1.0.1 \\\n    {HASH} \\\n    {HASH}\n"
        f"    # via leafnet\nshardline==0.1.0 \\\n    {HASH}\n"
        f"numpy=={pinned(LOCKS / 'cpu.txt')['numpy']} ; python_version > '3' {HASH}\n"
    )
    read = read_requirements(image(requirements=str(write(tmp_path / "requirements.txt", text))))

    assert read.splitlines() == [
        "--index-url https://example.com/simple",
        f"timm==1.0.1 {HASH} {HASH}",
        f"numpy=={pinned(LOCKS / 'cpu.txt')['numpy']} ; python_version > '3' {HASH}",
    ]
    assert read_requirements(image()) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "timm>=1\n",
            r"line 1: 'timm>=1' is not a locked version \(NAME==VERSION\); lock them: uv pip compile",
        ),
        ("a==1\n\ntimm\n", "line 3: 'timm' is not a locked version"),
        ("-r other.txt\n", "line 1: '-r other.txt' is not a locked version"),
        ("-e .\n", "line 1: '-e .' is not a locked version"),
        (f"a==1 {HASH}\nb==1\n", "some requirements have hashes, and others have none"),
        ("numpy==1.0\n", r"names numpy 1.0, and the image has \d.*; lock them: .* -c .*/lock/cpu.txt"),
    ],
)
def test_requirements_that_are_not_locked_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "requirements.txt", text)

    with pytest.raises(SettingsError, match=message):
        read_requirements(image(requirements=str(path)))


@pytest.mark.parametrize(
    "line", ["--extra-index-url {}/simple", "nets @ git+{}/nets@1", "nets @ {}/nets.whl"]
)
def test_a_secret_in_a_url_is_refused_and_not_printed(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "requirements.txt", f"a==1\n{line.format('https://me:TOKEN@example.com')}\n")

    with pytest.raises(SettingsError, match="line 2: a URL with a user or token") as refused:
        read_requirements(image(requirements=str(path)))
    assert "TOKEN" not in str(refused.value)
