"""Fork server: a process that has loaded TensorFlow, from which tasks and replicas fork.

Importing TensorFlow is most of the cost of a small job, and every replica and many tasks would repeat it.
TensorFlow starts no thread and opens no device before its first use: a process that has only imported it can
be forked; nothing else runs in the server. One server serves a whole run, the tasks of a pipeline and the
replicas of their jobs, or one job. `processes` starts it and sends its requests.

`python -m shardline.pipelines.local.process.fork_server LISTENER PARENT MODULE ...` is the server:
LISTENER is a descriptor of a listening Unix socket; a client that connects during the imports waits.
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
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from shardline.pipelines.local.process import guardian
from shardline.pipelines.local.process.processes import PLATFORM_VARIABLES, Program
from shardline.trainer.base.errors import EXIT_FAILED
from shardline.trainer.cluster import NO_PROXY_VARIABLE

#: Variables that no import depends on, in addition to Shardline's own.
_IGNORED_VARIABLES = {*PLATFORM_VARIABLES, NO_PROXY_VARIABLE, "PATH", "PYTHONUNBUFFERED", "TMPDIR"}


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
    _run_program(program, env)


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


def _run_program(program: Program, env: Mapping[str, str]) -> NoReturn:
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
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
