"""Network namespace with loopback only: created by a separate process, which passes it on and ends.

Run by path (`python -I -S namespace.py DESCRIPTOR`), since only a process with one thread can create a user
namespace, which users other than root need for it; root without CAP_SYS_ADMIN gets none. The descriptor is
that of a Unix socket: it receives one byte with the descriptors of the namespaces, in the order in which they
are joined, or a text with the reason why there are none.
A namespace lasts as long as a process holds its descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_DAC_OVERRIDE = 1
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


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


def main(descriptor: int) -> None:
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


if __name__ == "__main__":
    main(int(sys.argv[1]))
