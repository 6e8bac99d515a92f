"""Starts a task of a pipeline: `python -m shardline.pipelines.local.start COMMAND ...`.

Where the run has a process with TensorFlow loaded that can do what the command does, the task is forked from
it; else this process becomes the command.
"""

from __future__ import annotations

import os
import socket
import sys

from shardline.pipelines.local import forking
from shardline.pipelines.local.forking import Program
from shardline.trainer.errors import EXIT_FAILED


def main(command: list[str]) -> None:
    """Runs the command and ends as it ends."""
    path = os.environ.get(forking.PRELOADED_VARIABLE)
    program = forking.recognize(command)
    if path and program:
        with socket.socket(socket.AF_UNIX) as connection:
            if _has_begun(connection, path, program):
                raise SystemExit(_exit_status(connection))
    os.execvp(command[0], command)


def _exit_status(connection: socket.socket) -> int:
    try:
        return int(forking.read_line(connection))
    except (OSError, ValueError):  # the process that waits for the task was killed, and the task with it
        return EXIT_FAILED


def _has_begun(connection: socket.socket, path: str, program: Program) -> bool:
    try:
        connection.connect(path)
        forking.ask(connection, program, os.environ, 1, 2)
    except (OSError, ValueError):  # whatever it is, a task that loads TensorFlow by itself will say it
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
