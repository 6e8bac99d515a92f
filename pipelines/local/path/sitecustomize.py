"""The working directory, last on the path: Python imports this module when it starts.

Nothing in that directory stands in for a module of Python or of a package then, as it would where it comes
first. A script that is run by its own path finds its neighbours as ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def hand_over() -> None:
    """Runs the module of this name that would have been imported without this one, if there is any."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != own]
    installed = PathFinder.find_spec("sitecustomize", sys.path)
    if installed is not None and installed.loader is not None:
        installed.loader.exec_module(module_from_spec(installed))


def arrange() -> None:
    """Puts the working directory at the end, and a script's own at the beginning of the path."""
    # There may be files that are called -m and -c, as the first argument is then.
    if sys.flags.safe_path and sys.argv[0] not in ("-m", "-c") and os.path.isfile(sys.argv[0]):
        sys.path.insert(0, os.path.dirname(os.path.realpath(sys.argv[0])))
    with contextlib.suppress(FileNotFoundError):  # it has been removed
        sys.path.append(os.getcwd())


if __name__ == "sitecustomize":
    hand_over()
    arrange()
