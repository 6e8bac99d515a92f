"""Temporary files of a run or job on this machine: one directory for all processes, removed however they end.

A process that is killed removes nothing itself, nor does a runner that is killed: the next one removes what
it finds of those that have ended, whose locks the kernel has released.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardline.pipelines.local import processes

_PREFIX, _NEW, _LOCK = "shardline-job-", "shardline-new-", "lock"


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Makes a directory for temporary files that lasts as long as the context."""
    parent = Path(tempfile.gettempdir())
    _sweep(parent)
    made = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = made.rename(parent / made.name.replace(_NEW, _PREFIX))  # from now on it may be swept
        try:
            yield path
        finally:
            with processes.undisturbed():
                shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


@contextlib.contextmanager
def of_this_process() -> Iterator[None]:
    """Has this process write its temporary files to a `directory` of its own while the context lasts."""
    before = tempfile.tempdir
    with directory() as path:
        tempfile.tempdir = str(path)
        try:
            yield
        finally:
            tempfile.tempdir = before


def _sweep(parent: Path) -> None:
    """Removes the directories of runners that were killed."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            lock = os.open(path / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
