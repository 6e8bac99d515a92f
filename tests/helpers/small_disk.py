"""A disk of a few kilobytes, which is soon full."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(place: Path, kib: int) -> Iterator[Path]:
    """Mounts a disk of some KiB at a new directory; without the right to do so the test is skipped."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a disk that is soon full")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
