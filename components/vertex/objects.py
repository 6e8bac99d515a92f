"""Objects of Cloud Storage: the client, and the names in a bucket, 1,000 a request."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from shardline.components.vertex.client import again, platform_errors

if TYPE_CHECKING:
    from google.cloud.storage import Client

#: Ranges of names that are listed at the same time; the client keeps ten connections.
_TOGETHER = 8
#: Into how many ranges names are divided at most, each of which may cost a page that is not full.
_RANGES = 16
#: Bytes that are held at most, about, of pages that nobody has taken.
_ROOM = 64 << 20

_FIELDS = "items(name,size,generation),prefixes,nextPageToken"


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


@dataclass(frozen=True)
class Names:
    """The names in a bucket, in the order of their UTF-8 bytes; every method may raise PlatformError."""

    bucket: str

    @cached_property
    def _client(self) -> Client:
        return storage_client()

    def pages(self, prefix: str, token: str = "", **options: str | int) -> Iterator[Page]:
        """Yields the pages of the names that begin with a prefix, each asked for when it is wanted.

        Args:
            prefix: Beginning of the names.
            token: That of the first page.
            options: `delimiter` "/" lists a folder alone, `start_offset` and `end_offset` are the first name
                and the one behind the last, `page_size` is the number of names.
        """
        doing = f"list gs://{self.bucket}/{prefix}"
        while True:
            with platform_errors(doing):
                page: Page = again(doing, self._client._credentials)(self._page)(prefix, token, **options)
            yield page
            if not (token := page.token):
                return

    def _page(self, prefix: str, token: str, **options: str | int) -> Page:
        found = self._client.list_blobs(
            self.bucket, prefix=prefix, page_token=token or None, fields=_FIELDS, retry=None, **options
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

    def objects(self, prefix: str, folders: Sequence[str] = ()) -> Iterator[Object]:
        """Yields all objects whose names begin with a prefix.

        `folders` are some beginnings of names, sorted: at these the names are divided, to be listed at the
        same time.
        """
        cuts = list(folders[:: -(-len(folders) // _RANGES) or 1])[1:]
        ranges = _Ranges(self, prefix, list(pairwise(["", *cuts, ""])))
        for page in ranges.pages():
            yield from page


class _Ranges:
    """Ranges of names of which some are listed at the same time, and the pages taken in order."""

    def __init__(self, names: Names, prefix: str, ranges: Sequence[tuple[str, str]]) -> None:
        self._names, self._prefix, self._ranges = names, prefix, ranges
        self._found: list[deque[Page | Exception | None]] = [deque() for _ in ranges]
        self._changed = threading.Condition()
        self._current = self._held = 0

    def pages(self) -> Iterator[Page]:
        """Yields the pages of all ranges."""
        with ThreadPoolExecutor(min(_TOGETHER, len(self._ranges)), "names") as pool:
            try:
                for number in range(len(self._ranges)):
                    pool.submit(self._list, number)
                for number, found in enumerate(self._found):
                    while page := self._take(number, found):
                        yield page
            finally:
                self._current = len(self._ranges)
                with self._changed:
                    self._changed.notify_all()
                pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, number: int, found: deque[Page | Exception | None]) -> Page | None:
        with self._changed:
            self._current = number
            self._changed.notify_all()
            self._changed.wait_for(lambda: found)
            page = found.popleft()
            if isinstance(page, Exception):
                raise page
            self._held -= page.weight if page else 0
            return page

    def _list(self, number: int) -> None:
        """Lists one range; the one that is being taken always has room."""
        start, end = self._ranges[number]
        last: Exception | None = None
        try:
            options = {"start_offset": start, "end_offset": end}
            for page in self._names.pages(
                self._prefix, **{key: value for key, value in options.items() if value}
            ):
                with self._changed:
                    self._changed.wait_for(lambda: self._held < _ROOM or self._current >= number)
                    if self._current > number:
                        return
                    self._held += page.weight
                    self._found[number].append(page)
                    self._changed.notify_all()
        except Exception as error:
            last = error
        with self._changed:
            self._found[number].append(last)
            self._changed.notify_all()
