"""Objects of Cloud Storage: listed 1,000 a request, read by ranges and generations, replaced if unchanged."""

from __future__ import annotations

import errno
import functools
import json
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

from shardline.components.vertex.client import again, platform_errors
from shardline.components.vertex.refusals import Kind, kind_of
from shardline.trainer.errors import PlatformError

if TYPE_CHECKING:
    from google.auth.transport.urllib3 import AuthorizedHttp
    from google.cloud.storage import Blob, Client

T = TypeVar("T")

#: Connections that are kept, for as many reads at the same time.
CONNECTIONS = 128

_FIELDS = "items(name,size,generation),prefixes,nextPageToken"
_ATTEMPT_S = 60.0
_ERROR = 400


class Object(NamedTuple):
    """An object: its name in the bucket, size in bytes, and generation, another one with each write."""

    name: str
    size: int
    generation: int


@dataclass(frozen=True)
class Page:
    """Up to 1,000 objects, and the folders among them where these were asked for, each sorted.

    A million objects are held as three values a page: `names` has a line each, which no name can hold.
    `token` is that of the next page, "" of the last one.
    """

    names: str
    sizes: array[int]
    generations: array[int]
    folders: tuple[str, ...]
    token: str

    @property
    def weight(self) -> int:
        """Bytes that it takes, about."""
        return len(self.names) + 16 * len(self.sizes)

    def __iter__(self) -> Iterator[Object]:
        return map(Object, self.names.split("\n"), self.sizes, self.generations)


def storage_client() -> Client:
    """Returns a client in the name of this process's account; raises PlatformError."""
    from google.cloud.storage import Client

    with platform_errors("sign in to Google Cloud"):
        return Client()


def parse_uri(uri: str) -> tuple[Bucket, str]:
    """Returns the bucket of gs://BUCKET/NAME, whose client all threads share, and the name."""
    bucket, _, name = uri.removeprefix("gs://").partition("/")
    return Bucket(bucket, _shared_client(os.environ.get("STORAGE_EMULATOR_HOST", ""))), name


@functools.cache
def _shared_client(_: str) -> _Client:
    return _Client()


