"""Moves the working directory to the end of the module search; Python imports this module at start.

A file in that directory then cannot hide a module of Python or of a package. A script that is run by its path
still finds modules in its own directory.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec


class WorkingDirectory:
    """Finds modules in a directory after all other finders, those of editable installs included.

    An editable install has its own finder, which comes after all of `sys.path`.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module, or None; a module of a package has its own path."""
        return PathFinder.find_spec(name, [self._directory]) if path is None else None


def run_installed_sitecustomize() -> None:
    """Runs the environment's own sitecustomize, if there is one."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != own]
    installed = PathFinder.find_spec("sitecustomize", sys.path)
    if installed is not None and installed.loader is not None:
        installed.loader.exec_module(module_from_spec(installed))


def install_finder() -> None:
    """Adds the finder of the working directory, and puts a script's own directory first on the path."""
    # With python -m and -c the first argument is "-m" or "-c", which may also name a file.
    if sys.flags.safe_path and sys.argv[0] not in ("-m", "-c") and os.path.isfile(sys.argv[0]):
        sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
    with contextlib.suppress(FileNotFoundError):  # it has been removed
        sys.meta_path.append(WorkingDirectory(os.getcwd()))


if __name__ == "sitecustomize":
    run_installed_sitecustomize()
    install_finder()
