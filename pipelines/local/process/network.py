"""Network of a job on this machine: one of its own, with loopback only, that all its replicas share.

TensorFlow's servers listen on all addresses and ask nobody who he is: whoever reaches one reads and writes
files as the user. In a network namespace nobody outside does (`namespace` makes it, `guardian` joins it).
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

from shardline.pipelines.local.process import namespace, processes
from shardline.trainer.base import progress
from shardline.trainer.base.errors import PipelineError

#: What network jobs shall have, in the environment: one of `CHOICES`; the first unless set.
NETWORK_VARIABLE = "SHARDLINE_NETWORK"
#: Their own where the kernel allows it; their own, or none runs; this machine's.
CHOICES = ("auto", "isolated", "host")

#: First port of a job in a network of its own, as on the platform; the kernel gives such a port to nobody who
#: asks for any free one (net.ipv4.ip_local_port_range).
_FIRST_PORT = 2222
#: The lowest number of a descriptor of a namespace.
_ABOVE = 16
#: What programs say that look for another machine, or a service of this one, and have no network.
_UNREACHABLE = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|No address associated with hostname|Could not resolve host|Couldn't resolve host|DNS resolution failed"
    # Of a replica, whose address gRPC names, it says that it has not started yet, or has ended.
    r"|^(?!.*:22\d\d\b).*(?:Connection refused|ECONNREFUSED)"
)


#: What makes a network of its own possible.
REMEDY = "allow unprivileged user namespaces, in a container --cap-add SYS_ADMIN"
#: For a job in a network of its own that has failed for want of another.
NO_NETWORK = (
    "this job has no network but loopback, and another machine, or a service of this one, was asked for: run "
    f"it with --network host, or {NETWORK_VARIABLE}=host"
)


def resolve_network(wanted: str | None) -> str:
    """Returns the network that jobs shall have: `wanted`, or else what the environment says.

    Raises:
        PipelineError: When there is no such choice.
    """
    wanted = wanted or os.environ.get(NETWORK_VARIABLE) or CHOICES[0]
    if wanted not in CHOICES:
        raise PipelineError(f"{NETWORK_VARIABLE} is one of {', '.join(CHOICES)}, not {wanted!r}")
    return wanted


@contextlib.contextmanager
def job_network(
    replicas: int, topic: str, wanted: str | None = None
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Makes the network of a job with so many replicas; it lasts as long as the context.

    A job of one replica, which serves nobody, has this machine's network unless its own is asked for. Yields
    "host:port" of each replica, and descriptors of the namespaces that each joins, none for this machine's.

    Args:
        replicas: Number of replicas.
        topic: Name under which it is said how replicas can be reached from outside, where they can.
        wanted: One of `CHOICES`; what the environment says unless given.

    Raises:
        PipelineError: When there is no such choice, or the job shall have a network of its own and cannot.
    """
    wanted, reason = resolve_network(wanted), ""
    with contextlib.ExitStack() as held:
        if wanted == "isolated" or (wanted == "auto" and replicas > 1):
            try:
                namespaces = held.enter_context(_namespaces())
                addresses = (f"{processes.HOST}:{_FIRST_PORT + index}" for index in range(replicas))
                yield tuple(addresses), namespaces
                return
            except _UnavailableError as error:
                reason = str(error)
        if reason and wanted == "isolated":
            raise PipelineError(f"the job cannot have a network of its own: {reason}; {REMEDY}")
        reserved = held.enter_context(processes.reserve_ports(replicas))
        if replicas > 1:
            ports = ", ".join(sorted(address.rpartition(":")[2] for address in reserved))
            no = (
                f"no network of its own can be had: {reason}; {REMEDY}"
                if reason
                else "leave out --network host"
            )
            progress.report(
                topic,
                "warning: TensorFlow's servers of this job listen on all addresses of this machine (ports "
                f"{ports}): who reaches one reads and writes files as you; close them with a firewall ({no})",
            )
        yield reserved, ()


def isolation_unavailable() -> str:
    """Says why no job can have a network of its own on this machine; "" where it can."""
    try:
        with _namespaces():
            return ""
    except _UnavailableError as error:
        return str(error)


def reports_no_network(text: str) -> bool:
    """Whether a line that a program has printed says that it has found no network."""
    return _UNREACHABLE.search(text) is not None


class _UnavailableError(Exception):
    """This machine gives no network namespace; the message says why."""


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[int, ...]]:
    """Yields descriptors of new namespaces, in the order in which they are joined."""
    own, theirs = socket.socketpair()
    with own:
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-I", "-S", namespace.__file__, str(number)]
            maker = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[number])
        with maker:
            said, descriptors, *_ = socket.recv_fds(own, 1 << 10, 2)
    if not descriptors:
        raise _UnavailableError(said.decode() or f"what makes one ended with exit code {maker.returncode}")
    with contextlib.ExitStack() as held:
        kept = []
        for descriptor in descriptors:
            # Beyond those that a guardian takes by their numbers, and not inherited by anybody else.
            kept.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE))
            held.callback(os.close, kept[-1])
            os.close(descriptor)
        yield tuple(kept)