class _Client:
    """Google's client, and connections for many reads, of which its own keeps ten."""

    @cached_property
    def api(self) -> Client:
        return storage_client()

    @cached_property
    def connections(self) -> AuthorizedHttp:
        import certifi
        import urllib3
        from google.auth.transport.urllib3 import AuthorizedHttp

        # A third of the processor's time of the client's own session; only tokens come from elsewhere.
        pools = urllib3.PoolManager(maxsize=CONNECTIONS, ca_certs=certifi.where())
        host = pools.connection_from_url(self.api.api_endpoint)
        http = SimpleNamespace(urlopen=host.urlopen, request=pools.request, headers={})
        return AuthorizedHttp(self.api._credentials, http)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Bucket:
    """The objects of a bucket; names are in the order of their UTF-8 bytes.

    Methods ask again where the service was busy, and may raise PlatformError; but `find` and `read`, of which
    there may be many at the same time, ask once and raise the errors of Google's clients.
    """

    name: str
    _client: _Client = field(default_factory=lambda: _Client())

    def pages(self, prefix: str, token: str = "", **options: str | int) -> Iterator[Page]:
        """Yields the pages of the names that begin with a prefix, each asked for when it is wanted.

        Args:
            prefix: Beginning of the names.
            token: That of the first page.
            options: `delimiter` "/" lists a folder alone, `start_offset` and `end_offset` are the first name
                and the one behind the last, `page_size` is the number of names.
        """
        while True:
            page = self._ask(f"list gs://{self.name}/{prefix}", self._page, prefix, token, **options)
            yield page
            if not (token := page.token):
                return

    def _page(self, prefix: str, token: str, **options: str | int) -> Page:
        found = self._client.api.list_blobs(
            self.name, prefix=prefix, page_token=token or None, fields=_FIELDS, retry=None, **options
        )
        found.item_to_value = lambda _, item: item  # a Blob takes longer to make than to read
        items: list[dict[str, Any]] = list(next(found.pages))
        return Page(
            "\n".join([item["name"] for item in items]),
            array("q", [int(item["size"]) for item in items]),
            array("q", [int(item["generation"]) for item in items]),
            tuple(sorted(found.prefixes)),
            found.next_page_token or "",
        )

    @property
    def account(self) -> str:
        """The service account in whose name objects are written; "" where the credentials name none."""
        account = getattr(self._client.api._credentials, "service_account_email", "")
        return account if "@" in account else ""

    def content(self, name: str) -> tuple[bytes, int] | None:
        """Returns the content of an object, and its generation; None where there is none."""
        blob = self._blob(name)
        try:
            data = self._ask(self._doing("read", name), blob.download_as_bytes, retry=None)
        except PlatformError as error:
            if kind_of(error.__cause__) is Kind.MISSING:
                return None
            raise
        return data, int(blob.generation or 0)

    def write(self, name: str, text: str, generation: int | None = None) -> bool:
        """Writes an object of JSON, which is there whole or not at all.

        With a generation, only in its place, 0 for an object that is not there; returns whether it was.
        """
        blob = self._blob(name)
        blob.cache_control = "no-store"  # a public object would be shown from a cache for an hour
        options = {} if generation is None else {"if_generation_match": generation}
        call = functools.partial(blob.upload_from_string, text, content_type="application/json", **options)
        try:
            self._ask(self._doing("write", name), call, retry=None)
        except PlatformError as error:
            if generation is None or kind_of(error.__cause__) is not Kind.CONFLICT:
                raise
            return False
        return True

    def upload(self, name: str, path: Path) -> None:
        """Writes a file of this disk as an object."""
        self._ask(self._doing("write", name), self._blob(name).upload_from_filename, str(path), retry=None)

    def download(self, name: str, path: Path) -> None:
        """Copies an object to this disk."""
        self._ask(self._doing("read", name), self._blob(name).download_to_filename, str(path), retry=None)

    def remove(self, name: str) -> None:
        """Removes an object, in whatever generation, if it is there."""
        try:
            self._ask(self._doing("remove", name), self._blob(name).delete, retry=None)
        except PlatformError as error:
            if kind_of(error.__cause__) is not Kind.MISSING:
                raise

    def _blob(self, name: str) -> Blob:
        return self._client.api.bucket(self.name).blob(name)

    def _doing(self, verb: str, name: str) -> str:
        return f"{verb} gs://{self.name}/{name}"

    def _ask(self, doing: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
        with platform_errors(doing):
            answer: T = again(doing, self._client.api._credentials)(call)(*args, **options)
        return answer

    def find(self, name: str) -> Object:
        """Returns what is known of an object; raises FileNotFoundError where there is none."""
        found = json.loads(self._get(f"/storage/v1/b/{self.name}/o", name, "fields=size,generation"))
        return Object(name, int(found["size"]), int(found["generation"]))

    def read(self, name: str, generation: int = 0, start: int = 0, end: int = 0) -> bytes:
        """Returns the content of an object as it is stored, or a range of it.

        Args:
            name: The object.
            generation: The only one that is read; 0 for the latest.
            start: Offset of the first byte.
            end: Offset behind the last byte; 0 for the whole object.

        Raises:
            FileNotFoundError: There is no such object, or not in this generation.
        """
        query = f"alt=media&generation={generation}" if generation else "alt=media"
        part = {"Range": f"bytes={start}-{end - 1}"} if end else {}
        return self._get(f"/download/storage/v1/b/{self.name}/o", name, query, part)

    def _get(self, path: str, name: str, query: str, headers: dict[str, str] | None = None) -> bytes:
        with platform_errors("sign in to Google Cloud"):
            connections = self._client.connections
        import requests
        from google.api_core.exceptions import from_http_status
        from urllib3.exceptions import HTTPError

        try:
            answer = connections.urlopen(  # type: ignore[no-untyped-call]
                "GET",
                f"{path}/{quote(name, safe='')}?{query}",
                headers={"Accept-Encoding": "gzip"} | (headers or {}),  # what is stored so is read as it is
                timeout=_ATTEMPT_S,
                retries=False,
                decode_content=False,
            )
        except HTTPError as error:
            raise requests.ConnectionError(str(error)) from error
        if answer.status == 404:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"gs://{self.name}/{name}")
        data: bytes = answer.data
        if answer.status >= _ERROR:
            raise from_http_status(answer.status, _message(data))  # type: ignore[no-untyped-call]
        return data


def _message(answer: bytes) -> str:
    """Returns what the service says of an error."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
