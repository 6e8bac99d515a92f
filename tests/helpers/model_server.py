"""A server of an exported model: TensorFlow Serving's REST interface, right or wrong as a test asks for."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.components import model_store
from shardline.components.validate.export.predictions import CleanProcess
from tests.helpers.serving import QuietHandler, serve

Rows = list[dict[str, Any]]


@dataclass
class ModelServer:
    """A server that is running.

    Attributes:
        url: Address of the model, without ":predict".
        change: What is done to the right answer.
        status: What it answers with; another one than 200 comes with `body`.
        body: Instead of the answer.
        hangs: "before" the answer, in the "middle" of it, or between "bytes"; "drops" the line, or says
            "continue" for ever.
        requests: Headers of what it was asked.
    """

    url: str = ""
    change: Callable[[Rows], Any] = lambda rows: rows
    status: int = 200
    body: bytes = b""
    hangs: str = ""
    requests: list[dict[str, str]] = field(default_factory=list)


@contextlib.contextmanager
def serve_model(exported: Path, process: CleanProcess) -> Iterator[ModelServer]:
    """Serves the model that is in a clean process on a port of this machine."""
    found, over, lock = ModelServer(), threading.Event(), threading.Lock()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            found.requests.append(dict(self.headers))
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if found.hangs == "before":
                over.wait()
            while found.hangs == "continue" and not over.wait(0.001):
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            content = found.body or self._answer(asked)
            self.send_response(found.status)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if not found.hangs:
                self.wfile.write(content)
            elif found.hangs == "bytes":  # fast enough for whoever waits for each of them
                any(self.wfile.write(bytes([byte])) and over.wait(0.02) for byte in content)
            else:
                self.wfile.write(content[:1])
                if found.hangs == "middle":
                    over.wait()
                self.close_connection = True

        def _answer(self, asked: Any) -> bytes:
            if not self.path.endswith(":predict"):
                found.status = 404
                return b'{"error": "Malformed request: POST /v1/models/digits"}'
            with lock:
                number = process.ask(exported / model_store.SAVED_MODEL, asked)
                return json.dumps({"predictions": found.change(process.answer(number))}).encode()

    with serve(Handler) as port:
        found.url = f"http://127.0.0.1:{port}/v1/models/digits"
        try:
            yield found
        finally:
            over.set()
