"""Buckets of Cloud Storage: listing 1,000 objects a request, reading by range and generation, writing."""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import quote

from shardline.components.storage.prefetch import ordered_map
from shardline.components.vertex.client import platform_errors, retry_policy
from shardline.components.vertex.refusals import RefusalKind, refusal_kind
from shardline.trainer.base.errors import PlatformError

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client

T = TypeVar("T")

_FIELDS = "items(name,size,generation),prefixes,nextPageToken"
_ATTEMPT_S = 60.0
_ERROR, _MISSING = 400, 404

# Connections that are kept open, and bytes that are requested at once of a file that is read in order.
_CONNECTIONS, _CHUNK_BYTES = 128, 4 << 20

# Files of a folder that are transferred at the same time.
_TRANSFERS = 16


class Object(NamedTuple):
    """An object: its name in the bucket, size in bytes, and generation, which changes with each write."""

    name: str
    size: int
    generation: int


@dataclass(frozen=True)
class Page:
    """Up to 1,000 objects, and the folders among them if requested, each sorted.

    `token` is that of the next page, "" on the last one.
    """

    objects: Sequence[Object]
    folders: Sequence[str]
    token: str

    def __iter__(self) -> Iterator[Object]:
        return iter(self.objects)


def parse_uri(uri: str) -> tuple[Bucket, str]:
    """Returns the bucket of gs://BUCKET/NAME, with a client that all threads share, and the name."""
    bucket, _, name = uri.removeprefix("gs://").partition("/")
    return _shared_bucket(bucket, os.environ.get("STORAGE_EMULATOR_HOST", "")), name


@functools.cache
def _shared_bucket(name: str, _: str) -> Bucket:
    return Bucket(name)


class Bucket:
    """The objects of a bucket; names are in the order of their UTF-8 bytes.

    Methods retry where the service was busy, and may raise PlatformError; but `find` and `read`, which may
    run many at a time, try once and raise the errors of Google's clients.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def _client(self) -> Client:
        from google.cloud.storage import Client

        with platform_errors("sign in to Google Cloud"):
            return Client()

    @cached_property
    def _http(self) -> Any:
        """Plain connections for reads, which take half the processor time of the client's."""
        from certifi import where
        from google.auth.transport.requests import Request
        from google.auth.transport.urllib3 import AuthorizedHttp
        from requests import Session
        from requests.adapters import HTTPAdapter
        from requests.utils import select_proxy
        from urllib3 import PoolManager

        endpoint = self._client.api_endpoint
        # The proxy and the certificates of the environment, as the client takes them.
        environment = Session().merge_environment_settings(endpoint, {}, None, None, None)
        options: dict[str, Any] = {"retries": False, "timeout": _ATTEMPT_S}
        options["ca_certs"] = where() if environment["verify"] is True else environment["verify"]
        if proxy := select_proxy(endpoint, environment["proxies"]):
            pool = HTTPAdapter(pool_maxsize=_CONNECTIONS).proxy_manager_for(proxy, **options)
        else:
            pool = PoolManager(maxsize=_CONNECTIONS, **options)
        http: Any = AuthorizedHttp(self._client._credentials, http=pool)  # type: ignore[no-untyped-call]
        http._request = Request()  # where tokens come from may be reached without the proxy
        return http

    def pages(self, prefix: str, **options: str | int) -> Iterator[Page]:
        """Yields the pages of the names that begin with a prefix, each requested when it is needed.

        Of the options, `delimiter` "/" lists one folder only, and `page_size` says how many there are.
        """
        token, is_last = "", False
        while not is_last:
            page = self._call(f"list gs://{self.name}/{prefix}", self._page, prefix, token, **options)
            yield page
            token, is_last = page.token, not page.token

    def _page(self, prefix: str, token: str, **options: str | int) -> Page:
        listing = self._client.list_blobs(
            self.name, prefix=prefix, page_token=token or None, fields=_FIELDS, retry=None, **options
        )
        listing.item_to_value = lambda _, item: Object(  # a Blob takes longer to make than to read
            item["name"], int(item["size"]), int(item["generation"])
        )
        objects = list(next(listing.pages))
        return Page(objects, sorted(listing.prefixes), listing.next_page_token or "")

    @property
    def account(self) -> str:
        """The service account of the credentials; "" where they name none."""
        account = getattr(self._client._credentials, "service_account_email", "")
        return account if "@" in account else ""

    def content(self, name: str) -> tuple[bytes, int] | None:
        """Returns the content of an object, and its generation; None where there is none."""
        blob = self._blob(name)
        try:
            data = self._call(f"read gs://{self.name}/{name}", blob.download_as_bytes, retry=None)
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
            self._call(f"write gs://{self.name}/{name}", call, retry=None)
        except PlatformError as error:
            if generation is None or refusal_kind(error.__cause__) is not RefusalKind.CONFLICT:
                raise
            return False
        return True

    def upload(self, name: str, path: Path) -> None:
        """Writes a file of this disk as an object."""
        self._call(
            f"write gs://{self.name}/{name}", self._blob(name).upload_from_filename, str(path), retry=None
        )

    def download(self, name: str, path: Path) -> None:
        """Copies an object to this disk."""
        self._call(
            f"read gs://{self.name}/{name}", self._blob(name).download_to_filename, str(path), retry=None
        )

    def remove(self, name: str) -> None:
        """Removes an object, in any generation, if it exists."""
        try:
            self._call(f"remove gs://{self.name}/{name}", self._blob(name).delete, retry=None)
        except PlatformError as error:
            if refusal_kind(error.__cause__) is not RefusalKind.MISSING:
                raise

    def open(self, name: str) -> BinaryIO:
        """Opens an object, in its present generation, for reading; FileNotFoundError where there is none."""
        blob = self._blob(name, self.find(name).generation)
        return cast(BinaryIO, blob.open("rb", chunk_size=_CHUNK_BYTES))

    def _blob(self, name: str, generation: int | None = None) -> Blob:
        return self._client.bucket(self.name).blob(name, generation=generation)

    def _call(self, action: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
        with platform_errors(action):
            answer: T = retry_policy(action, self._client._credentials)(call)(*args, **options)
        return answer

    def find(self, name: str) -> Object:
        """Returns name, size and generation of an object; raises FileNotFoundError where there is none."""
        found = json.loads(self._get(f"/storage/v1/b/{self.name}/o", name, "fields=size,generation"))
        return Object(name, int(found["size"]), int(found["generation"]))

    def read(self, name: str, generation: int = 0) -> bytes:
        """Returns the content of an object as stored, optionally of one generation.

        Raises FileNotFoundError if there is no such object, or not in this generation.
        """
        query = f"alt=media&generation={generation}" if generation else "alt=media"
        return self._get(f"/download/storage/v1/b/{self.name}/o", name, query)

    def _get(self, path: str, name: str, query: str) -> bytes:
        from google.api_core.exceptions import from_http_status
        from urllib3.exceptions import HTTPError

        url = f"{self._client.api_endpoint}{path}/{quote(name, safe='')}?{query}"
        headers = {"Accept-Encoding": "gzip"}  # no decompression of objects stored with gzip
        with platform_errors("sign in to Google Cloud"):
            try:
                response: Any = self._http.urlopen("GET", url, headers=headers, decode_content=False)
            except HTTPError as error:
                raise ConnectionError(str(error)) from error
        status, data = int(response.status), bytes(response.data)
        if status == _MISSING:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"gs://{self.name}/{name}")
        if status >= _ERROR:
            try:
                message = str(json.loads(data)["error"]["message"])
            except (ValueError, KeyError, TypeError):
                message = data[:200].decode(errors="replace")
            raise from_http_status(status, message)  # type: ignore[no-untyped-call]
        return data


