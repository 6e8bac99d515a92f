"""Code of a user in components: packages that a task unpacks first, as KFP's `embedded_artifact_path`."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.components.text import enumerate_names
from shardline.components.text import size as size_text
from shardline.trainer.base import code, plugins
from shardline.trainer.base.errors import SettingsError

#: The components that run code of a user, as KFP names them.
_RUN_CODE = (
    *("detect-changes", "preprocess", "plan-shards", "write-shards", "rehearse", "train", "export-validate"),
    "plan-study",
)
#: Longest text: with the rest of a task's source it is one argument, which Linux limits to 128 KiB.
_LONGEST = 90_000
#: Largest file in bytes, other than one of Python, that is packed.
_LARGEST_DATA = 100_000
_UNPACK = "from shardline.trainer.base.code import unpack\nunpack('{}')\n"
_UNPACKED = re.compile(re.escape(_UNPACK).replace(r"\{\}", "([^']*)"))


@dataclass(frozen=True, kw_only=True)
class CodeSettings:
    """Code that a compiled pipeline holds.

    Attributes:
        packages: Packages and modules of the working directory, or installed ones, by their top-level names.
    """

    packages: tuple[str, ...] = ()


def pack(packages: Iterable[str]) -> str:
    """Returns packages and modules of this machine as a text; "" for none.

    Raises SettingsError when there is no such package, or the text is too long for a task's source.
    """
    files = {name: content for package in packages for name, content in files_of(package).items()}
    text = code.pack(files) if files else ""
    if len(text) > _LONGEST:
        raise SettingsError(
            f"the code of {', '.join(packages)} has {size_text(len(text))} when packed, and a pipeline takes "
            f"{size_text(_LONGEST)}: {largest(files)}; copy a large package into the image, and name only "
            "others in [code] packages"
        )
    return text


def files_of(package: str) -> dict[str, bytes]:
    """Returns the packed files of a package, or the one of a module, by names relative to its directory.

    Raises SettingsError when there is no such package.
    """
    paths = _paths(package)
    # Without it, a package of the same name anywhere on the path would come before it.
    files = {} if f"{package}.py" in paths else {f"{package}/__init__.py": b""}
    return files | {name: path.read_bytes() for name, path in paths.items() if not _is_large(path)}


def left_out(package: str) -> list[str]:
    """Returns the files of a package that are too large to be packed, each with its size."""
    large = {name: path for name, path in _paths(package).items() if _is_large(path)}
    return [f"{name} ({size_text(path.stat().st_size)})" for name, path in large.items()]


def _is_large(path: Path) -> bool:
    return path.suffix != ".py" and path.stat().st_size > _LARGEST_DATA


def _paths(package: str) -> dict[str, Path]:
    if (place := _find(package)) is None:
        raise SettingsError(f"[code] packages: there is no package or module {package!r}, here or installed")
    if place.is_file():
        return {f"{package}.py": place}
    return {f"{package}/{path.relative_to(place).as_posix()}": path for path in code.files_in(place)}


def _find(package: str) -> Path | None:
    """Returns the directory of a package, or the file of a module in Python; None where there is neither."""
    spec = plugins.find(package) if package.isidentifier() else None
    places = [*(spec.submodule_search_locations or filter(None, [spec.origin]))] if spec else []
    # The directory of a project, around its package of that name, is none; one of packages alone is.
    found = [
        path
        for path in map(Path, places)
        if path.suffix == ".py"
        or (path.is_dir() and (any(path.glob("*.py")) or not (path / package).is_dir()))
    ]
    return found[0] if found else None


def with_imported(packages: Iterable[str]) -> list[str]:
    """Returns packages of one's own and those that they import, at any distance, sorted.

    Names of installed distributions, of Python and of Shardline are left out.
    """
    found, named = dict[str, None](), [*packages]
    while named:
        package = named.pop()
        if package not in found and is_own(package):
            found[package] = None
            named += plugins.packages(_imports(files_of(package)))
    return sorted(found)


def _imports(files: Mapping[str, bytes]) -> Iterator[str]:
    for content in (files[name] for name in files if name.endswith(".py")):
        with contextlib.suppress(SyntaxError, ValueError):  # the run reports it
            for node in ast.walk(ast.parse(content)):
                if isinstance(node, ast.Import):
                    yield from (alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    yield node.module


def is_own(package: str) -> bool:
    """Whether a package is on this machine, but neither an installed distribution nor a part of Python."""
    place = None if package in sys.stdlib_module_names else _find(package)
    return place is not None and not {"site-packages", "dist-packages"} & {*place.parts}


def largest(files: Mapping[str, bytes]) -> str:
    """Returns the names and sizes of the largest files."""
    names = sorted(files, key=lambda name: -len(files[name]))
    return enumerate_names([f"{name} ({size_text(len(files[name]))})" for name in names], 3)


def with_code(component: Any, text: str) -> Any:
    """Returns a KFP component that unpacks a text of `pack` first, if it is one that runs a user's code."""
    if text and component.name in _RUN_CODE:
        command = component.component_spec.implementation.container.command
        command[-1] = _UNPACK.format(text) + command[-1]
    return component


def read_packed(argument: str) -> Mapping[str, bytes]:
    """Returns the files that an argument of a command unpacks, as `with_code` writes it; none for others."""
    found = _UNPACKED.match(argument)
    return code.read_files(found[1]) if found else {}
