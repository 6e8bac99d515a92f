"""Buckets of Cloud Storage: listing 1,000 objects a request, reading by range and generation, writing.

A read takes 20 to 50 ms, which alone limits sequential reads: `ordered_map` has many in flight.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import quote

from shardline.components.vertex.client import platform_errors, retry_policy
from shardline.components.vertex.refusals import RefusalKind, refusal_kind
from shardline.trainer.base.errors import PlatformError

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client

T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")

#: Reads at the same time: at 30 ms each, 4,000 a second.
IN_FLIGHT = 128
#: Most bytes of results that wait to be consumed, about.
BUFFER_BYTES = 32 << 20
#: Seconds during which a request is retried.
RETRY_S = 20.0

# Reads that are sent before the size of any is known.
_INITIAL_WINDOW = 16

_FIELDS = "items(name,size,generation),prefixes,nextPageToken"
_ATTEMPT_S = 60.0
# Bytes that are requested at once of a file that is read in order.
_CHUNK_BYTES = 4 << 20

# Files of a folder that are transferred at the same time.
_TRANSFERS = 16


class Object(NamedTuple):
    """An object: its name in the bucket, size in bytes, and generation, which changes with each write."""

    name: str
    size: int
    generation: int


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
        from requests.adapters import HTTPAdapter

        with platform_errors("sign in to Google Cloud"):
            client = Client(project=None)  # none is needed: a bucket belongs to one
        client._http.mount(client.api_endpoint, HTTPAdapter(pool_maxsize=IN_FLIGHT))
        return client

    def pages(self, prefix: str, **options: str | int) -> Iterator[tuple[list[Object], list[str]]]:
        """Yields up to 1,000 objects whose names begin with a prefix, and the folders among them, sorted.

        Each page is requested when it is needed. Of the options, `delimiter` "/" lists one folder only, and
        `page_size` says how many there are.
        """
        action = f"list gs://{self.name}/{prefix}"
        listing = self._client.list_blobs(
            self.name,
            prefix=prefix,
            fields=_FIELDS,
            retry=lambda request: retry_policy(action, self._client._credentials)(request),
            **options,
        )
        listing.item_to_value = lambda _, item: Object(  # a Blob takes longer to make than to read
            item["name"], int(item["size"]), int(item["generation"])
        )
        with platform_errors(action):
            for page in listing.pages:
                yield list(page), sorted(listing.prefixes)
                listing.prefixes.clear()  # else the next page has them, too

    def objects(self, prefix: str, **options: str | int) -> Iterator[Object]:
        """Yields the objects whose names begin with a prefix; the options are those of `pages`."""
        return (each for objects, _ in self.pages(prefix, **options) for each in objects)

    @property
    def account(self) -> str:
        """The service account of the credentials; "" where they name none."""
        account = getattr(self._client._credentials, "service_account_email", "")
        return account if "@" in account else ""

    def content(self, name: str) -> tuple[bytes, int] | None:
        """Returns the content of an object, and its generation; None where there is none."""
        blob = self._blob(name)
        try:
            data = self._call(f"read gs://{self.name}/{name}", blob.download_as_bytes)
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
            self._call(f"write gs://{self.name}/{name}", call)
        except PlatformError as error:
            if generation is None or refusal_kind(error.__cause__) is not RefusalKind.CONFLICT:
                raise
            return False
        return True

    def upload(self, name: str, path: Path) -> None:
        """Writes a file of this disk as an object."""
        self._call(f"write gs://{self.name}/{name}", self._blob(name).upload_from_filename, str(path))

    def download(self, name: str, path: Path) -> None:
        """Copies an object to this disk."""
        self._call(f"read gs://{self.name}/{name}", self._blob(name).download_to_filename, str(path))

    def remove(self, name: str) -> None:
        """Removes an object, in any generation, if it exists."""
        try:
            self._call(f"remove gs://{self.name}/{name}", self._blob(name).delete)
        except PlatformError as error:
            if refusal_kind(error.__cause__) is not RefusalKind.MISSING:
                raise

    def _blob(self, name: str) -> Blob:
        return self._client.bucket(self.name).blob(name)

    def _call(self, action: str, call: Callable[..., T], *args: Any) -> T:
        with platform_errors(action):
            answer: T = retry_policy(action, self._client._credentials)(call)(*args, retry=None)
        return answer

    def find(self, name: str) -> Object:
        """Returns name, size and generation of an object; raises FileNotFoundError where there is none."""
        blob = self._existing(name)
        return Object(name, int(blob.size or 0), int(blob.generation or 0))

    def open(self, name: str) -> BinaryIO:
        """Opens an object, in its present generation, for reading; FileNotFoundError where there is none."""
        return cast(BinaryIO, self._existing(name).open("rb", chunk_size=_CHUNK_BYTES))

    def read(self, name: str, generation: int = 0) -> bytes:
        """Returns the content of an object as stored, optionally of one generation.

        Raises FileNotFoundError if there is no such object, or not in this generation.
        """
        from google.api_core.exceptions import from_http_response
        from urllib3.exceptions import HTTPError

        # On the client's session: its own downloads take twice the processor time.
        url = f"{self._client.api_endpoint}/download/storage/v1/b/{self.name}/o/{quote(name, safe='')}"
        query = {"alt": "media", **({"generation": generation} if generation else {})}
        headers = {"Accept-Encoding": "gzip"}  # no decompression of objects stored with gzip
        get = self._client._http.get
        with get(url, params=query, headers=headers, stream=True, timeout=_ATTEMPT_S) as response:
            if response.status_code == HTTPStatus.NOT_FOUND:
                raise self._missing(name)
            if not response.ok:
                raise from_http_response(response)  # type: ignore[no-untyped-call]
            try:
                return bytes(response.raw.read())
            except HTTPError as error:
                raise ConnectionError(str(error)) from error

    def _existing(self, name: str) -> Blob:
        if (blob := self._client.bucket(self.name).get_blob(name, retry=None)) is None:
            raise self._missing(name)
        return blob

    def _missing(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"gs://{self.name}/{name}")


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
        for objects, folders in self._bucket.pages(self._prefix + folder, delimiter="/"):
            sizes |= {name[start:]: 0 for name in folders} | {
                each.name[start:]: each.size for each in objects
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
        if (bucket := self._bucket) is not None:
            with ThreadPoolExecutor(_TRANSFERS, "transfers") as pool:
                list(pool.map(lambda name: call(bucket, name), names))


class TruncatedError(ConnectionError):
    """A read returned fewer bytes than requested."""

    def __init__(self, path: str, read: int, size: int) -> None:
        super().__init__(errno.EIO, f"{read:,} of {size:,} bytes were read", path)


def is_transient(error: BaseException) -> bool:
    """Returns whether the same request may succeed a moment later."""
    if "certificate verify failed" in str(error).lower():
        return False
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    kind = refusal_kind(error)
    # Renewing a token raises an error of its own, caused by that of the connection.
    cause = error.__cause__ if type(error).__module__.startswith("google.auth") else None
    return kind in (RefusalKind.BUSY, RefusalKind.LOST, RefusalKind.UNREACHED) or (
        cause is not None and is_transient(cause)
    )


def with_retries(request: Callable[[Item], Result], item: Item) -> Result:
    """Returns the result of a request, retried after transient errors with growing pauses."""
    # Imported late: it takes a tenth of a second to load.
    from google.api_core.exceptions import RetryError
    from google.api_core.retry import Retry

    try:
        return Retry(is_transient, initial=0.5, maximum=8.0, timeout=RETRY_S)(request)(item)
    except RetryError as over:
        raise over.cause from over.cause.__cause__


def ordered_map(
    read: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    size: Callable[[Result], int] = len,  # type: ignore[assignment]
) -> Iterator[Result | Exception]:
    """Yields the result of `read` for each item, or the exception that it raises, in the order of the items.

    Reads ahead as far as `IN_FLIGHT` threads need, and as the results fit into `BUFFER_BYTES`, estimated from
    the `size` of earlier ones.
    """
    source, waiting = iter(items), deque[Future[Result]]()
    window, mean = _INITIAL_WINDOW, 0.0
    pool = ThreadPoolExecutor(IN_FLIGHT, "prefetch")
    try:
        while True:
            for item in itertools.islice(source, max(0, window - len(waiting))):
                waiting.append(pool.submit(with_retries, read, item))
            if not waiting:
                return
            first = waiting.popleft()
            error = first.exception()
            if isinstance(error, Exception):
                yield error
                continue
            result = first.result()
            mean += (size(result) - mean) / 16 if mean else size(result)
            window = max(2, min(2 * IN_FLIGHT, int(BUFFER_BYTES / max(mean, 1))))
            yield result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
