"""A webhook: a real server that keeps what it is told."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.serving import QuietHandler, serve


@dataclass
class Webhook:
    """A webhook.

    Attributes:
        url: Its address, which is a secret.
        messages: What it was told.
        status: What it answers.
        first: What it answers before that, one after the other.
        endless: Whether it goes on: "header" drips, or "body" is sent as fast as it can be.
    """

    url: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    first: list[int] = field(default_factory=list)
    endless: str = ""


@contextlib.contextmanager
def serve_webhook() -> Iterator[Webhook]:
    """Serves a webhook on a port of this machine."""
    found = Webhook()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            found.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(found.first.pop(0) if found.first else found.status)
            self.send_header("Content-Length", "0" if not found.endless else f"{1 << 40}")
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            while found.endless == "header":
                self.flush_headers()
                self.wfile.write(b"X")
                time.sleep(0.01)
            self.end_headers()
            while found.endless == "body":
                self.wfile.write(bytes(1 << 16))

    with serve(Handler) as port:
        found.url = f"http://127.0.0.1:{port}/hook/T0PS3CRET"
        yield found
