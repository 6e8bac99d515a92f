"""The guardian of one replica: starts a command, ends with it, and lets nothing of it outlive either.

Run by path (`python -I -S guardian.py PARENT_PID COMMAND ...`) as the leader of a new session. A command
is often a shell that forks, and PR_SET_PDEATHSIG reaches only the shell: so the guardian asks for the
signal itself. It adopts every process below it whose own parent has died, in whatever session that
process may be, and so can kill them all. It imports next to nothing, to start in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from types import FrameType

#: Where the guardian writes the largest resident set of all that it has guarded, in KiB, when it ends.
#: Its own rusage would not do: Linux counts the process from which it was spawned.
MEMORY_FD = 3

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def prepare(parent: int) -> None:
    """Makes this process a guardian, before it starts what it guards.

    SIGHUP, sent by hand or by the kernel when the parent dies, then kills everything and ends it.

    Args:
        parent: Process id of the parent.

    Raises:
        SystemExit: When the parent has died already.
    """
    os.set_inheritable(MEMORY_FD, False)
    signal.signal(signal.SIGHUP, _kill_everything)
    for signum in (signal.SIGTERM, signal.SIGINT):
        # A handler and not SIG_IGN: handlers are reset by exec, so the command has the default action.
        signal.signal(signum, _wait_for_child)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:  # the parent died before the signal was asked for
        raise SystemExit(1)


def watch(child: int) -> int:
    """Waits for the child and returns its exit status; a death by signal becomes 128 + the signal."""
    pid = 0
    while pid != child:
        pid, status = os.wait()
    _end()
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def main(parent: int, command: list[str]) -> int:
    """Runs the command and returns its exit status, 127 when it cannot be started."""
    prepare(parent)
    try:
        child = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127
    return watch(child)


def _kill_everything(_signum: int, _frame: FrameType | None) -> None:
    _end()
    os._exit(128 + signal.SIGKILL)


def _wait_for_child(_signum: int, _frame: FrameType | None) -> None:
    """The group was asked to stop, the command with it; the guardian stays until the command has ended."""


def _end() -> None:
    """Kills children until there are none: those of a killed one become this process's own."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _children():
                os.kill(pid, signal.SIGKILL)
            os.wait()
    with contextlib.suppress(BrokenPipeError):  # nobody is left who wants to know
        os.write(MEMORY_FD, b"%d" % resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as children:
            return [int(pid) for pid in children.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN: no more than the group can be found
        os.killpg(0, signal.SIGKILL)
        raise


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
