"""Servers on ports of this machine, in threads of the tests."""

from __future__ import annotations

import contextlib
import socketserver
import ssl
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.contract.fake.certificates import Certificates


class QuietHandler(BaseHTTPRequestHandler):
    """A handler of HTTP that writes no line for each request."""

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints what a handler raised, but for a client that has left: its test reads the same stderr."""
        if not isinstance(sys.exception(), ConnectionError | ssl.SSLError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serve(handler: type[BaseHTTPRequestHandler], files: Certificates | None = None) -> Iterator[int]:
    """Serves HTTP, with TLS where there are certificates, and gives the port."""
    server = _Server(("127.0.0.1", 0), handler)
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        # The handshake is left to the thread of the connection.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with running(server) as port:
        yield port


@contextlib.contextmanager
def running(server: socketserver.TCPServer) -> Iterator[int]:
    """Runs a server of sockets and gives its port."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
