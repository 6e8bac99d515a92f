"""Launch of any Python program as a cluster on this machine: each replica a process with its TF_CONFIG."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from shardline.pipelines.local.job import CustomJob, run_job
from shardline.pipelines.local.terminal import foreground
from shardline.trainer.base import progress
from shardline.trainer.base.errors import SettingsError


def launch(
    program: str | os.PathLike[str],
    *,
    replicas: int,
    arguments: Sequence[str] = (),
    module: bool = False,
    ps: int = 0,
    restarts: int = 0,
    timeout: float | None = None,
    logs: str | os.PathLike[str] | None = None,
    network: str = "auto",
    strategy: bool | None = None,
) -> None:
    """Runs a program as every replica of a cluster on this machine; returns when all have ended with 0.

    Each replica is `python PROGRAM ARGUMENTS` with its TF_CONFIG as on the platform: the first is the chief,
    the others are workers. When one fails, all are stopped, and restarted as `restarts` allows. No process is
    left, however this one ends.

    Args:
        program: Path of a Python program, or the name of a module.
        replicas: Number of processes, the chief included, at least 1; a single one has no TF_CONFIG.
        arguments: Its command line.
        module: Whether `program` is the name of a module, as with `python -m`.
        ps: Number of further replicas that are parameter servers; the job then ends with its chief, since
            servers and workers never end.
        restarts: Restarts of all replicas after failures. A replica that asks for a restart (exit code 75)
            has up to six more.
        timeout: Seconds after which the replicas are stopped, or None for no limit.
        logs: Directory for a log of each replica, which later launches append to; None for a new temporary
            one.
        network: "auto", "isolated" or "host", as for `shardline train`.
        strategy: Whether each replica creates `shardline.strategy()` before the program begins; None where
            the program, or a module of its directory that it imports, imports shardline.

    Raises:
        SettingsError: When there is no such program, or a number is out of range.
        ProcessFailedError: When a replica has failed.
        RunError: When the timeout has passed.
    """
    name = os.fspath(program)
    source = _find_module(name) if module else Path(name)
    if source is None or not source.is_file():
        kind = "module" if module else "program"
        raise SettingsError(
            f"there is no {kind} {name!r} here; name one that python runs from {os.getcwd()!r}"
        )
    if restarts < 0 or (timeout is not None and not timeout > 0):
        raise SettingsError(f"restarts must be 0 or more and timeout above 0, got {restarts} and {timeout}")
    if strategy is None:
        strategy = _imports_shardline(source, Path.cwd() if module else source.parent, set())
    wrapper = ["-m", "shardline.trainer.program"] if strategy else []
    job = CustomJob.with_roles(
        [sys.executable, *wrapper, *(["-m"] if module else []), name, *arguments],
        replicas,
        ps=ps,
        display_name=name,
        timeout=timeout,
        restart_job_on_worker_restart=True,
        job_restarts=restarts,
        all_succeed=not ps,
    )
    directory = Path(tempfile.mkdtemp(prefix="shardline-launch-") if logs is None else logs)
    with foreground() as terminal:
        progress.report("launch", f"logs in {directory}")
        run_job(job, directory, topic="launch", show_line=terminal.line, network=network)


def _find_module(name: str) -> Path | None:
    """Returns the file that `python -m NAME` runs, or None; imports no package."""
    first, *others = parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    spec = PathFinder.find_spec(first, [os.getcwd()])
    if spec is None:
        with contextlib.suppress(ValueError):  # a loaded module without a spec: __main__
            spec = importlib.util.find_spec(first)
    for part in others:
        spec = spec and PathFinder.find_spec(part, spec.submodule_search_locations or [])
    if spec and spec.submodule_search_locations is not None:  # a package
        spec = PathFinder.find_spec("__main__", spec.submodule_search_locations)
    return Path(spec.origin) if spec and spec.origin else None


def _imports_shardline(source: Path, root: Path, seen: set[Path]) -> bool:
    """Whether a file, or a module below `root` that it imports, imports Shardline anywhere.

    False for a file that is not Python, which will fail by itself.
    """
    seen.add(source)
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        base, names = root, []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = source.parents[node.level - 1] if node.level else root
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
        for parts in (name.split(".") for name in names):
            if parts[0] == "shardline" and not getattr(node, "level", 0):
                return True
            paths = [base.joinpath(*parts[: end + 1]) for end in range(len(parts))]  # with its packages
            for file in {
                file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")
            } - seen:
                if file.is_file() and _imports_shardline(file, root, seen):
                    return True
    return False
