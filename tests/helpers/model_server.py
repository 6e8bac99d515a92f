"""A server of an exported model: TensorFlow Serving's REST interface."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from shardline.components import model_store
from shardline.components.validate.export.signatures import CleanProcess
from tests.helpers.serving import QuietHandler, serve


@contextlib.contextmanager
def serve_model(exported: Path, process: CleanProcess) -> Iterator[str]:
    """Serves the model that is in a clean process, and yields its address, without ":predict"."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = process.ask(exported / model_store.SAVED_MODEL, asked)
            content = json.dumps({"predictions": process.answer(number)}).encode()
            self.send_response(200 if self.path.endswith(":predict") else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with serve(Handler) as port:
        yield f"http://127.0.0.1:{port}/v1/models/digits"
