"""Process that has TensorFlow loaded and forks replicas: `python -m shardline.pipelines.local.forkserver`.

Importing TensorFlow is most of what a small job costs, and every replica would do it again.

It says once that it is ready, with an empty line. A request is one byte with three descriptors: a file
with JSON, what the replica prints to, and what its guardian tells its memory to. The answer is the
guardian's process id, on a line.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import warnings

from shardline.pipelines.local import forked, guardian
from shardline.pipelines.local.forked import Request

#: The socket over which requests come.
REQUESTS_FD = 3

#: Seconds for a guardian to become the supervisor's child.
_ADOPTION_S = 5.0


def main(supervisor: int, modules: list[str]) -> None:
    """Serves requests; in each forked replica, runs what was asked for.

    Args:
        supervisor: Process id of the parent, which must be a child subreaper.
        modules: Names of modules to import beforehand, beside TensorFlow.
    """
    forked.die_with(supervisor)
    forked.load(modules)
    serve(supervisor)


def serve(supervisor: int) -> None:
    """Serves requests that come over `REQUESTS_FD`, in a process that has loaded what it needs."""
    connection = socket.socket(fileno=REQUESTS_FD)
    connection.sendall(b"\n")
    if (request := _serve(connection, supervisor)) is not None:
        forked.run(request)


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
    request = forked.read(descriptors[0])
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


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
