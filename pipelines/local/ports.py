"""Loopback ports that stay reserved for as long as a job runs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"


@contextlib.contextmanager
def reserve(count: int) -> Iterator[tuple[str, ...]]:
    """Reserves `count` free ports while the context lasts.

    Each port stays bound, but not listening, with SO_REUSEADDR and SO_REUSEPORT. The kernel then gives
    it to nobody who asks for any free port, while a server that names it can still bind and listen:
    TensorFlow's gRPC server sets SO_REUSEADDR only (checked with 2.21), other servers SO_REUSEPORT. So
    no other process can take a port between its choice and its use, nor during a restart.

    Yields:
        Addresses "host:port", in no particular order.
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
