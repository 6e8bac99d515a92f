"""Cloud Storage on a port of this machine: as much of its JSON API as reading, writing and listing take."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from itertools import islice
from urllib.parse import parse_qs, unquote, urlsplit

from tests.contract.fake.certificates import Certificates
from tests.helpers.serving import QuietHandler, serve

#: What becomes of the n-th request: "" serves it, "before" refuses it, "after" refuses it when it is done,
#: "lost" does it and answers as a service that has failed, "429" or "503" is the answer; "reset" ends the
#: connection; of what is read, "cut" sends a half and then ends it, and "short" says that the half is all.
Fate = Callable[[int], str]

_WORDS = {
    403: "refused by the test",
    404: "Not Found",
    412: "conditionNotMet",
    429: "too many",
    503: "not available",
}


class Objects:
    """Objects of one bucket, each with the generation that a precondition names."""

    def __init__(self, content: MutableMapping[str, bytes]) -> None:
        self.content = content
        self.lock = threading.Lock()
        self.requests = 0
        self._generations = dict.fromkeys(content, 1)
        self._last = 1

    def names(self, first: str) -> Iterator[str]:
        """Yields the names from one on, sorted; a million of them are kept so by whoever has them."""
        names = getattr(self.content, "sorted", None) or sorted(self.content)
        return islice(names, bisect_left(names, first), None)

    def generation(self, name: str) -> int:
        """Returns the generation of an object; 0 where there is none."""
        return self._generations.get(name, 1) if name in self.content else 0

    def put(self, name: str, data: bytes) -> None:
        """Writes an object in a new generation."""
        self._last += 1
        self.content[name], self._generations[name] = data, self._last

    def described(self, bucket: str, name: str) -> dict[str, str]:
        """Returns an object's metadata."""
        size, generation = str(len(self.content[name])), str(self.generation(name))
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": size,
            "generation": generation,
        }


@contextlib.contextmanager
def fake_storage(
    bucket: str,
    objects: MutableMapping[str, bytes],
    fate: Fate = lambda _: "",
    latency: float = 0,
    files: Certificates | None = None,
) -> Iterator[str]:
    """Serves the objects of one bucket and gives the server's URL, for STORAGE_EMULATOR_HOST.

    `latency` is in seconds, of each request. With certificates the server speaks TLS.
    """
    stored = Objects(objects)

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body of an answer in one packet: a second one would wait for 40 ms

        def do_GET(self) -> None:
            self._serve(self._get)

        def do_POST(self) -> None:
            self._serve(self._upload)

        def do_DELETE(self) -> None:
            self._serve(self._delete)

        def _serve(self, method: Callable[[str, dict[str, str]], None]) -> None:
            url = urlsplit(self.path)
            self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            _, found, name = url.path.partition(f"/b/{bucket}/o")
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            if self.command == "GET" and url.path.endswith(f"/b/{bucket}"):
                self._fate = ""  # the client asks for it when it likes, in a thread of its own
                self._json({"kind": "storage#bucket", "name": bucket, "projectNumber": "1"})
                return
            time.sleep(latency)
            with stored.lock:
                stored.requests += 1
                self._fate = fate(stored.requests)
                if self._fate == "before":
                    self._error(403)
                elif self._fate in ("429", "503"):
                    self._error(int(self._fate))
                elif self._fate == "reset":
                    self._hang_up()
                elif not found:
                    self._error(404)
                else:
                    method(unquote(name.strip("/")), query)

        def _get(self, name: str, query: dict[str, str]) -> None:
            if name and name not in objects:
                self._error(404)
            elif not name:
                self._json(listing(bucket, stored, query))
            elif query.get("alt") == "media" or "/download/" in self.path:
                self._send(name, query)
            else:
                self._json(stored.described(bucket, name))

        def _upload(self, _: str, query: dict[str, str]) -> None:
            boundary = self.headers["Content-Type"].partition("boundary=")[2].strip('"').encode()
            _, head, content, _ = self._body.split(b"--" + boundary)
            name = json.loads(head.partition(b"\r\n\r\n")[2])["name"]
            data = content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
            wanted = query.get("ifGenerationMatch")
            if wanted is not None and int(wanted) != stored.generation(name):
                self._error(412)
                return
            stored.put(name, data)
            self._json(stored.described(bucket, name))

        def _delete(self, name: str, _: dict[str, str]) -> None:
            if objects.pop(name, None) is None:
                self._error(404)
            else:
                self._answer(204, b"")

        def _hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def _send(self, name: str, query: dict[str, str]) -> None:
            data, wanted = objects[name], self.headers.get("Range")
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                data = data[int(first) : int(last) + 1 if last else None]
            if (query.get("generation") or str(stored.generation(name))) != str(stored.generation(name)):
                self._error(404)
                return
            if self._fate in ("cut", "short"):
                length, data = len(data), data[: len(data) // 2]
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(length if self._fate == "cut" else len(data)))
                self.end_headers()
                self.wfile.write(data)
                self.wfile.flush()
                if self._fate == "cut":
                    self._hang_up()
                return
            kind = "application/octet-stream"
            self._answer(206 if wanted else 200, data, kind, {"X-Goog-Generation": stored.generation(name)})

        def _json(self, content: dict[str, object] | dict[str, str]) -> None:
            self._answer(200, json.dumps(content).encode())

        def _error(self, status: int) -> None:
            self._fate = ""
            self._answer(status, json.dumps({"error": {"code": status, "message": _WORDS[status]}}).encode())

        def _answer(
            self,
            status: int,
            content: bytes,
            kind: str = "application/json",
            headers: dict[str, int] | None = None,
        ) -> None:
            if self._fate in ("after", "lost"):
                self._error(503 if self._fate == "lost" else 403)
                return
            with contextlib.suppress(ConnectionError):  # a client may have had enough
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                for header, value in (headers or {}).items():
                    self.send_header(header, str(value))
                self.end_headers()
                self.wfile.write(content)

    with serve(Handler, files) as port:
        yield f"http{'s' if files else ''}://127.0.0.1:{port}"


def listing(bucket: str, stored: Objects, query: dict[str, str]) -> dict[str, object]:
    """Returns a page of the objects and folders below a prefix."""
    prefix, delimiter, end = query.get("prefix", ""), query.get("delimiter", ""), query.get("endOffset", "")
    room, items, folders = int(query.get("maxResults", 1000)), [], dict[str, None]()
    token = query.get("pageToken", "")
    for name in stored.names(max(prefix, query.get("startOffset", ""), token)):
        if not name.startswith(prefix) or (end and name >= end):
            break
        head, more, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        folder = prefix + head + more
        if more and folder in folders:
            continue
        if len(items) + len(folders) == room:
            return _page(items, folders, name)
        if more:
            folders[folder] = None
        else:
            items.append(stored.described(bucket, name))
    return _page(items, folders, "")


def _page(items: list[dict[str, str]], folders: Iterable[str], token: str) -> dict[str, object]:
    page: dict[str, object] = {"kind": "storage#objects"}
    found = {"items": items, "prefixes": list(folders), "nextPageToken": token}
    return page | {name: value for name, value in found.items() if value}
