"""Cloud Storage on a port of this machine: as much of its JSON API as reading takes."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@contextlib.contextmanager
def fake_storage(bucket: str, objects: Mapping[str, bytes]) -> Iterator[str]:
    """Serves the objects of one bucket and gives the server's URL, for STORAGE_EMULATOR_HOST."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            prefix = f"/storage/v1/b/{bucket}/o"
            _, found, name = url.path.partition(prefix)
            name = unquote(name.strip("/"))
            if not found or (name and name not in objects):
                self._answer(404, json.dumps({"error": {"code": 404, "message": "Not Found"}}).encode())
            elif not name:
                self._answer(200, json.dumps(listing(bucket, objects, url.query)).encode())
            elif "alt=media" in url.query or "/download/" in url.path:
                self._send(objects[name])
            else:
                self._answer(200, json.dumps(described(bucket, name, objects[name])).encode())

        def _send(self, data: bytes) -> None:
            wanted = self.headers.get("Range")
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                data = data[int(first) : int(last) + 1 if last else None]
            self._answer(206 if wanted else 200, data, "application/octet-stream")

        def _answer(self, status: int, content: bytes, kind: str = "application/json") -> None:
            with contextlib.suppress(ConnectionError):  # a client may have had enough
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def described(bucket: str, name: str, data: bytes) -> dict[str, str]:
    """Returns an object's metadata."""
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(data)),
        "generation": "1",
    }


def listing(bucket: str, objects: Mapping[str, bytes], query: str) -> dict[str, object]:
    """Returns the objects and folders below a prefix."""
    parameters = parse_qs(query)
    prefix = parameters.get("prefix", [""])[0]
    delimiter = parameters.get("delimiter", [""])[0]
    items, folders = [], set()
    for name, data in sorted(objects.items()):
        if not name.startswith(prefix):
            continue
        head, more, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        if more:
            folders.add(prefix + head + delimiter)
        else:
            items.append(described(bucket, name, data))
    return {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}
