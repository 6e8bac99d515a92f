"""Where a model comes from: releases of what it was exported with, and the revision of the code around it."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata

_PACKAGES = ("shardline", "tensorflow", "keras", "numpy")

# As `git rev-parse HEAD`, with "-dirty" where files differ from it.
_DESCRIBE = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def read_versions() -> dict[str, str]:
    """Returns the releases of Python and of the packages that decide what an export is."""
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
    }


def read_revision() -> str | None:
    """Returns the git revision of the working directory, or the image's own; None where neither is known."""
    try:
        described = subprocess.run(_DESCRIBE, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        # There is no git in the image: docker/Dockerfile writes down what it was built from.
        return os.environ.get("SHARDLINE_REVISION") or None
    return described.stdout.strip()
