"""The fork server: a process with TensorFlow loaded from which others are forked, to start in no time.

Importing TensorFlow is most of what a small job costs, and every replica and many tasks would do it again.
TensorFlow starts no thread and touches no device until it is first used, so a process that has only imported
it can be forked; nothing else ever runs in this one. One server serves a whole run: the tasks of a pipeline
and the replicas of their jobs, or one job by itself. `start` is its client.

`python -m shardline.pipelines.local.process.fork_server LISTENER PARENT MODULE ...`: LISTENER is a descriptor
of a listening Unix socket: a client that asks while modules are being imported waits.
A request is one byte with four descriptors or more: a file with JSON (program, environment, grace), standard
output, standard error, a guardian's control socket, and the namespaces that it joins. The answer is a line
with the guardian's process id, or with 0 where the program must start by itself.
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
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardline.pipelines.local.process import guardian
from shardline.pipelines.local.process.processes import PLATFORM_VARIABLES
from shardline.trainer.base.errors import EXIT_FAILED

#: Path of the server's socket, in the environment of the tasks of a run.
SERVER_VARIABLE = "SHARDLINE_FORK_SERVER"

#: Variables that no import depends on, beside Shardline's own and those that are a replica's.
_IGNORED_VARIABLES = {*PLATFORM_VARIABLES, "PATH", "PYTHONUNBUFFERED", "TMPDIR"}
#: Seconds that a client has to send its request, once it is connected.
_REQUEST_S = 5.0


@dataclass(frozen=True)
class Program:
    """A Python module as a process runs it.

    Attributes:
        module: Its name.
        arguments: What follows it on the command line.
        source: A component's source, whose path is then the first argument; None for none.
    """

    module: str
    arguments: Sequence[str]
    source: str | None = None


def main(listener: int, parent: int, modules: Sequence[str]) -> None:
    """Imports TensorFlow and the modules, and serves; in each forked process, runs what was asked for."""
    guardian.exit_with_parent(parent, signal.SIGKILL)
    imported_with = import_environment(os.environ)
    from shardline.trainer.keras_compat import tensorflow_internals

    gc.disable()  # collections are a fifth of the import's time, and find next to nothing
    tensorflow_internals.import_tensorflow()
    os.environ["_KFP_RUNTIME"] = "true"  # as in a task: without the compiler and the client
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would write to, and so copy, the memory that all share
    gc.enable()
    with socket.socket(fileno=listener) as requests:
        program, env = _serve(requests, imported_with)
    _run(program, env)


def import_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns what imports may depend on: what another environment asks for has been decided already."""
    return {
        name: value
        for name, value in env.items()
        if name not in _IGNORED_VARIABLES and not name.startswith("SHARDLINE_")
    }


def _serve(listener: socket.socket, imported_with: Mapping[str, str]) -> tuple[Program, Mapping[str, str]]:
    """Answers requests; returns in the forked processes only, each with its own program."""
    # BLAS has threads of its own, and stops them before a fork and starts them again after it.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message="This process .* multi-threaded")
    server = os.getpid()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(os.WNOHANG))
    signal.signal(signal.SIGTERM, lambda *_: _exit())
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(_REQUEST_S)
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
    _reap()  # guardians would end with this process
    os._exit(0)


def _guard(descriptors: list[int], grace: int, server: int) -> None:
    """Becomes the guardian of a program; returns in the program."""
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
    """Does in this process what `python -m MODULE ARGUMENTS` does in a new one, and ends it."""
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # as the environment says
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed()  # or all replicas would draw the same numbers
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
    # Ends as multiprocessing ends what it has forked: what Python takes down otherwise belongs to the server,
    # and TensorFlow's context takes a second for it, or ten where a peer has left before.
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
