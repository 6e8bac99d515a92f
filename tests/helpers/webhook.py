"""A webhook: a real server that keeps what it is told."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@dataclass
class Webhook:
    """A webhook.

    Attributes:
        url: Its address, which is a secret.
        messages: What it was told.
        status: What it answers.
    """

    url: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200


@contextlib.contextmanager
def serve_webhook() -> Iterator[Webhook]:
    """Serves a webhook on a port of this machine."""
    found = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(found.status)
            self.send_header("Content-Length", "0")
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/hook/T0PS3CRET"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
