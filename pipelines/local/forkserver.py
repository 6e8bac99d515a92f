"""The process that has TensorFlow loaded and forks replicas: `python -m pipelines.local.forkserver`.

Importing TensorFlow is most of what a small job costs, and every replica would do it again. It starts no
thread and touches no device until it is first used, so that a process that has only imported it can be
forked; nothing else is ever run here.

It says once that it is ready, with an empty line. A request is one byte with three descriptors: a file
with JSON, what the replica prints to, and what its guardian tells its memory to. The answer is the
guardian's process id, on a line.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from pipelines.local import guardian
from trainer.errors import EXIT_FAILED

#: The socket over which requests come.
REQUESTS_FD = 3

_PR_SET_PDEATHSIG = 1
#: Seconds for a guardian to become the supervisor's child.
_ADOPTION_S = 5.0

Request = dict[str, Any]


def main(supervisor: int, modules: list[str]) -> None:
    """Serves requests; in each forked replica, runs what was asked for.

    Args:
        supervisor: Process id of the parent, which must be a child subreaper.
        modules: Names of modules to import beforehand, beside TensorFlow.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        return
    _load(modules)
    connection = socket.socket(fileno=REQUESTS_FD)
    connection.sendall(b"\n")
    if (request := _serve(connection, supervisor)) is not None:
        _run(request)


def _load(modules: list[str]) -> None:
    from trainer import quiet

    quiet.import_tensorflow()
    os.environ["_KFP_RUNTIME"] = "true"  # as in a task: without the compiler and the client
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a collection in a replica would write to, and so copy, the memory that all share


def _serve(connection: socket.socket, supervisor: int) -> Request | None:
    """Forks until the supervisor is gone; returns the request in each replica, and None in this process."""
    # BLAS has threads of its own, and stops them before a fork and starts them again after it.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message="This process .* multi-threaded")
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        if not data:
            return None
        # Forked twice, so that the guardian is adopted by the supervisor, which outlives this process.
        if child := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(child, 0)
            continue
        if child := os.fork():
            connection.sendall(b"%d\n" % child)
            os._exit(0)
        connection.detach()  # the guardian has another use for the descriptor
        return _guard(descriptors, supervisor)


def _guard(descriptors: list[int], supervisor: int) -> Request:
    """Becomes the guardian of a replica; returns the request in the replica."""
    os.setsid()
    with open(descriptors[0], encoding="utf-8") as file:
        request: Request = json.load(file)
    os.dup2(descriptors[1], 1)
    os.dup2(descriptors[1], 2)
    os.dup2(descriptors[2], guardian.MEMORY_FD)
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    deadline = time.monotonic() + _ADOPTION_S
    while os.getppid() != supervisor and time.monotonic() < deadline:
        time.sleep(0.001)
    try:
        guardian.prepare(supervisor)
        if child := os.fork():
            os._exit(guardian.watch(child))
    except SystemExit as error:
        os._exit(int(str(error.code)))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.close(guardian.MEMORY_FD)
    return request


def _run(request: Request) -> None:
    """Does in this process what `python -m MODULE ARGUMENTS` does in a new one."""
    os.environ.clear()
    os.environ.update(request["env"])
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed()  # or all replicas would draw the same numbers
    sys.argv = ["", *request["arguments"]]
    if request["source"] is not None:
        os.environ["_KFP_RUNTIME"] = "true"
        program = Path(tempfile.mkdtemp(), "ephemeral_component.py")
        program.write_text(request["source"], encoding="utf-8")
        sys.argv[1:1] = ["--component_module_path", str(program)]
    _end(_exit_code(request["module"]))


def _exit_code(module: str) -> int:
    """Runs a module and returns the status with which its process would end."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return EXIT_FAILED
    except BaseException:
        traceback.print_exc()
        return EXIT_FAILED
    return 0


def _end(code: int) -> None:
    """Ends this process as multiprocessing ends those that it has forked.

    What Python takes down otherwise belongs to the process it was forked from; and TensorFlow's context
    takes a second for it, or ten where a peer has left before.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
