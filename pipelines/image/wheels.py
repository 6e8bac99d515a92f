"""Wheels of the image's own code: Shardline as it is installed or cloned here, and packages of a user."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import shardline
from shardline.trainer.errors import RunError, SettingsError

_NAME = "shardline"
#: Files of a clone that its wheel is built of; the rings are links below the package.
_SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
#: What an installer has added to a wheel.
_INSTALLERS = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
_CACHES = shutil.ignore_patterns("__pycache__", "*.pyc")
#: The same bytes whenever it is packed, so that a build finds its layers again.
_PACKED = (1980, 1, 1, 0, 0, 0)


def own_wheel(directory: Path) -> Path:
    """Writes Shardline's own wheel into a directory, of the source that runs here or of the installed files.

    Raises RunError when the source does not build, SettingsError when nothing says what is installed.
    """
    root = Path(shardline.__file__).parents[1]
    if all((root / name).is_file() for name in _SOURCES):
        return _built(root, directory)
    try:
        distribution = metadata.distribution(_NAME)
    except metadata.PackageNotFoundError:
        distribution = None
    files = {
        str(file): Path(str(file.locate()))
        for file in (distribution.files if distribution else None) or ()
        if ".." not in file.parts and "__pycache__" not in file.parts
    }
    info = next((Path(name).parent for name in files if name.endswith(".dist-info/METADATA")), None)
    if distribution is None or info is None or f"{_NAME}/__init__.py" not in files:
        raise SettingsError(
            f"the installed files of Shardline are not recorded in {root}; install it with pip or uv, or run "
            "this in a clone of it"
        )
    content = {
        name: path.read_bytes()
        for name, path in files.items()
        if not (Path(name).parent == info and Path(name).name in _INSTALLERS)
    }
    return _pack(directory / f"{_NAME}-{distribution.version}-py3-none-any.whl", str(info), content)


def package_wheel(package: Path, files: Iterable[Path], directory: Path) -> Path:
    """Writes files of a directory with modules as a wheel, under the directory's name and the version 0."""
    package = package.resolve()
    content = {Path(package.name, file).as_posix(): (package / file).read_bytes() for file in files}
    info = f"{package.name}-0.dist-info"
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {package.name}\nVersion: 0\n".encode()
    content[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: shardline\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    return _pack(directory / f"{package.name}-0-py3-none-any.whl", info, content)


def _pack(path: Path, info: str, content: Mapping[str, bytes]) -> Path:
    """Writes a wheel with its RECORD, as PyPA's specification of the binary distribution format has it."""
    record = ""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in content.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            quoted = f'"{name}"' if "," in name else name
            record += f"{quoted},sha256={digest},{len(data)}\n"
            wheel.writestr(zipfile.ZipInfo(name, _PACKED), data, zipfile.ZIP_DEFLATED)
        wheel.writestr(zipfile.ZipInfo(f"{info}/RECORD", _PACKED), f"{record}{info}/RECORD,,\n")
    return path


def _built(root: Path, directory: Path) -> Path:
    """Builds the wheel of a clone, of a copy of its sources: setuptools leaves files where it builds."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        shutil.copytree(root / _NAME, source / _NAME, ignore=_CACHES)
        for file in _SOURCES:
            shutil.copy(root / file, source)
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(directory),
        ]
        # Without an index where what builds it is installed, as with the extra dev.
        if all(importlib.util.find_spec(tool) for tool in ("setuptools", "wheel")):
            command.append("--no-build-isolation")
        done = subprocess.run([*command, name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"the wheel of {root} could not be built: {(done.stderr or done.stdout).strip()}")
    return next(directory.glob(f"{_NAME}-*.whl"))
