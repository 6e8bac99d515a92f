"""The process of a run that forks tasks: `python -m shardline.pipelines.local.preloaded SOCKET PARENT`.

The first steps of a pipeline need no TensorFlow. Meanwhile this process loads it, so that each task that
would load it later, a job with its replicas or a validation, is forked from here.

It listens from the beginning; who asks early waits. A request is one byte with three descriptors: a file
with JSON, standard output and standard error. The answers are the task's process id, and its exit status when
it has ended, each on a line.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType

from shardline.pipelines.local import forked, forking
from shardline.pipelines.local.custom_job import EXECUTOR_VARIABLE
from shardline.pipelines.local.forked import Request

_MODULES = ("shardline.trainer.train", "kfp.dsl.executor", "shardline.pipelines.local.supervisor")


@contextlib.contextmanager
def loading(scratch: str) -> Iterator[None]:
    """Has a process load TensorFlow for the tasks that are started while the context lasts.

    Args:
        scratch: Directory for its socket.
    """
    if forking.NVIDIA.exists():
        yield
        return
    path = os.path.join(scratch, "preloaded")
    with subprocess.Popen(
        [sys.executable, "-m", __name__, path, str(os.getpid())], stdin=subprocess.DEVNULL
    ) as server:
        os.environ[forking.PRELOADED_VARIABLE] = path
        try:
            yield
        finally:
            del os.environ[forking.PRELOADED_VARIABLE]
            server.terminate()


def main(path: str, parent: int) -> None:
    """Serves requests until it is told to end; in each forked task, runs what was asked for."""
    signal.signal(signal.SIGTERM, _end)
    forked.die_with(parent)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        forked.load(_MODULES)
        request = _serve(listener)
    if request["module"] in forking.SUPERVISORS:
        forking.prepare(request["env"])
    forked.run(request)


def _end(_signum: int, _frame: FrameType | None) -> None:
    """Ends once no task is left: their keepers would die with this process, and they with them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _serve(listener: socket.socket) -> Request:
    """Forks tasks; returns the request in each of them, and never in this process."""
    server = os.getpid()
    while True:
        connection, _ = listener.accept()
        with connection:
            data, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            if data and not os.fork():
                return _keep(connection, descriptors, server)
            for descriptor in descriptors:
                os.close(descriptor)


def _keep(connection: socket.socket, descriptors: list[int], server: int) -> Request:
    """Waits for a task and says how it has ended; returns the request in the task itself."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    forked.die_with(server)
    keeper = os.getpid()
    if child := os.fork():
        connection.sendall(b"%d\n" % child)
        ended = os.pidfd_open(child)
        if ended not in select.select([ended, connection.fileno()], [], [])[0]:  # whoever has asked is gone
            os.kill(child, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % (128 - code if code < 0 else code))
        os._exit(0)
    forked.die_with(keeper)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request = forked.read(descriptors[0])
    os.dup2(descriptors[1], 1)
    os.dup2(descriptors[2], 2)
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    if EXECUTOR_VARIABLE in request["env"]:
        request["env"][EXECUTOR_VARIABLE] = str(keeper)
    return request


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
