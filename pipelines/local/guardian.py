"""The guardian of one replica: starts a command, ends with it, and never lets it outlive its parent.

Run by path (`python -I -S guardian.py PARENT_PID COMMAND ...`) as the leader of a new session. A command
is often a shell that forks, and PR_SET_PDEATHSIG reaches only the shell: so the guardian asks for the
signal itself and then kills its whole process group. It imports next to nothing, to start in a few
milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1


def _kill_group(_signum: int, _frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)


def _wait_for_child(_signum: int, _frame: FrameType | None) -> None:
    """The group was asked to stop, the command with it; the guardian stays until the command has ended."""


def main(parent: int, command: list[str]) -> int:
    """Runs the command and returns its exit status; a death by signal becomes 128 + the signal."""
    signal.signal(signal.SIGHUP, _kill_group)
    for signum in (signal.SIGTERM, signal.SIGINT):
        # A handler and not SIG_IGN: handlers are reset by exec, so the command has the default action.
        signal.signal(signum, _wait_for_child)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:  # the parent died before the signal was asked for
        return 1
    try:
        child = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
