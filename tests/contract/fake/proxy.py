"""A proxy through which clients find the fake under the platform's own names."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Collection, Iterator

from tests.helpers.serving import running


class Tunnels:
    """The connections that are open."""

    def __init__(self) -> None:
        self._open: set[socket.socket] = set()

    @contextlib.contextmanager
    def tunnel(self, client: socket.socket) -> Iterator[None]:
        """Notes a client's connection while it is open."""
        self._open.add(client)
        try:
            yield
        finally:
            self._open.discard(client)

    def cut(self) -> None:
        """Resets all of them, as a network does that breaks."""
        for client in list(self._open):
            with contextlib.suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serve_proxy(
    hosts: Collection[str], grpc_port: int, https_port: int, tunnels: Tunnels
) -> Iterator[tuple[int, list[str]]]:
    """Serves HTTP CONNECT for these hosts, at two ports of this machine, and for nobody else.

    Gives the proxy's port and the list of the hosts that it has refused.
    """
    refused: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            request = self.rfile.readline().decode("ascii", "replace").split()
            if not request:
                return  # the client's process has ended while gRPC was still connecting
            while self.rfile.readline().strip():
                pass
            host = request[1].rpartition(":")[0] if len(request) > 1 else ""
            if request[:1] != ["CONNECT"] or host not in hosts:
                refused.append(" ".join(request[:2]))
                self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                return
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            # One host speaks both; the first message of TLS (ALPN) says which of them a client wants.
            hello = self.connection.recv(1 << 14, socket.MSG_PEEK)
            port = https_port if b"http/1.1" in hello else grpc_port
            grpc = tunnels.tunnel(self.connection) if port == grpc_port else contextlib.nullcontext()
            with grpc, socket.create_connection(("127.0.0.1", port)) as server:
                back = threading.Thread(target=_pump, args=(server, self.connection), daemon=True)
                back.start()
                _pump(self.connection, server)
                back.join()

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    with running(Server(("127.0.0.1", 0), Handler)) as port:
        yield port, refused


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
