"""The working directory, asked last for a module: Python imports this module when it starts.

Nothing in that directory stands in for a module of Python or of a package then, as it would where it comes
first. A script that is run by its own path finds its neighbours as ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec


class WorkingDirectory:
    """Finds modules in a directory that all others have been looked for in, those of editable installs too.

    An editable install has a finder of its own, which comes after all of `sys.path`.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """Returns where the module is, or None for a module of a package, which has a path of its own."""
        return PathFinder.find_spec(name, [self._directory]) if path is None else None


def run_installed_sitecustomize() -> None:
    """Runs the module of this name that would have been imported without this one, if there is any."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != own]
    installed = PathFinder.find_spec("sitecustomize", sys.path)
    if installed is not None and installed.loader is not None:
        installed.loader.exec_module(module_from_spec(installed))


def install_finder() -> None:
    """Has the working directory asked last, and puts a script's own at the beginning of the path."""
    # There may be files that are called -m and -c, as the first argument is then.
    if sys.flags.safe_path and sys.argv[0] not in ("-m", "-c") and os.path.isfile(sys.argv[0]):
        sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
    with contextlib.suppress(FileNotFoundError):  # it has been removed
        sys.meta_path.append(WorkingDirectory(os.getcwd()))


if __name__ == "sitecustomize":
    run_installed_sitecustomize()
    install_finder()
