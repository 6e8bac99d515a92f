"""Buckets of Cloud Storage: listing 1,000 objects a request, reading by range and generation, writing."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import ssl
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from shardline.components.vertex.client import platform_errors, retry_policy
from shardline.components.vertex.refusals import RefusalKind, refusal_kind
from shardline.trainer.base.errors import PlatformError

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client

T = TypeVar("T")

_FIELDS = "items(name,size,generation),prefixes,nextPageToken"
_ATTEMPT_S = 60.0
_ERROR, _UNAUTHORIZED, _MISSING = 400, 401, 404


class Object(NamedTuple):
    """An object: its name in the bucket, size in bytes, and generation, which changes with each write."""

    name: str
    size: int
    generation: int


@dataclass(frozen=True)
class Page:
    """Up to 1,000 objects, and the folders among them if requested, each sorted.

    A page is three values, so that a million objects fit into memory: `names` has a line for each object, as
    no name contains a line break. `token` is that of the next page, "" on the last one.
    """

    names: str
    sizes: array[int]
    generations: array[int]
    folders: tuple[str, ...]
    token: str

    @property
    def weight(self) -> int:
        """Approximate size in memory, in bytes."""
        return len(self.names) + 16 * len(self.sizes)

    def __iter__(self) -> Iterator[Object]:
        return map(Object, self.names.split("\n"), self.sizes, self.generations)


def parse_uri(uri: str) -> tuple[Bucket, str]:
    """Returns the bucket of gs://BUCKET/NAME, with a client that all threads share, and the name."""
    bucket, _, name = uri.removeprefix("gs://").partition("/")
    return Bucket(bucket, _shared_client(os.environ.get("STORAGE_EMULATOR_HOST", ""))), name


@functools.cache
def _shared_client(_: str) -> _Client:
    return _Client()


