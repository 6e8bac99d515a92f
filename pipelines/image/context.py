"""Build context of the image: the directory for docker, with Shardline's wheel and the user's code."""

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
#: Files of a clone that its wheel is built from; the rings are links below the package.
_SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
_CACHES = shutil.ignore_patterns("__pycache__", "*.pyc")
#: Project file for a package without one: it contains all files, and has the package's name.
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
    """Writes the build context of an image, with its Dockerfile, for `docker build DIRECTORY`.

    The image's paths are relative to here; `revision` is git's of the code, "" where none is known. Raises
    SettingsError when a package or the requirements cannot be used, or the directory is neither new nor
    empty, and RunError when Shardline's own wheel cannot be built.
    """
    requirements = read_requirements(image)
    _check_packages(image)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise SettingsError(f"{directory} is not empty; name a new directory for the build context")
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
    """Returns the user's part of an image: names of packages, number of requirements, apt, base, user.

    Raises SettingsError as `assemble` does.
    """
    _check_packages(image)
    return {
        "packages": [Path(package).resolve().name for package in image.packages],
        "requirements": len(read_requirements(image).splitlines()),
        "apt": list(image.apt),
        "base": image.base,
        "user": image.user,
    }


def dockerfile(image: ImageSettings, revision: str) -> str:
    """Returns the Dockerfile with the settings as values of its arguments."""
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
    reserved = {*sys.stdlib_module_names, "shardline"}
    reserved |= {key.replace("-", "_") for key in pinned(lock_of(image.variant))}
    named: dict[str, Path] = {}
    for package in map(Path, image.packages):
        name = package.resolve().name
        if not package.is_dir():
            raise SettingsError(
                f"[image] packages: no directory {package}; write paths relative to the settings file"
            )
        if not is_project(package) and (not name.isidentifier() or not any(package.rglob("*.py"))):
            raise SettingsError(
                f"[image] packages: {package} is neither a package (a directory with a module's name and .py "
                f"files) nor a project (a directory with one of {', '.join(PROJECT_FILES)})"
            )
        if not is_project(package) and name.lower() in reserved:
            raise SettingsError(
                f"[image] packages: the image already has a module {name}, which {package} would replace; "
                "rename the directory"
            )
        other = named.setdefault(name.lower(), package)
        if other is not package:
            raise SettingsError(
                f"[image] packages: {other} and {package} have the same name; rename one of the directories"
            )


def files_of(directory: Path) -> list[Path]:
    """Returns the files of a directory, relative to it: those that git tracks or does not ignore.

    Without git, all that are not hidden: .env and the like are not code.
    """
    files = _git_files(directory, "--cached", "--others", "--exclude-standard")
    if not files:
        for root, directories, names in os.walk(directory):
            directories[:] = sorted(name for name in directories if name[0] != "." and name not in NOT_CODE)
            files += [Path(root, name).relative_to(directory) for name in sorted(names) if name[0] != "."]
    return [file for file in files if (directory / file).is_file() and "__pycache__" not in file.parts]


def ignored_files(directory: Path) -> list[Path]:
    """Returns the files of a directory that git ignores, and the image lacks, without caches."""
    ignored = _git_files(directory, "--others", "--ignored", "--exclude-standard")
    return [
        file
        for file in ignored
        if file.suffix != ".pyc" and not any(part[0] == "." or part in NOT_CODE for part in file.parts)
    ]


def _git_files(directory: Path, *options: str) -> list[Path]:
    """Returns the files of a directory that git lists; empty without git."""
    command = ["git", "ls-files", "-z", *options, "."]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return sorted(Path(name) for name in done.stdout.split("\0") if name)


def build_own_wheel(directory: Path) -> Path:
    """Builds Shardline's own wheel with pip into a directory, from this clone or as it was installed.

    Raises RunError with pip's message when that fails.
    """
    root = Path(shardline.__file__).parents[1]
    if all((root / name).is_file() for name in _SOURCES):
        with tempfile.TemporaryDirectory() as name:  # from a copy: setuptools leaves files where it builds
            shutil.copytree(root / _NAME, Path(name, _NAME), ignore=_CACHES)
            for file in _SOURCES:
                shutil.copy(root / file, name)
            return _wheel(name, directory)
    try:
        distribution = metadata.distribution(_NAME)
    except metadata.PackageNotFoundError:
        raise SettingsError(
            "Shardline is not installed by pip or uv; install it with one of them, or run this in a clone"
        ) from None
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")  # PEP 610
    if "url" not in direct:
        return _wheel(f"{_NAME}=={distribution.version}", directory)
    vcs = direct.get("vcs_info")
    url = f"{vcs['vcs']}+{direct['url']}@{vcs['commit_id']}" if vcs else direct["url"]
    return _wheel(f"{_NAME} @ {url}", directory)


def _wheel(source: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory)]
    # Without an index where the build tools are installed, as with the extra dev.
    if all(importlib.util.find_spec(tool) for tool in ("setuptools", "wheel")):
        command.append("--no-build-isolation")
    done = subprocess.run([*command, source], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"pip cannot build a wheel of {source}: {(done.stderr or done.stdout).strip()}")
    return next(directory.glob(f"{_NAME}-*.whl"))
