"""Replicas that are forked from a process with TensorFlow loaded, where that is sound."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.local import forkserver, processes
from pipelines.local.cluster import PLATFORM_VARIABLES
from pipelines.local.launch import Launch
from pipelines.local.replica import spawn_guardian

#: Module of the trainer's program.
_TRAINER = "trainer.task"
#: Module that runs a component's function.
_EXECUTOR = "kfp.dsl.executor_main"
#: How KFP 2 starts it, word by word; the component's source and its arguments follow.
_KFP_SCRIPT = f"""
program_path=$(mktemp -d)
printf "%s" "$0" > "$program_path/ephemeral_component.py"
_KFP_RUNTIME=true python3 -m {_EXECUTOR} --component_module_path "$program_path/ephemeral_component.py" "$@"
""".split()
#: Components whose source has one of these words will load TensorFlow anyway.
_SIGNS = ("tensorflow", "keras", "components.train")
#: An NVIDIA driver: whether a process may be forked next to one has not been proven.
_NVIDIA = Path("/dev/nvidiactl")

#: Seconds for TensorFlow to load, and for a fork.
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Program:
    """A Python module as a replica runs it.

    Attributes:
        module: Its name.
        arguments: What follows it on the command line.
        source: A component's source, whose path is then the first argument; None for none.
    """

    module: str
    arguments: Sequence[str]
    source: str | None = None


def recognize(command: Sequence[str]) -> Program | None:
    """Returns what a command does, where a fork of a process with TensorFlow can do it as well."""
    if list(command[:3]) == [sys.executable, "-m", _TRAINER]:
        return Program(_TRAINER, command[3:])
    if list(command[:2]) == ["sh", "-ec"] and len(command) > 3 and command[2].split() == _KFP_SCRIPT:
        source = command[3]
        if any(sign in source for sign in _SIGNS):
            return Program(_EXECUTOR, command[4:], source)
    return None


class ForkServer:
    """Starts replicas, by forking where it can, while the context lasts.

    Entering it loads TensorFlow, where there is more than one to be forked.

    Args:
        launches: What it will be asked to start.
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._held = contextlib.ExitStack()
        self._connection: socket.socket | None = None
        self._pid = 0
        self._programs = [program for launch in launches if (program := recognize(launch.command))]
        self._inherited = _inherited(launches[0].env)

    def __enter__(self) -> ForkServer:
        if len(self._programs) > 1 and not _NVIDIA.exists():  # one alone gains nothing
            try:
                self._start(["trainer.train", *(["kfp.dsl.executor"] if self._programs[0].source else [])])
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._held.close()

    def spawn(self, command: Sequence[str], env: Mapping[str, str], printed: int, told: int) -> int:
        """Starts a guarded command, as `spawn_guardian` does, and returns the guardian's process id."""
        program = recognize(command)
        # What another environment may ask for has been decided when the modules were imported.
        if self._connection is not None and program and _inherited(env) == self._inherited:
            with contextlib.suppress(OSError, ValueError):
                return _ask(self._connection, program, env, printed, told)
            self._end()
        return spawn_guardian(command, env, printed, told)

    def _start(self, modules: Sequence[str]) -> None:
        self._held.enter_context(processes.adopted_orphans())
        ours, theirs = socket.socketpair()
        with theirs:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", forkserver.__name__, str(os.getpid()), *modules],
                self._inherited,
                file_actions=[(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
                + [(os.POSIX_SPAWN_DUP2, theirs.fileno(), forkserver.REQUESTS_FD)],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        ours.settimeout(_PATIENCE_S)
        self._connection = ours
        try:
            _read_line(ours)
        except (OSError, ValueError):  # whatever it is, a replica that loads TensorFlow by itself will say it
            self._end()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _inherited(env: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without what is one replica's own."""
    return {name: value for name, value in env.items() if name not in PLATFORM_VARIABLES}


def _ask(connection: socket.socket, program: Program, env: Mapping[str, str], printed: int, told: int) -> int:
    """Sends a request and returns the answer.

    Raises:
        OSError: When the server has ended.
        ValueError: When it ends before it has answered.
    """
    request = {**vars(program), "env": dict(env)}
    descriptor = os.memfd_create("request")
    with open(descriptor, "w+", encoding="utf-8") as file:
        json.dump(request, file)
        file.flush()
        file.seek(0)
        socket.send_fds(connection, [b"."], [descriptor, printed, told])
    return int(_read_line(connection))


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if not (data := connection.recv(32)):
            raise ValueError("the server has ended")
        line += data
    return line
