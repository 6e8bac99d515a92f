"""Network of a job on this machine: its own namespace with loopback only, shared by its replicas.

TensorFlow's servers listen on all addresses without authentication: a client reads and writes files as the
user. In a network namespace no outside client can connect (`guardian` creates and joins it).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

from shardline.pipelines.local.process import guardian
from shardline.trainer.base import progress
from shardline.trainer.base.errors import PipelineError

#: Networks of a job: its own where the kernel allows it; its own or an error; this machine's.
NETWORKS = ("auto", "isolated", "host")

HOST = "127.0.0.1"
#: First port of a job in its own network, as on the platform; the kernel does not assign such a port to a
#: process that asks for any free one (net.ipv4.ip_local_port_range).
_FIRST_PORT = 2222
#: Messages of programs that need another machine, or a service of this one, and have no network.
UNREACHABLE = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|No address associated with hostname|Could not resolve host|Couldn't resolve host|DNS resolution failed"
    # With the address of a replica, it means that the replica has not started yet, or has ended.
    r"|^(?!.*:22\d\d\b).*(?:Connection refused|ECONNREFUSED)"
)


#: How to make isolation possible.
REMEDY = "allow unprivileged user namespaces, in a container --cap-add SYS_ADMIN"
#: Hint for an isolated job that failed because it needs another network.
NO_NETWORK = (
    "this job has no network but loopback, and it needs another machine, or a service of this one: run "
    "it with --network host"
)


@contextlib.contextmanager
def reserve_ports(count: int) -> Iterator[tuple[str, ...]]:
    """Reserves `count` free ports while the context lasts; yields "host:port" of each, in any order.

    Each port stays bound, but not listening, with SO_REUSEADDR and SO_REUSEPORT. The kernel then gives
    it to no process that asks for any free port, while a server that names it can still bind and listen:
    TensorFlow's gRPC server sets SO_REUSEADDR only (checked with 2.21), other servers SO_REUSEPORT. So
    no other process can take a port between its choice and its use, nor during a restart.
    """
    with contextlib.ExitStack() as held:
        addresses = []
        for _ in range(count):
            holder = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind((HOST, 0))
            addresses.append(f"{HOST}:{holder.getsockname()[1]}")
        yield tuple(addresses)


@contextlib.contextmanager
def job_network(
    replicas: int, topic: str, requested: str
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Creates the network of a job; it lasts as long as the context.

    A job of one replica, which starts no server, has this machine's network unless "isolated" is requested.
    Yields "host:port" of each replica, and descriptors of the namespaces to join, none for this machine's.
    Where replicas can be reached from outside, a warning of `topic` says so. Raises PipelineError when there
    is no such choice, or "isolated" is not possible.
    """
    if requested not in NETWORKS:
        raise PipelineError(f"network is one of {', '.join(NETWORKS)}, not {requested!r}")
    reason = ""
    with contextlib.ExitStack() as held:
        if requested == "isolated" or (requested == "auto" and replicas > 1):
            namespaces, reason = held.enter_context(_namespaces())
            if namespaces:
                addresses = (f"{HOST}:{_FIRST_PORT + index}" for index in range(replicas))
                yield tuple(addresses), namespaces
                return
        if reason and requested == "isolated":
            raise PipelineError(f"the job cannot have a network of its own: {reason}; {REMEDY}")
        reserved = held.enter_context(reserve_ports(replicas))
        if replicas > 1:
            ports = ", ".join(sorted(address.rpartition(":")[2] for address in reserved))
            hint = (
                f"the job has no network of its own: {reason}; {REMEDY}"
                if reason
                else "leave out --network host"
            )
            progress.report(
                topic,
                "warning: TensorFlow's servers of this job listen on all addresses of this machine (ports "
                f"{ports}): their clients read and write files as you; close them with a firewall ({hint})",
            )
        yield reserved, ()


def isolation_unavailable() -> str:
    """Returns why jobs cannot have their own network on this machine; "" where they can."""
    with _namespaces() as (_, reason):
        return reason


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[tuple[int, ...], str]]:
    """Yields descriptors of new namespaces, in the order in which they are joined, or why there are none."""
    own, theirs = socket.socketpair()
    with own:
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-I", "-S", guardian.__file__, str(number)]
            maker = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[number])
        with maker:
            message, descriptors, *_ = socket.recv_fds(own, 1 << 10, 2)
    reason = message.decode() or f"the process that creates it ended with exit code {maker.returncode}"
    with contextlib.ExitStack() as held:
        copies = []
        for descriptor in descriptors:
            # Above the numbers that a guardian uses, and not inherited by other processes.
            copies.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 16))
            held.callback(os.close, copies[-1])
            os.close(descriptor)
        yield tuple(copies), "" if copies else reason
