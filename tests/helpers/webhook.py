"""A webhook: a real server that keeps what it is told."""

from __future__ import annotations

import contextlib
import json
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
    """

    url: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    first: list[int] = field(default_factory=list)


@contextlib.contextmanager
def serve_webhook() -> Iterator[Webhook]:
    """Serves a webhook on a port of this machine."""
    found = Webhook()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            found.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(found.first.pop(0) if found.first else found.status)
            self.send_header("Content-Length", "0")
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()

    with serve(Handler) as port:
        found.url = f"http://127.0.0.1:{port}/hook/T0PS3CRET"
        yield found