class _Client:
    """Google's client, and plain connections for reads, which take a fraction of its processor time."""

    def __init__(self) -> None:
        self._idle: deque[HTTPConnection] = deque()

    def __del__(self) -> None:
        for connection in self._idle:
            connection.close()

    @cached_property
    def api(self) -> Client:
        from google.cloud.storage import Client

        with platform_errors("sign in to Google Cloud"):
            return Client()

    @cached_property
    def _open(self) -> Callable[[], HTTPConnection]:
        import certifi

        endpoint = urlsplit(self.api.api_endpoint)
        if endpoint.scheme == "http":  # a fake
            return functools.partial(HTTPConnection, endpoint.netloc, timeout=_ATTEMPT_S)
        context = ssl.create_default_context(cafile=certifi.where())
        return functools.partial(HTTPSConnection, endpoint.netloc, timeout=_ATTEMPT_S, context=context)

    def get(self, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        """Returns the status and the body of a response to a GET request with this process's credentials."""
        with platform_errors("sign in to Google Cloud"):
            self._sign(path, headers)
        status, body = self._get(path, headers)
        if status == _UNAUTHORIZED:  # a token that expired early
            with platform_errors("sign in to Google Cloud"):
                self.api._credentials.refresh(self._request)
                self._sign(path, headers)
            status, body = self._get(path, headers)
        return status, body

    @cached_property
    def _request(self) -> Any:
        from google.auth.transport.requests import Request

        return Request()

    def _sign(self, path: str, headers: dict[str, str]) -> None:
        self.api._credentials.before_request(self._request, "GET", path, headers)

    def _get(self, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        """Uses an idle connection, or a new one if that was closed in the meantime."""
        with contextlib.suppress(IndexError, ConnectionError):
            return self._get_on(self._idle.pop(), path, headers)
        return self._get_on(self._open(), path, headers)

    def _get_on(self, connection: HTTPConnection, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            result = response.status, response.read()
        except (HTTPException, socket.gaierror) as error:
            connection.close()
            raise ConnectionError(str(error) or type(error).__name__) from error
        except OSError:
            connection.close()
            raise
        self._idle.append(connection)
        return result


@dataclass(frozen=True)
class Bucket:
    """The objects of a bucket; names are in the order of their UTF-8 bytes.

    Methods retry where the service was busy, and may raise PlatformError; but `find` and `read`, which may
    run many at a time, try once and raise the errors of Google's clients.
    """

    name: str
    _client: _Client = field(default_factory=lambda: _Client())

    def pages(self, prefix: str, token: str = "", **options: str | int) -> Iterator[Page]:
        """Yields the pages of the names that begin with a prefix, each requested when it is needed.

        `token` is that of the first page. Of the options, `delimiter` "/" lists one folder only,
        `start_offset` and `end_offset` are the first name and the one after the last, `page_size` says how
        many there are.
        """
        while True:
            page = self._call(f"list gs://{self.name}/{prefix}", self._page, prefix, token, **options)
            yield page
            if not (token := page.token):
                return

    def _page(self, prefix: str, token: str, **options: str | int) -> Page:
        listing = self._client.api.list_blobs(
            self.name, prefix=prefix, page_token=token or None, fields=_FIELDS, retry=None, **options
        )
        listing.item_to_value = lambda _, item: item  # a Blob takes longer to make than to read
        items: list[dict[str, Any]] = list(next(listing.pages))
        return Page(
            "\n".join([item["name"] for item in items]),
            array("q", [int(item["size"]) for item in items]),
            array("q", [int(item["generation"]) for item in items]),
            tuple(sorted(listing.prefixes)),
            listing.next_page_token or "",
        )

    @property
    def account(self) -> str:
        """The service account of the credentials; "" where they name none."""
        account = getattr(self._client.api._credentials, "service_account_email", "")
        return account if "@" in account else ""

    def content(self, name: str) -> tuple[bytes, int] | None:
        """Returns the content of an object, and its generation; None where there is none."""
        blob = self._blob(name)
        try:
            data = self._call(self._action("read", name), blob.download_as_bytes, retry=None)
        except PlatformError as error:
            if refusal_kind(error.__cause__) is RefusalKind.MISSING:
                return None
            raise
        return data, int(blob.generation or 0)

    def write(self, name: str, text: str, generation: int | None = None) -> bool:
        """Writes a JSON object atomically.

        With a generation it only replaces that one, 0 for a new object; returns whether it was written.
        """
        blob = self._blob(name)
        blob.cache_control = "no-store"  # a public object would be served from a cache for an hour
        options = {} if generation is None else {"if_generation_match": generation}
        call = functools.partial(blob.upload_from_string, text, content_type="application/json", **options)
        try:
            self._call(self._action("write", name), call, retry=None)
        except PlatformError as error:
            if generation is None or refusal_kind(error.__cause__) is not RefusalKind.CONFLICT:
                raise
            return False
        return True

    def upload(self, name: str, path: Path) -> None:
        """Writes a file of this disk as an object."""
        self._call(self._action("write", name), self._blob(name).upload_from_filename, str(path), retry=None)

    def download(self, name: str, path: Path) -> None:
        """Copies an object to this disk."""
        self._call(self._action("read", name), self._blob(name).download_to_filename, str(path), retry=None)

    def remove(self, name: str) -> None:
        """Removes an object, in any generation, if it exists."""
        try:
            self._call(self._action("remove", name), self._blob(name).delete, retry=None)
        except PlatformError as error:
            if refusal_kind(error.__cause__) is not RefusalKind.MISSING:
                raise

    def _blob(self, name: str) -> Blob:
        return self._client.api.bucket(self.name).blob(name)

    def _action(self, verb: str, name: str) -> str:
        return f"{verb} gs://{self.name}/{name}"

    def _call(self, action: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
        with platform_errors(action):
            answer: T = retry_policy(action, self._client.api._credentials)(call)(*args, **options)
        return answer

    def find(self, name: str) -> Object:
        """Returns name, size and generation of an object; raises FileNotFoundError where there is none."""
        found = json.loads(self._get(f"/storage/v1/b/{self.name}/o", name, "fields=size,generation"))
        return Object(name, int(found["size"]), int(found["generation"]))

    def read(self, name: str, generation: int = 0, start: int = 0, end: int = 0) -> bytes:
        """Returns the content of an object as stored; unless `end` is 0, the bytes from `start` to before it.

        Raises FileNotFoundError if there is no such object, or not in this generation, 0 for the latest.
        """
        query = f"alt=media&generation={generation}" if generation else "alt=media"
        byte_range = {"Range": f"bytes={start}-{end - 1}"} if end else {}
        return self._get(f"/download/storage/v1/b/{self.name}/o", name, query, byte_range)

    def _get(self, path: str, name: str, query: str, headers: dict[str, str] | None = None) -> bytes:
        from google.api_core.exceptions import from_http_status

        # No decompression of objects stored with gzip.
        headers = {"Accept-Encoding": "gzip"} | (headers or {})
        status, data = self._client.get(f"{path}/{quote(name, safe='')}?{query}", headers)
        if status == _MISSING:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"gs://{self.name}/{name}")
        if status >= _ERROR:
            try:
                message = str(json.loads(data)["error"]["message"])
            except (ValueError, KeyError, TypeError):
                message = data[:200].decode(errors="replace")
            raise from_http_status(status, message)  # type: ignore[no-untyped-call]
        return data
