"""What a process does that was forked from one with TensorFlow loaded: what a new Python would do.

TensorFlow starts no thread and touches no device until it is first used, so that a process that has only
imported it can be forked; nothing else is ever run in a process that forks.
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
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardline.trainer.errors import EXIT_FAILED

#: A `forking.Program` as a dict, and "env", the whole environment.
Request = dict[str, Any]

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, and ends it if that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


def load(modules: Sequence[str]) -> None:
    """Imports TensorFlow and some modules, for every process that will be forked from this one."""
    from shardline.trainer import tensorflow_internals

    tensorflow_internals.import_tensorflow()
    os.environ["_KFP_RUNTIME"] = "true"  # as in a task: without the compiler and the client
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would write to, and so copy, the memory that all share


def read(descriptor: int) -> Request:
    """Reads a request from a file, which is closed."""
    with open(descriptor, encoding="utf-8") as file:
        request: Request = json.load(file)
    return request


def run(request: Request) -> NoReturn:
    """Does in this process what `python -m MODULE ARGUMENTS` does in a new one, and ends it."""
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


def _end(code: int) -> NoReturn:
    """Ends this process as multiprocessing ends those that it has forked.

    What Python takes down otherwise belongs to the process it was forked from; and TensorFlow's context
    takes a second for it, or ten where a peer has left before.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
