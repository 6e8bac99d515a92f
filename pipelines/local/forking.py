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

from shardline.pipelines.local import forked, forkserver, processes
from shardline.pipelines.local.job import PLATFORM_VARIABLES
from shardline.pipelines.local.replica import Launch, spawn_guardian
from shardline.trainer import files, progress

#: Module of the trainer's program.
_TRAINER = "shardline.trainer.task"
#: Module that runs a component's function.
_EXECUTOR = "kfp.dsl.executor_main"
#: How KFP 2 starts it, word by word; the component's source and its arguments follow.
_KFP_SCRIPT = f"""
program_path=$(mktemp -d)
printf "%s" "$0" > "$program_path/ephemeral_component.py"
_KFP_RUNTIME=true python3 -m {_EXECUTOR} --component_module_path "$program_path/ephemeral_component.py" "$@"
""".split()
#: Components whose source has one of these words will load TensorFlow anyway.
_SIGNS = ("tensorflow", "keras", "shardline.components.train", "shardline.components.validate")
#: Stand-ins of the platform's launchers that start replicas.
SUPERVISORS = ("shardline.pipelines.local.custom_job", "shardline.pipelines.local.tuning")
#: An NVIDIA driver: whether a process may be forked next to one has not been proven.
NVIDIA = Path("/dev/nvidiactl")
#: Where the run's process with TensorFlow loaded listens, in the environment of tasks (see `preloaded`).
PRELOADED_VARIABLE = "SHARDLINE_PRELOADED"
#: What no import depends on, beside what is a replica's own.
_IMMATERIAL = (
    "PATH",
    "PYTHONUNBUFFERED",
    progress.EVENTS_VARIABLE,
    files.GCS_ROOT_VARIABLE,
    PRELOADED_VARIABLE,
)

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
    if list(command[:3]) == ["python3", "-u", "-m"] and command[3] in SUPERVISORS:
        return Program(command[3], command[4:])
    if list(command[:2]) == ["sh", "-ec"] and len(command) > 3 and command[2].split() == _KFP_SCRIPT:
        source = command[3]
        if any(sign in source for sign in _SIGNS):
            return Program(_EXECUTOR, command[4:], source)
    return None


@dataclass(frozen=True)
class Server:
    """A process with TensorFlow loaded that forks replicas of this process's jobs.

    Attributes:
        connection: Over which it is asked.
        pid: Its process id.
        inherited: Its environment, as far as imports may depend on it.
    """

    connection: socket.socket
    pid: int
    inherited: Mapping[str, str]

    def end(self) -> None:
        """Ends it; what it has forked goes on."""
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


#: For all jobs of this process.
_prepared: Server | None = None


def prepare(env: Mapping[str, str]) -> None:
    """Forks the server of all jobs of this process, which has TensorFlow loaded and has done nothing yet.

    Args:
        env: The environment that this process will have.
    """
    global _prepared
    supervisor = os.getpid()
    ours, theirs = socket.socketpair()
    if pid := os.fork():
        theirs.close()
        ours.settimeout(_PATIENCE_S)
        _prepared = Server(ours, pid, _inherited(env))
        read_line(ours)
        return
    forked.die_with(supervisor)
    os.setsid()
    ours.close()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.dup2(theirs.detach(), forkserver.REQUESTS_FD)
    forkserver.serve(supervisor)
    os._exit(0)


class ForkServer:
    """Starts replicas, by forking where it can, while the context lasts.

    Entering it loads TensorFlow, where no server has been prepared and there is more than one to be forked.

    Args:
        launches: What it will be asked to start.
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._held = contextlib.ExitStack()
        self._server: Server | None = None
        self._programs = [program for launch in launches if (program := recognize(launch.command))]
        self._env = {name: value for name, value in launches[0].env.items() if name not in PLATFORM_VARIABLES}

    def __enter__(self) -> ForkServer:
        if _prepared:
            self._held.enter_context(processes.adopted_orphans())
            self._server = _prepared
        elif len(self._programs) > 1 and not NVIDIA.exists():  # one alone gains nothing
            try:
                self._start(
                    ["shardline.trainer.train", *(["kfp.dsl.executor"] if self._programs[0].source else [])]
                )
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not _prepared:
            self._end()
        self._held.close()

    def spawn(self, command: Sequence[str], env: Mapping[str, str], printed: int, told: int) -> int:
        """Starts a guarded command, as `spawn_guardian` does, and returns the guardian's process id."""
        program = recognize(command)
        # What another environment may ask for has been decided when the modules were imported.
        if self._server and program and _inherited(env) == self._server.inherited:
            with contextlib.suppress(OSError, ValueError):
                return ask(self._server.connection, program, env, printed, told)
            self._end()
        return spawn_guardian(command, env, printed, told)

    def _start(self, modules: Sequence[str]) -> None:
        self._held.enter_context(processes.adopted_orphans())
        ours, theirs = socket.socketpair()
        with theirs:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", forkserver.__name__, str(os.getpid()), *modules],
                self._env,
                file_actions=[(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
                + [(os.POSIX_SPAWN_DUP2, theirs.fileno(), forkserver.REQUESTS_FD)],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        ours.settimeout(_PATIENCE_S)
        self._server = Server(ours, pid, _inherited(self._env))
        try:
            read_line(ours)
        except (OSError, ValueError):  # whatever it is, a replica that loads TensorFlow by itself will say it
            self._end()

    def _end(self) -> None:
        global _prepared
        if self._server:
            if self._server is _prepared:
                _prepared = None
            self._server.end()
            self._server = None


def _inherited(env: Mapping[str, str]) -> dict[str, str]:
    """Returns what an import may depend on of an environment, without what is one replica's own."""
    return {
        name: value
        for name, value in env.items()
        if name not in PLATFORM_VARIABLES and name not in _IMMATERIAL
    }


def ask(connection: socket.socket, program: Program, env: Mapping[str, str], printed: int, told: int) -> int:
    """Sends a request and returns the process id that is answered.

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
    return int(read_line(connection))


def read_line(connection: socket.socket) -> bytes:
    """Returns one line that a server has sent.

    Raises:
        OSError: When it takes too long.
        ValueError: When the server has ended.
    """
    line = b""
    while not line.endswith(b"\n"):
        if not (data := connection.recv(32)):
            raise ValueError("the server has ended")
        line += data
    return line
