"""Diagnosis of this machine for local runs: versions, memory, cores, disk, network, two replicas."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from shardline.components.text import enumerate_names
from shardline.trainer.base.plugins import installed_version


@dataclass(frozen=True)
class Diagnosis:
    """One line of the doctor's report: what was checked ("bucket"), the result, and what to do, or "".

    The level "warning" says that it may suffice, or could not be checked, "error" that runs will fail.
    """

    level: Literal["ok", "warning", "error"]
    what: str
    found: str
    fix: str = ""


#: A diagnosis of each level, from the other fields.
ok, warning, error = (partial(Diagnosis, level) for level in ("ok", "warning", "error"))

_GIB = 2**30
#: A replica with TensorFlow takes about half a GiB before it has loaded any data.
_MEMORY = (2 * _GIB, 6 * _GIB)
_REPLICAS = 2
_CONSTRAINTS = Path(__file__).parents[1] / "project" / "template" / "common" / "constraints.txt"
#: Packages whose versions matter most.
_MAIN = ("tensorflow", "keras", "kfp", "google-cloud-pipeline-components", "google-cloud-aiplatform", "numpy")


def examine(runs_dir: Path, *, toy: bool = True) -> Iterator[Diagnosis]:
    """Yields a diagnosis of each check; `toy` runs a job of two replicas, which takes some seconds."""
    yield from _versions()
    if (cores := len(os.sched_getaffinity(0))) < _REPLICAS:
        yield warning("cores", str(cores), "replicas share cores; a run is slow, not wrong")
    else:
        yield ok("cores", str(cores))
    runs = runs_dir.absolute()
    existing = next(path for path in (runs, *runs.parents) if path.is_dir())
    for what, path in (("run directory", existing), ("TMPDIR", Path(tempfile.gettempdir()))):
        if not os.access(path, os.W_OK):
            yield error("disk", f"{what}: {path} cannot be written", "choose another directory")
            continue
        free = shutil.disk_usage(path).free
        found = f"{what}: {free / _GIB:.1f} GiB free in {path}"
        yield _compare("disk", found, free, (1 * _GIB, 5 * _GIB), "make room, or choose another directory")
    if installed_version("psutil") is None:
        what = "memory, network, toy job: psutil is not installed"
        yield warning("not checked", what, "pip install 'shardline[local]'")
        return
    yield from _memory_and_network()
    if not toy:
        yield ok(
            "toy job",
            "not run, since it takes longer than all other checks: 'shardline doctor --local' runs it",
        )
    elif installed_version("tensorflow"):
        yield _toy_job()


def _versions() -> Iterator[Diagnosis]:
    installed = {name: installed_version(name) for name in _MAIN}
    missing = [name for name, version in installed.items() if version is None]
    if missing:
        found = f"not installed: {', '.join(missing)}; nothing can run on this machine"
        yield warning("packages", found, "pip install 'shardline[local]'")
        return
    versions = ", ".join(f"{name} {installed[name]}" for name in ("tensorflow", "keras", "kfp"))
    pins = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)$", _CONSTRAINTS.read_text(encoding="utf-8")))
    differing = [
        f"{name} {has} ({pin})"
        for name, pin in pins.items()
        if (has := installed_version(name)) not in (None, pin)
    ]
    if differing:
        found = f"other versions than tested: {enumerate_names(differing, 4)}"
        yield warning("packages", found, "pip install -c constraints.txt 'shardline[local]'")
    else:
        yield ok("packages", f"{versions}, all as in constraints.txt")


def _compare(what: str, found: str, amount: int, limits: tuple[int, int], fix: str) -> Diagnosis:
    least, enough = limits
    if amount < least:
        return error(what, found, fix)
    return warning(what, found, fix) if amount < enough else ok(what, found)


def _memory_and_network() -> Iterator[Diagnosis]:
    import psutil

    from shardline.pipelines.local.process import network

    free = psutil.virtual_memory().available
    found = f"{free / _GIB:.1f} GiB available"
    yield _compare("memory", found, free, _MEMORY, "close other programs, or use fewer replicas")
    if reason := network.isolation_unavailable():
        found = f"jobs share this machine's network, which exposes their servers: {reason}"
        yield warning("network", found, network.REMEDY)
    else:
        found = "a job with several replicas has its own network, which cannot be reached from outside"
        yield ok("network", found)


def _toy_job() -> Diagnosis:
    from shardline.pipelines.local.job.custom_job import CustomJob
    from shardline.pipelines.local.job.supervisor import run_job
    from shardline.pipelines.local.process import processes
    from shardline.trainer.base import progress
    from shardline.trainer.base.errors import ShardlineError

    command = (sys.executable, "-m", "shardline.trainer.check_cluster")
    job = CustomJob.with_roles(command, _REPLICAS, timeout=120.0, disable_retries=True)
    began = time.monotonic()
    with processes.scratch_directory() as directory:
        try:
            with progress.sink(lambda event: None):
                run_job(job, directory / "logs", topic="handshake")
        except ShardlineError as failed:
            logs = sorted((directory / "logs").glob("*.log"))
            last = [f"{log.stem}: {text[-1]}" for log in logs if (text := log.read_text().splitlines())]
            return error("toy job", "; ".join([str(failed), *last]), "fix this before anything else")
    seconds = time.monotonic() - began
    return ok("toy job", f"{_REPLICAS} replicas of TensorFlow added up a number in {seconds:.0f} s")
