"""Guardian of one process: starts it, exits when it exits, and kills all of its descendants.

Run by path (`python -I -S guardian.py NAMESPACES COMMAND ...`) as the leader of a new session, or forked by
`start`. A command is often a shell that forks, and PR_SET_PDEATHSIG reaches only the shell: so the
guardian adopts every orphaned descendant, in any session, and kills them all. It imports almost nothing, to
start in a few milliseconds. NAMESPACES is the number of namespaces to join; their descriptors follow that of
the control socket.

The control socket connects it with its client. When the other end is shut down or the client dies, the
guardian ends the process. When the process has ended, it sends the exit status and the largest
resident set in KiB, as text, and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

#: Descriptor of the control socket where the guardian runs by path.
CONTROL_FD = 3

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CAPABILITY_VERSION_3 = 0x20080522
_OWN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD)


def exit_with_parent(parent: int, signum: int) -> None:
    """Makes the kernel signal this process when its parent dies; exits if the parent is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def join_namespaces(namespaces: Sequence[int]) -> None:
    """Moves this process, which has one thread, into the namespaces of these descriptors, and closes them.

    In a user namespace it drops all capabilities, which joining one grants. Root joins one only without the
    capability for other users' files (see `namespace`). Raises OSError when that is not allowed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor in namespaces:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    if len(namespaces) > 1:
        libc.capset((ctypes.c_uint * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint * 6)())


def guard(start: Callable[[], int], control: int, grace: int = 0) -> None:
    """Starts a process and guards it; returns only in a process that `start` forks.

    `start` returns the id of the process, 0 in the process itself; `control` is the descriptor of the control
    socket. Once its other end is closed, `grace` seconds lie between SIGTERM and SIGKILL.
    """

    def end(status: int) -> NoReturn:
        _kill_children()
        with contextlib.suppress(OSError):  # the client is gone
            # Not the guardian's own rusage: Linux counts the process from which it was spawned.
            os.write(control, b"%d %d" % (status, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
        os._exit(0)

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    # The guardian survives signals to its group until the process has ended. Handlers, not SIG_IGN: exec
    # resets them, and the process has the default action.
    for signum in _OWN_SIGNALS:
        signal.signal(signum, lambda *_: None)
    for signum in (signal.SIGHUP, signal.SIGALRM):
        signal.signal(signum, lambda *_: end(128 + signal.SIGKILL))
    try:
        child = start()
    except OSError as error:
        print(f"cannot start {error.filename!r}: {error.strerror}", file=sys.stderr, flush=True)
        end(127)
    if not child:
        signal.set_wakeup_fd(-1)
        for signum in _OWN_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in (wake, waking, control):
            os.close(descriptor)
        return
    watched = [wake, control]
    while (status := _reap(child)) is None:
        ready = select.select(watched, [], [])[0]
        if control in ready:
            watched.remove(control)
            if not grace:
                end(128 + signal.SIGKILL)
            signal.alarm(grace)
            os.kill(child, signal.SIGTERM)
        if wake in ready:
            os.read(wake, 1 << 10)
    end(status)


def _reap(child: int) -> int | None:
    """Reaps all children that have ended; returns the child's exit status, 128 + n for death by signal n."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                status = 128 - code if code < 0 else code
    return status


def _kill_children() -> None:
    """Kills children until there are none: those of a killed one become this process's own."""
    children = f"/proc/self/task/{os.getpid()}/children"
    if not os.path.exists(children):  # a kernel without CONFIG_PROC_CHILDREN: kill the group, and this one
        os.killpg(0, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(children, encoding="ascii") as pids:
                for pid in pids.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    os.set_inheritable(CONTROL_FD, False)
    first = CONTROL_FD + 1
    join_namespaces(range(first, first + int(sys.argv[1])))
    guard(lambda: os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ), CONTROL_FD)
