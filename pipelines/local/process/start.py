"""Start of guarded processes: forked from the fork server where that is possible, or spawned.

`python -m shardline.pipelines.local.process.start --parent=PID COMMAND ...` starts a task: forked where the
run has a server and the command allows it; otherwise this process executes the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardline.pipelines.local.kfp_internals import EXECUTOR, component_source
from shardline.pipelines.local.process import fork_server as server_program
from shardline.pipelines.local.process import guardian, processes
from shardline.pipelines.local.process.fork_server import SERVER_VARIABLE, Program
from shardline.pipelines.local.process.processes import PLATFORM_VARIABLES
from shardline.trainer.base.errors import EXIT_FAILED

#: Module of the stubs for the platform's launchers, and those of them that start replicas.
STUBS_MODULE = "shardline.pipelines.local.launcher_stubs"
#: Argument with the id of the process that executes the pipeline, which fills it in.
PARENT = "--parent=PIPELINE_EXECUTOR"
_SUPERVISORS = ("CustomJob", "HyperparameterTuningJob")
#: Components whose source has one of these words load TensorFlow anyway.
_TENSORFLOW_WORDS = (
    "tensorflow",
    "keras",
    *(f"shardline.components.{name}" for name in ("rehearse", "train", "validate")),
)


@dataclass(frozen=True)
class Launch:
    """Command of a replica, its complete environment, and the descriptors of its namespaces."""

    command: Sequence[str]
    env: Mapping[str, str]
    namespaces: Sequence[int] = ()


def forkable_program(command: Sequence[str]) -> Program | None:
    """Returns the program of a command that a process forked with TensorFlow loaded can run; else None."""
    for trainer in ("shardline.trainer.task", "shardline.trainer.program"):
        if list(command[:3]) == [sys.executable, "-m", trainer]:
            return Program(trainer, command[3:])
    if list(command[:4]) == ["python3", "-u", "-m", STUBS_MODULE] and command[4] in _SUPERVISORS:
        return Program(STUBS_MODULE, command[4:])
    source = component_source(command)
    if source and any(word in source for word in _TENSORFLOW_WORDS):
        return Program(EXECUTOR, command[4:], source)
    return None


@contextlib.contextmanager
def fork_server(env: Mapping[str, str], *modules: str) -> Iterator[str]:
    """Starts a fork server with TensorFlow and further modules, which serves while the context lasts.

    Yields the path of its socket; "" where forking is not possible on this machine.
    """
    if Path("/dev/nvidiactl").exists():  # forking with NVIDIA's driver is not tested
        yield ""
        return
    with processes.scratch_directory() as directory:
        path = str(directory / "s")
        try:
            server = _start_server(path, env, modules)
        except OSError:
            yield ""
            return
        with server:
            try:
                yield path
            finally:
                server.terminate()


def _start_server(path: str, env: Mapping[str, str], modules: Sequence[str]) -> subprocess.Popen[bytes]:
    with socket.socket(socket.AF_UNIX) as listener, _short_address(path) as address:
        listener.bind(address)
        listener.listen()
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                server_program.__name__,
                str(listener.fileno()),
                str(os.getpid()),
                *modules,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a process that loads TensorFlow by itself reports errors
            env=env,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


@contextlib.contextmanager
def _short_address(path: str) -> Iterator[str]:
    """Yields a short address for the path of a Unix socket: an address has at most 107 bytes."""
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def fork_server_for(launches: Sequence[Launch]) -> contextlib.AbstractContextManager[str]:
    """Finds the fork server of the run, or starts one for a job with more than one forkable replica.

    The context yields the path of the server's socket; "" where there is none.
    """
    programs = [program for launch in launches if (program := forkable_program(launch.command))]
    if (path := os.environ.get(SERVER_VARIABLE)) or len(programs) < 2:  # a single one gains nothing
        return contextlib.nullcontext(path or "")
    modules = ["shardline.trainer.train", *(["kfp.dsl.executor"] if programs[0].source else [])]
    shared = {name: value for name, value in launches[0].env.items() if name not in PLATFORM_VARIABLES}
    return fork_server(shared, *modules)


def spawn(server: str, launch: Launch, output: int, control: int) -> int:
    """Starts a guarded command in its own session and returns the guardian's process id.

    `output` is the descriptor of its standard output and standard error, `control` that of the guardian's
    socket; `server` is the path of the fork server's socket, or "".
    """
    if server and (program := forkable_program(launch.command)):
        with contextlib.suppress(OSError, ValueError):
            if pid := _request_fork(server, program, launch.env, output, output, control, *launch.namespaces):
                return pid
    passed = [(own, guardian.CONTROL_FD + index) for index, own in enumerate((control, *launch.namespaces))]
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", guardian.__file__, str(len(launch.namespaces)), *launch.command],
        launch.env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
            *((os.POSIX_SPAWN_DUP2, own, theirs) for own, theirs in passed),
        ],
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # ignored by Python
    )


def _request_fork(
    server: str, program: Program, env: Mapping[str, str], *descriptors: int, grace: int = 0
) -> int:
    """Requests a process from the server; returns its guardian's process id, 0 where the server refuses.

    The descriptors are standard output, standard error, the control socket, and namespaces. Raises OSError
    when the server has ended, or takes too long, and ValueError when it ends before its response.
    """
    with socket.socket(socket.AF_UNIX) as connection, tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        connection.settimeout(120.0)  # it loads TensorFlow first
        with _short_address(server) as address:
            connection.connect(address)
        json.dump({"program": vars(program), "env": dict(env), "grace": grace}, file)
        file.seek(0)
        socket.send_fds(connection, [b"."], [file.fileno(), *descriptors])
        return int(connection.recv(32))


def main(parent: str, *command: str) -> None:
    """Runs a task's command and ends with its exit status; both end when the executing process dies."""
    guardian.exit_with_parent(int(parent.partition("=")[2]), signal.SIGTERM)
    server, program = os.environ.get(SERVER_VARIABLE), forkable_program(command)
    if server and program:
        control, theirs = socket.socketpair()
        pid = 0
        with control:
            with theirs, contextlib.suppress(OSError, ValueError):
                # It has seven seconds to end its own replicas.
                pid = _request_fork(server, program, os.environ, 1, 2, theirs.fileno(), grace=7)
            if pid:
                if report := control.recv(64):
                    raise SystemExit(int(report.split()[0]))
                with contextlib.suppress(ProcessLookupError):  # the guardian was killed
                    os.killpg(pid, signal.SIGKILL)
                raise SystemExit(EXIT_FAILED)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
