"""Build context of the image: the directory that docker gets, made of Shardline and of what is a user's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import shardline
from shardline.pipelines.image.contents import (
    LOCKS,
    NOT_CODE,
    PROJECT_FILES,
    is_project,
    lock_of,
    pinned,
    read_requirements,
)
from shardline.pipelines.image.settings import ImageSettings
from shardline.trainer.base.errors import RunError, SettingsError

DOCKERFILE = Path(__file__).with_name("Dockerfile")

_NAME = "shardline"
#: Files of a clone that its wheel is built of; the rings are links below the package.
_SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
_CACHES = shutil.ignore_patterns("__pycache__", "*.pyc")
#: A package without a project of its own becomes one: with all of its files, and under its own name.
_PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0"

[tool.setuptools.packages.find]
include = ["{name}*"]

[tool.setuptools.package-data]
"*" = ["*"]
"""

_TRAINER = 'ENTRYPOINT ["python", "-m", "shardline.trainer.task"]'


def assemble(image: ImageSettings, revision: str, directory: Path) -> None:
    """Writes everything that the image is built of into a directory, with its Dockerfile.

    Args:
        image: What goes into it, with its variant, and with paths that are true from here.
        revision: Git revision of the code; "" where none is known.
        directory: Where, new or empty; `docker build DIRECTORY` does the rest.

    Raises:
        SettingsError: When a package or the requirements cannot be taken, and why.
        RunError: When Shardline's own wheel cannot be built.
    """
    requirements = read_requirements(image)
    _check_packages(image)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise SettingsError(f"{directory} is not empty; give a new directory for the build context")
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("lock", "wheels", "projects"):
        (directory / name).mkdir()
    shutil.copy(LOCKS / "build.txt", directory / "lock")
    shutil.copy(lock_of(image.variant), directory / "lock" / "image.txt")
    (directory / "requirements.txt").write_text(requirements, encoding="utf-8")
    for package in map(Path, image.packages):
        name = package.resolve().name
        project = code = directory / "projects" / name
        if not is_project(package):
            code = project / name
            project.mkdir()
            (project / "pyproject.toml").write_text(_PROJECT.format(name=name), encoding="utf-8")
        for file in files_of(package):
            (code / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(package / file, code / file)
    build_own_wheel(directory / "wheels")
    (directory / "Dockerfile").write_text(dockerfile(image, revision), encoding="utf-8")


def user_contents(image: ImageSettings) -> dict[str, Any]:
    """Returns what is a user's own in an image: names of packages, how many requirements, apt, base, user.

    Raises SettingsError as `assemble` does.
    """
    lock_of(image.variant)
    _check_packages(image)
    return {
        "packages": [Path(package).resolve().name for package in image.packages],
        "requirements": len(read_requirements(image).splitlines()),
        "apt": list(image.apt),
        "base": image.base,
        "user": image.user,
    }


def dockerfile(image: ImageSettings, revision: str) -> str:
    """Returns the Dockerfile with what the settings say as the values of its arguments."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    values = {
        "BASE": image.base,
        "VARIANT": image.variant,
        "APT": " ".join(image.apt),
        "RUN_AS": image.user,
        "REVISION": revision,
    }
    for name, value in values.items():
        if value:
            text = re.sub(rf"^ARG {name}=.*$", f'ARG {name}="{value}"', text, count=1, flags=re.MULTILINE)
    return text.replace(_TRAINER, 'ENTRYPOINT ["shardline"]') if image.variant == "control" else text


def _check_packages(image: ImageSettings) -> None:
    """Raises SettingsError when a directory of [image] packages has no code, or another module's name."""
    taken = {*sys.stdlib_module_names, "shardline"}
    taken |= {key.replace("-", "_") for key in pinned(lock_of(image.variant))}
    named: dict[str, Path] = {}
    for package in map(Path, image.packages):
        name = package.resolve().name
        if not package.is_dir():
            raise SettingsError(
                f"[image] packages: no directory {package}; give paths from the settings file's directory"
            )
        if not is_project(package) and (not name.isidentifier() or not any(package.rglob("*.py"))):
            raise SettingsError(
                f"[image] packages: {package} is no package (a directory called as a module is, with .py "
                f"files) and no project (a directory with one of {', '.join(PROJECT_FILES)})"
            )
        if not is_project(package) and name.lower() in taken:
            raise SettingsError(
                f"[image] packages: the image has a module {name} already, whose place {package} would take; "
                "give it another name"
            )
        other = named.setdefault(name.lower(), package)
        if other is not package:
            raise SettingsError(
                f"[image] packages: {other} and {package} have one name; rename one of the directories"
            )


def files_of(directory: Path) -> list[Path]:
    """Returns the files of a directory, relative to it: those that git knows or does not ignore.

    Without git all, but none that is hidden: .env and its like are no code.
    """
    found = _git_files(directory, "--cached", "--others", "--exclude-standard")
    if not found:
        for root, directories, names in os.walk(directory):
            directories[:] = sorted(name for name in directories if name[0] != "." and name not in NOT_CODE)
            found += [Path(root, name).relative_to(directory) for name in sorted(names) if name[0] != "."]
    return [file for file in found if (directory / file).is_file() and "__pycache__" not in file.parts]


def ignored_files(directory: Path) -> list[Path]:
    """Returns the files of a directory that do not go into the image since git ignores them, caches aside."""
    ignored = _git_files(directory, "--others", "--ignored", "--exclude-standard")
    return [
        file
        for file in ignored
        if file.suffix != ".pyc" and not any(part[0] == "." or part in NOT_CODE for part in file.parts)
    ]


def _git_files(directory: Path, *options: str) -> list[Path]:
    """Returns what git lists of a directory; nothing where there is no git."""
    command = ["git", "ls-files", "-z", *options, "."]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return sorted(Path(name) for name in done.stdout.split("\0") if name)


def build_own_wheel(directory: Path) -> Path:
    """Writes Shardline's own wheel into a directory: of this clone, or what is installed, by pip.

    Raises RunError when pip cannot, which says why.
    """
    root = Path(shardline.__file__).parents[1]
    if all((root / name).is_file() for name in _SOURCES):
        with tempfile.TemporaryDirectory() as name:  # of a copy: setuptools leaves files where it builds
            shutil.copytree(root / _NAME, Path(name, _NAME), ignore=_CACHES)
            for file in _SOURCES:
                shutil.copy(root / file, name)
            return _wheel(name, directory)
    try:
        distribution = metadata.distribution(_NAME)
    except metadata.PackageNotFoundError:
        raise SettingsError(
            "Shardline is not installed here by pip or uv; install it so, or run this in a clone of it"
        ) from None
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")  # PEP 610
    if "url" not in direct:
        return _wheel(f"{_NAME}=={distribution.version}", directory)
    vcs = direct.get("vcs_info")
    url = f"{vcs['vcs']}+{direct['url']}@{vcs['commit_id']}" if vcs else direct["url"]
    return _wheel(f"{_NAME} @ {url}", directory)


def _wheel(source: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory)]
    # Without an index where what builds it is installed, as with the extra dev.
    if all(importlib.util.find_spec(tool) for tool in ("setuptools", "wheel")):
        command.append("--no-build-isolation")
    done = subprocess.run([*command, source], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"pip makes no wheel of {source}: {(done.stderr or done.stdout).strip()}")
    return next(directory.glob(f"{_NAME}-*.whl"))
