"""Guardian of one process: starts it, exits when it exits, and kills all of its descendants.

Run by path (`python -I -S guardian.py GRACE NAMESPACES COMMAND ...`) as the leader of a new session, or
forked by `fork_server`. A command is often a shell that forks, and PR_SET_PDEATHSIG reaches only the shell:
so the guardian adopts every orphaned descendant, in any session, and kills them all. It imports almost
nothing, to start in a few milliseconds. NAMESPACES is the number of namespaces to join; their descriptors
follow that of the control socket.

The control socket connects it with its client. When the other end is shut down or the client dies, the
guardian ends the process: with SIGTERM and, GRACE seconds later or at once, SIGKILL. When the process has
ended, it sends the exit status and the largest resident set in KiB, as text, and ends.

`python -I -S guardian.py DESCRIPTOR` creates namespaces with a network that has loopback only, and ends: only
a process with one thread can create a user namespace, which users other than root need for it; root without
CAP_SYS_ADMIN gets none. The descriptor is that of a Unix socket: it receives one byte with the descriptors of
the namespaces, in the order in which they are joined, or a text with the reason why there are none.
A namespace lasts as long as a process holds its descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

#: Descriptor of the control socket where the guardian runs by path.
CONTROL_FD = 3

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_DAC_OVERRIDE = 1
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_OWN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD)


def exit_with_parent(parent: int, signum: int) -> None:
    """Makes the kernel signal this process when its parent dies; exits if the parent is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def make_namespaces() -> list[str]:
    """Moves this process into a new network namespace; returns the kinds of its new namespaces.

    Raises OSError when that is not allowed; its strerror says why.
    """
    try:
        _unshare(_CLONE_NEWNET)
        _bring_up_loopback()
    except PermissionError as error:
        with open("/proc/self/status", encoding="ascii") as status:
            capabilities = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
        if not os.geteuid() and capabilities >> _DAC_OVERRIDE & 1:
            # In a user namespace root could no longer access other users' files.
            raise PermissionError(error.errno, f"{error.strerror} (root without CAP_SYS_ADMIN)") from None
        user, group = os.geteuid(), os.getegid()
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        # Files keep their owner.
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "wb") as file:
                file.write(text.encode())
        _bring_up_loopback()
        return ["user", "net"]
    return ["net"]


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        number = ctypes.get_errno()
        what = "user namespace" if flags & _CLONE_NEWUSER else "network namespace"
        limit = "their number is limited (sysctl user.max_net_namespaces and user.max_user_namespaces)"
        raise OSError(number, f"no new {what}: {limit if number == errno.ENOSPC else os.strerror(number)}")


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP))


def send_namespaces(descriptor: int) -> None:
    """Creates the namespaces and sends them, or the reason why there are none."""
    with socket.socket(fileno=descriptor) as client:
        namespaces: list[int] = []
        try:
            namespaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in make_namespaces()]
            response = b"."
        except OSError as error:
            response = (error.strerror or str(error)).encode()
        # The client may have been killed meanwhile.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(client, [response], namespaces)


def join_namespaces(namespaces: Sequence[int]) -> None:
    """Moves this process, which has one thread, into the namespaces of these descriptors, and closes them.

    In a user namespace it drops all capabilities, which joining one grants. Root joins one only without the
    capability for other users' files (see `make_namespaces`). Raises OSError when that is not allowed.
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
    if len(sys.argv) == 2:
        send_namespaces(int(sys.argv[1]))
        raise SystemExit
    os.set_inheritable(CONTROL_FD, False)
    first = CONTROL_FD + 1
    join_namespaces(range(first, first + int(sys.argv[2])))
    guard(lambda: os.posix_spawnp(sys.argv[3], sys.argv[3:], os.environ), CONTROL_FD, int(sys.argv[1]))
