"""Rehearsal of a build: the steps of its Dockerfile in virtual environments, where no image can be built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardline.trainer import progress
from shardline.trainer.errors import RunError, SettingsError

#: Steps that change the system are read out and not run.
_OF_ROOT = re.compile(r"apt-get|useradd")
#: What makes layers small and starts quick, and a rehearsal long.
_FOR_LAYERS = re.compile(r"--(no-cache-dir|no-cache|compile-bytecode) ")
_TOPIC = "rehearse"
_FULL = (("shardline", "--help"), ("python", "-m", "shardline.trainer.task", "--help"))
#: Commands that an image of a variant has to know.
PROOFS = {"control": _FULL[:1]}
#: Imports a plug-in as a task does, and says in one line why it cannot.
_IMPORT = """
import sys
from shardline.trainer import plugins
from shardline.trainer.errors import ShardlineError
try:
    plugins.load(sys.argv[2], sys.argv[1])
except ShardlineError as error:
    sys.exit(str(error))
"""


@dataclass
class Rehearsed:
    """What came of it.

    Attributes:
        seconds: What the steps took.
        bytes: Size of the environment that the image gets.
        distributions: How many it holds.
        not_run: Commands that only a build runs.
    """

    seconds: float = 0.0
    bytes: int = 0
    distributions: int = 0
    not_run: list[str] = field(default_factory=list)


def rehearse(context: Path, directory: Path, variant: str, plugins: Mapping[str, str]) -> Rehearsed:
    """Performs the steps of a build context's Dockerfile in an empty directory, and imports plug-ins there.

    The Python is the one that this runs with; packages come out of uv's cache where they are in it.

    Args:
        context: The build context (`assemble`).
        directory: Where it is done, new or without build/ and opt/; /opt of the image is opt/ in it.
        variant: The image's.
        plugins: Import strings to try, by what a user calls each.

    Raises:
        RunError: When a step fails.
        SettingsError: When a plug-in cannot be imported.
    """
    started, done = time.monotonic(), Rehearsed()
    directory.mkdir(exist_ok=True)
    tools, installed = directory / "tools" / "bin", directory / "opt" / "venv"
    _run([sys.executable, "-m", "venv", str(tools.parent)], directory, tools)
    work = directory / "build"
    shutil.copytree(context, work)
    for stage, command in _steps((context / "Dockerfile").read_text(encoding="utf-8")):
        if _OF_ROOT.search(command):
            done.not_run.append(command)
            continue
        shown = _FOR_LAYERS.sub("", command)
        progress.say(_TOPIC, f"$ {shown}")
        python = tools if stage == "build" else installed / "bin"
        _run(["/bin/sh", "-c", shown.replace("/opt/", f"{directory}/opt/")], work, python)
    home, programs = _places(directory)
    for proof in PROOFS.get(variant, _FULL):
        progress.say(_TOPIC, f"$ {' '.join(proof)}")
        _run([str(programs / proof[0]), *proof[1:]], home, programs, shown=False)
    try_plugins(directory, plugins)
    files = [path for path in installed.rglob("*") if path.is_file() and not path.is_symlink()]
    done.bytes = sum(path.stat().st_size for path in files)
    done.distributions = len(list(installed.glob("lib/python*/site-packages/*.dist-info")))
    done.seconds = time.monotonic() - started
    return done


def try_plugins(directory: Path, plugins: Mapping[str, str]) -> None:
    """Imports plug-ins as a task does, in a rehearsed environment and a directory with nothing else."""
    home, programs = _places(directory)
    for name, reference in plugins.items():
        progress.say(_TOPIC, f"importing {name}={reference}")
        command = [str(programs / "python"), "-c", _IMPORT, name, reference]
        done = subprocess.run(
            command, cwd=home, env=_environ(home, programs), capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
            raise SettingsError(f"{name}={reference} cannot be imported in the image: {lines[-1]}")


def _places(directory: Path) -> tuple[Path, Path]:
    """Returns the working directory of a rehearsed image, and where its programs are."""
    home = directory / "app"
    home.mkdir(exist_ok=True)
    return home, directory / "opt" / "venv" / "bin"


def _steps(dockerfile: str) -> Iterator[tuple[str, str]]:
    """Yields the RUN steps of a Dockerfile with the stage that each is in, its arguments filled in."""
    values: dict[str, str] = {}
    stage = ""
    lines = (line for line in dockerfile.splitlines() if line and not line.startswith("#"))
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, rest = line.partition(" ")
        rest = " ".join(rest.split())
        if instruction == "FROM":
            stage = rest.partition(" AS ")[2]
        elif instruction == "ARG":
            name, _, value = rest.partition("=")
            values[name] = value.strip('"')
        elif instruction == "RUN" and (command := _needed(rest, values)):
            yield stage, command


def _needed(command: str, values: Mapping[str, str]) -> str:
    """Returns a command with its arguments filled in; "" where its condition says that nothing is done."""
    condition = re.fullmatch(r"if \[ (.*?) \]; then (.*?);? fi", command)
    if (
        condition
        and subprocess.run(["/bin/sh", "-c", f"[ {condition[1]} ]"], env=values, check=False).returncode
    ):
        return ""
    command = condition[2] if condition else command
    for name, value in values.items():
        command = command.replace(f"${name}", value)
    return command


def _environ(home: Path, programs: Path) -> dict[str, str]:
    """Returns the variables of a process: nothing of this one's that changes what Python imports."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    return {**kept, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PWD": str(home)}


def _run(command: list[str], directory: Path, programs: Path, *, shown: bool = True) -> None:
    # Standard output is for the result alone.
    output = sys.stderr.fileno() if shown else subprocess.DEVNULL
    done = subprocess.run(
        command, cwd=directory, env=_environ(directory, programs), stdout=output, check=False
    )
    if done.returncode:
        raise RunError(
            f"this step of the image ended with {done.returncode}, see above: {' '.join(command[-1:])}"
        )
