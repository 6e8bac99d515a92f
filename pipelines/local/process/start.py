"""Start of guarded processes: forked from the fork server where that is possible, or spawned.

Importing TensorFlow is most of the cost of a small job, and every replica and many tasks would repeat it.
TensorFlow starts no thread and opens no device before its first use: a process that has only imported it can
be forked; nothing else runs in the server. One server serves a whole run, the tasks of a pipeline and the
replicas of their jobs, or one job.

`python -m shardline.pipelines.local.process.start --parent=PID COMMAND ...` starts a task: forked where the
run has a server and the command allows it; otherwise this process executes the command.

`python -m shardline.pipelines.local.process.start --serve LISTENER PARENT MODULE ...` is the server: LISTENER
is a descriptor of a listening Unix socket; a client that connects during the imports waits.
A request is one byte with four descriptors or more: a file with JSON (program, environment, grace), standard
output, standard error, a guardian's control socket, and the namespaces to join. The response is a line with
the guardian's process id, or with 0 where the program must start by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardline.pipelines.local.kfp_internals import EXECUTOR, component_source
from shardline.pipelines.local.process import guardian, processes
from shardline.pipelines.local.process.processes import PLATFORM_VARIABLES
from shardline.trainer.base.errors import EXIT_FAILED
from shardline.trainer.cluster import NO_PROXY_VARIABLE

#: Environment variable of a run's tasks: path of the server's socket.
SERVER_VARIABLE = "SHARDLINE_FORK_SERVER"
#: Variables that no import depends on, in addition to Shardline's own.
_IGNORED_VARIABLES = {*PLATFORM_VARIABLES, NO_PROXY_VARIABLE, "PATH", "PYTHONUNBUFFERED", "TMPDIR"}
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
class Program:
    """A Python module to run; the path of `source`, that of a component, becomes its first argument."""

    module: str
    arguments: Sequence[str]
    source: str | None = None


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
        own = [str(listener.fileno()), str(os.getpid())]
        return subprocess.Popen(
            [sys.executable, "-m", __name__, "--serve", *own, *modules],
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


def start_task(parent: str, *command: str) -> None:
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


def serve(listener: int, parent: int, modules: Sequence[str]) -> None:
    """Imports TensorFlow and the modules, and serves; in each forked process, runs the requested program."""
    guardian.exit_with_parent(parent, signal.SIGKILL)
    imported_with = import_environment(os.environ)
    from shardline.trainer.keras_compat import tensorflow_internals

    gc.disable()  # collections take a fifth of the import's time, and free almost nothing
    tensorflow_internals.import_tensorflow()
    os.environ["_KFP_RUNTIME"] = "true"  # as in a task: without the compiler and the client
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would write to the shared memory, and so copy it
    gc.enable()
    with socket.socket(fileno=listener) as requests:
        program, env = _answer(requests, imported_with)
    _run(program, env)


def import_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that imports may depend on: a process with other values cannot be forked."""
    return {
        name: value
        for name, value in env.items()
        if name not in _IGNORED_VARIABLES and not name.startswith("SHARDLINE_")
    }


def _answer(listener: socket.socket, imported_with: Mapping[str, str]) -> tuple[Program, Mapping[str, str]]:
    """Answers requests; returns in the forked processes only, each with its own program."""
    # BLAS has its own threads, which it stops before a fork and starts again after it.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message="This process .* multi-threaded")
    server = os.getpid()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(os.WNOHANG))
    signal.signal(signal.SIGTERM, lambda *_: _exit())
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(5.0)  # for its request
            descriptors = socket.recv_fds(connection, 1, 6)[1]
            try:
                with open(descriptors.pop(0), encoding="utf-8") as file:
                    request = json.load(file)
                pid = -1 if import_environment(request["env"]) != imported_with else os.fork()
                if pid:
                    connection.sendall(b"%d\n" % max(pid, 0))
                    continue
                listener.close()
                connection.close()
                _guard(descriptors, request["grace"], server)
                return Program(**request["program"]), request["env"]
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)


def _reap(options: int = 0) -> None:
    """Reaps guardians that have ended; without WNOHANG, waits until none is left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _exit() -> NoReturn:
    _reap()  # guardians end with this process
    os._exit(0)


def _guard(descriptors: list[int], grace: int, server: int) -> None:
    os.setsid()
    output, error, control, *namespaces = descriptors
    os.dup2(output, 1)
    os.dup2(error, 2)
    del descriptors[2:]  # closed by `join` and `guard`
    guardian.join_namespaces(namespaces)
    guardian.exit_with_parent(server, signal.SIGHUP)
    own = os.getpid()
    guardian.guard(os.fork, control, grace)
    guardian.exit_with_parent(own, signal.SIGKILL)


def _run(program: Program, env: Mapping[str, str]) -> NoReturn:
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # read TMPDIR again
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed()  # otherwise all replicas draw the same numbers
    sys.argv = ["", *program.arguments]
    if program.source is not None:
        os.environ["_KFP_RUNTIME"] = "true"
        file = Path(tempfile.mkdtemp(), "ephemeral_component.py")
        file.write_text(program.source, encoding="utf-8")
        sys.argv[1:1] = ["--component_module_path", str(file)]
    code = EXIT_FAILED
    try:
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = error.code or 0
        else:
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    # Ends like a fork of multiprocessing: a full shutdown would tear down the server's state, and takes
    # TensorFlow's context a second, or ten where a peer has left before.
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        start_task(*sys.argv[1:])