class Folder:
    """Files of a folder in a bucket, "" for none, of which several are transferred at the same time.

    Names are relative to it. Without a bucket there is no file, and nothing is transferred.
    """

    def __init__(self, uri: str) -> None:
        bucket, name = parse_uri(uri)
        self._bucket = bucket if uri else None
        self._prefix = f"{name}/" if name else ""

    def __bool__(self) -> bool:
        return self._bucket is not None

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Returns the sizes in bytes of the files in a folder, "" or NAME/, and 0 for folders, OTHER/."""
        if self._bucket is None:
            return {}
        sizes, start = dict[str, int](), len(self._prefix + folder)
        for page in self._bucket.pages(self._prefix + folder, delimiter="/"):
            sizes |= {name[start:]: 0 for name in page.folders} | {
                each.name[start:]: each.size for each in page
            }
        sizes.pop("", None)  # the folder itself, if it was created in the console
        return sizes

    def upload(self, directory: Path, names: Iterable[str]) -> None:
        """Copies files of a local directory to the folder."""
        self._each(names, lambda bucket, name: bucket.upload(self._prefix + name, directory / name))

    def download(self, directory: Path, names: Iterable[str]) -> None:
        """Copies files to a local directory."""
        self._each(names, lambda bucket, name: bucket.download(self._prefix + name, directory / name))

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, if they exist."""
        self._each(names, lambda bucket, name: bucket.remove(self._prefix + name))

    def _each(self, names: Iterable[str], call: Callable[[Bucket, str], None]) -> None:
        if (bucket := self._bucket) is None:
            return
        transfers = ordered_map(
            lambda name: call(bucket, name), names, size=lambda _: 1, in_flight=_TRANSFERS
        )
        for error in transfers:
            if isinstance(error, Exception):
                raise error
