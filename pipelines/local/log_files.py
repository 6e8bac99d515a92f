"""Logs of a run on this machine, as lines for a person."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from shardline.components import run_record
from shardline.components.run_record import LOG, REPLICAS
from shardline.components.vertex.logs import readable
from shardline.trainer.errors import SettingsError

#: Seconds between two looks at a file that grows.
_PAUSE_S = 0.3


def read_log(directory: Path, task: str = "", replica: str = "", *, follow: bool = False) -> Iterator[str]:
    """Yields what tasks have printed, each line after its task's name, or what a replica has printed.

    What KFP writes of a task's input is left out; the files have it.

    Args:
        directory: The run directory.
        task: Only of this task; "" for all.
        replica: "worker-0": the whole log of this replica of a custom job.
        follow: Whether to wait for more until the run has ended.

    Raises:
        SettingsError: When there is no such task or replica.
    """
    if replica:
        yield from readable(_lines(_replica_log(directory, task, replica), directory, follow))
        return
    found = False
    for name, line in run_record.by_task(_lines(directory / LOG, directory, follow)):
        if name == task or not task:
            found = True
            yield f"{name} | {line}"
    if task and not found and not follow:
        log = (directory / LOG).read_text(encoding="utf-8").splitlines()
        known = run_record.tasks(log)
        if task not in known:
            raise SettingsError(f"no task {task!r} has run; these have: {', '.join(known) or 'none'}")


def _replica_log(directory: Path, task: str, replica: str) -> Path:
    logs = sorted((directory / REPLICAS).glob(f"{task or '*'}/*.log"))
    for path in logs:
        if path.stem == replica:
            return path
    known = ", ".join(dict.fromkeys(path.stem for path in logs))
    raise SettingsError(
        f"no replica {replica!r} has run"
        + (f" in {task!r}" if task else "")
        + f"; these have: {known or 'none'}"
    )


def _lines(path: Path, directory: Path, follow: bool) -> Iterator[str]:
    """Yields the lines of a file, and with `follow` those that come until the run has ended."""
    rest = ""
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            # Asked before reading: what is written before the end is read after it.
            ended = not follow or not _is_running(directory)
            *whole, rest = (rest + file.read()).split("\n")
            yield from whole
            if ended:
                break
            if not whole:
                time.sleep(_PAUSE_S)
    if rest:
        yield rest


def _is_running(directory: Path) -> bool:
    return run_record.RunRecord.read(directory).state == run_record.RUNNING
