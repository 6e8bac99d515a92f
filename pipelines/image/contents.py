"""Contents of the image: the modules that it holds, as settings say, and plug-ins of a run that it lacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from shardline.components.run_plugins import plugins_of
from shardline.pipelines.image.requirements import LOCKS, normal, pinned
from shardline.pipelines.image.settings import ImageSettings
from shardline.trainer import plugins
from shardline.trainer.errors import ModelError

#: Files by which a directory is a project, which is installed, and not a package, which is copied.
PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py")

#: Directories without code of their own, also where git does not say so.
NOT_CODE = {"build", "dist", "node_modules", "runs", "site-packages", "venv", "__pycache__"}


def missing_from_image(image: ImageSettings, parameters: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the plug-ins of a run, one line each: those that the image does not hold.

    Args:
        image: The image, as the settings have it, with paths that are true from here (`ImageSettings.below`).
        parameters: Parameters of the run, by name; those that name no module are not looked at.
    """
    found = []
    for name, reference in plugins_of(parameters).items():
        module = reference.partition(":")[0]
        if not holds(image, module):
            found.append(f"{name}={reference}: {_lacks(image, module)}")
        elif file := _source_in(image, module):
            try:
                plugins.look_in(file, reference, name)
            except ModelError as error:
                found.append(error.line)
    return found


def _source_in(image: ImageSettings, module: str) -> Path | None:
    """Returns the Python file of a module in the packages of [image] that are on this machine."""
    files = (file for package in image.packages for file in _Modules(Path(package)).files(module))
    return next(files, None)


def _lacks(image: ImageSettings, module: str) -> str:
    top = module.partition(".")[0]
    if top in {Path(package).resolve().name for package in image.packages}:
        return f"{top} in packages of [image] has no module {module}; name one that it has"
    return (
        f"the image {image.name} has no module {top}; add its directory to the settings, [image] packages = "
        f'["../{top}"] (a path from the settings file), or its distribution to [image] requirements, and '
        "build the image again"
    )


def holds(image: ImageSettings, module: str) -> bool:
    """Whether the image has a module, as far as can be told here without building it."""
    top = module.partition(".")[0]
    if top == "shardline" or top in sys.stdlib_module_names:
        return True
    if any(module in _Modules(Path(package)) for package in image.packages):
        return True
    own = set(pinned(Path(image.requirements))) if image.requirements else set()
    locked = own | set(pinned(LOCKS / f"{image.variant or 'cpu'}.txt"))
    if normal(top) in locked:
        return True
    # What a distribution calls its modules is known where it is installed.
    installed = metadata.packages_distributions()
    return any(normal(name) in locked for name in installed.get(top, ())) or (
        top not in installed and not own <= {normal(name) for names in installed.values() for name in names}
    )


def is_project(directory: Path) -> bool:
    """Whether a directory of [image] packages is a project, which is installed."""
    return any((directory / name).is_file() for name in PROJECT_FILES)


class _Modules:
    """Modules that a directory of [image] packages brings: its own, or those anywhere in a project."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __contains__(self, module: str) -> bool:
        first, *rest = module.split(".")
        if not is_project(self._directory):
            own = self._directory.resolve()
            return first == own.name and (not own.is_dir() or _has(own.parent, [first, *rest]))
        return any(_has(Path(root), [first, *rest]) for root in self._roots())

    def files(self, module: str) -> Iterator[Path]:
        """Yields the Python files that are the module."""
        if module in self:
            project = is_project(self._directory)
            for root in self._roots() if project else (self._directory.resolve().parent,):
                path = Path(root).joinpath(*module.split("."))
                yield from filter(Path.is_file, (path / "__init__.py", path.with_name(f"{path.name}.py")))

    def _roots(self) -> Iterator[str]:
        for root, directories, _ in os.walk(self._directory):
            directories[:] = [name for name in directories if name[0] != "." and name not in NOT_CODE]
            yield root


def _has(root: Path, parts: Iterable[str]) -> bool:
    path = root.joinpath(*parts)
    # Also a module that was compiled, as in fast.cpython-311-x86_64-linux-gnu.so.
    return path.is_dir() or any(
        found.suffix in (".py", ".so") for found in path.parent.glob(f"{path.name}.*")
    )
