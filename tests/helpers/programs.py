"""Python programs forked from a process that has loaded what they import.

`run` and `Popen` take what subprocess's take, for a command that is `python -m MODULE`, `python -c CODE` or
`shardline`. Importing TensorFlow and the clients of Google Cloud costs a new Python five seconds, and a
program of a test often less than one. Each process of pytest has one that is loaded, from its first such
program on; a test whose subject is what is loaded, or what has started a process, takes subprocess itself.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pkgutil
import runpy
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import shardline

#: Modules of others that are imported before a program is forked, where they are installed.
PRELOADED = (
    "tensorflow",
    "keras",
    "kfp.compiler",
    "google.cloud.aiplatform",
    "google.cloud.aiplatform_v1",
    "google_cloud_pipeline_components.container.v1.custom_job.launcher",
    "matplotlib.figure",
    "sklearn.metrics",
)
_LOADED = "tests.helpers.programs_loaded"
#: Whoever starts a process asks all others how they have ended, which only one can be told.
_LOCK = threading.Lock()


def _start(process: Any) -> None:
    """Starts a process, also after a job in this process has ended the server or its tracker."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    with _LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "resource_tracker: process died", UserWarning)
        try:
            process.start()
        except ChildProcessError:  # it has been waited for as well
            server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
            process.start()


class Popen(subprocess.Popen[str]):
    """A `subprocess.Popen` whose child is forked from the process that is loaded."""

    _process: multiprocessing.process.BaseProcess

    # Everything but the start and the end of a child is subprocess's own.
    def _execute_child(self, args: Sequence[Any], *given: Any) -> None:  # type: ignore[override]
        cwd, env = given[4:6]  # of CPython 3.11 and 3.12
        p2cread, _, _, c2pwrite, _, errwrite = given[9:15]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_LOADED])
        devnull = os.open(os.devnull, os.O_RDWR)
        wanted = {0: p2cread, 1: c2pwrite, 2: errwrite}
        wanted = {number: devnull if fd == -1 else fd for number, fd in wanted.items()}
        files = {number: Connection(os.dup(fd), readable=True) for number, fd in wanted.items()}
        command = list(map(str, args))
        self._process = context.Process(
            target=_run,
            args=(command, dict(os.environ if env is None else env), str(cwd or Path.cwd()), files),
            daemon=True,
        )
        try:
            _start(self._process)
        finally:
            for file in files.values():
                file.close()
            for descriptor in {devnull, p2cread, c2pwrite, errwrite} - {-1}:
                os.close(descriptor)
        self._child_created = True
        assert self._process.pid is not None
        self.pid = self._process.pid

    def _internal_poll(self, _deadstate: Any = None) -> int | None:
        if self.returncode is None:
            with _LOCK:
                self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not wait([self._process.sentinel], timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            returncode = self._internal_poll()
            assert returncode is not None
        return self.returncode  # type: ignore[return-value]  # it has ended


def run(
    args: Sequence[Any],
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    input: str | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Does what `subprocess.run` does."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(args, **options) as process:
        try:
            output, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def preload() -> None:
    """Imports what programs need; in a process that is only ever forked."""
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "OPENBLAS_NUM_THREADS": "1"}
    errors, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # notices of C++ that come before their logging can be told
    for name in PRELOADED:
        importlib.import_module(name)
    for module in pkgutil.walk_packages(shardline.__path__, "shardline."):
        importlib.import_module(module.name)
    os.dup2(errors, 2)
    os.close(errors)
    os.close(nowhere)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"


def _run(command: list[str], env: Mapping[str, str], cwd: str, files: Mapping[int, Connection]) -> None:
    """Becomes a command in a forked process."""
    for number, file in files.items():
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # as the environment says
    os.chdir(cwd)
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    # To the program this is the main process: it may start others.
    main: Any = multiprocessing.current_process()
    main._config["daemon"], main._identity, main.name = False, (), "MainProcess"
    import numpy as np

    np.random.seed()
    code = _exit_code(command)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(command: list[str]) -> int:
    """Runs a command and returns the status with which its process would end."""
    try:
        _execute(*command)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        sys.last_value = error
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as asked:
            return int(asked.code or 0)
        return 1
    return 0


def _execute(program: str, *arguments: str) -> None:
    name = Path(program).name
    if name == "shardline":
        from shardline.pipelines.cli.main import main

        sys.argv = [program, *arguments]
        main()
        return
    assert name.startswith("python"), program
    options = [one for one in arguments if one != "-u"]
    kind, what, *sys.argv[1:] = options[0], options[1], *options[2:]
    if kind == "-m":
        sys.modules.pop(what, None)  # runpy warns of it
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    assert kind == "-c", options
    sys.argv[0] = "-c"
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), module.__dict__)
