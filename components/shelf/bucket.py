"""Shelf in a bucket: champion.json is replaced only in the generation that was read.

Everything goes through the storage client: a mounted bucket has neither links nor a rename of one step, and
shows what others have written with a delay. A mount is used to read large files, where there is one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from shardline.components.shelf.place import Place, as_text, files_below
from shardline.components.shelf.version import CHAMPION_FILE, Head, Version
from shardline.components.vertex.client import again, platform_errors
from shardline.components.vertex.objects import storage_client
from shardline.components.vertex.refusals import Kind, kind_of
from shardline.trainer import files
from shardline.trainer.errors import ModelError, PlatformError, SettingsError

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client

T = TypeVar("T")

_JSON = "application/json"


class Bucket(Place):
    """A shelf below a prefix of a bucket, gs://BUCKET/PREFIX."""

    def __init__(self, uri: str) -> None:
        files.local_path(uri)  # refuses '..'
        text = uri.removeprefix("gs://").removeprefix("/gcs/")
        self.bucket, _, prefix = text.partition("/")
        self.prefix = "/".join(part for part in prefix.split("/") if part not in ("", "."))
        if not self.bucket:
            raise SettingsError(f"{uri!r} names no bucket; write gs://BUCKET/PATH")
        self._generation = 0

    def where(self, name: str) -> str:
        """Returns a URI, gs://."""
        return f"gs://{PurePosixPath(self.bucket, self.prefix, name)}"

    def head(self, *, by_hand: bool = False) -> Head:
        """Returns the champion with the generation of its record; a bucket that is not there is an error."""
        self._generation = 0
        version = self.champion(by_hand=by_hand)
        if version is None:  # there is none, or no such bucket
            self._list("", max_results=1)
        return Head(version, self._generation)

    def commit(self, version: Version, head: Head) -> bool:
        """Replaces champion.json in the generation that was read, and in no other."""
        text = as_text(version)
        # After an attempt whose answer was lost, the next one finds its own.
        return self._upload_over(CHAMPION_FILE, text, head.token) or self.read(CHAMPION_FILE) == text

    def read(self, name: str) -> str | None:
        """Returns the content of an object as text, and keeps its generation."""
        blob = self._blob(name)
        data: bytes | None = self._find(f"read {self.where(name)}", blob.download_as_bytes)
        if data is None:
            return None
        self._generation = int(blob.generation or 0)
        if len(data) > files.MAX_TEXT_BYTES:
            raise ModelError(f"{self.where(name)} has more than {files.MAX_TEXT_BYTES >> 20} MiB")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as failure:
            raise ModelError(f"{self.where(name)} is not UTF-8 text: {failure.reason}") from None

    def write(self, name: str, text: str) -> None:
        """Writes an object, which is there whole or not at all."""
        self._upload(name, text)

    def replace(self, name: str, text: str) -> None:
        """Writes an object in the place of the one that is there."""
        if self.read(name) is not None:
            self._upload_over(name, text, self._generation)

    def names(self, directory: str) -> list[str]:
        """Returns the names between a prefix and the next slash, sorted."""
        _, directories = self._list(f"{directory}/", delimiter="/")
        return sorted(PurePosixPath(item).name for item in directories)

    def entries(self) -> list[str]:
        """Returns the names of objects and directories below the prefix itself, of one request."""
        found, directories = self._list("", delimiter="/", max_results=1000)
        below = {*(blob.name for blob in found), *directories} - {self._key("")}  # of an empty directory
        return sorted(PurePosixPath(item).name for item in below)

    def put(self, source: Path, directory: str) -> None:
        """Uploads the files of a local directory."""
        for path in files_below(source):
            name = f"{directory}/{path.relative_to(source).as_posix()}"
            self._ask(f"write {self.where(name)}", self._blob(name).upload_from_filename, str(path))

    def remove(self, name: str) -> None:
        """Removes an object, and all below it."""
        found, _ = self._list(f"{name}/")
        bucket = self._client.bucket(self.bucket)
        for key in (*(blob.name for blob in found), self._key(name)):  # not of one generation
            self._find(f"remove gs://{self.bucket}/{key}", bucket.blob(key).delete)

    @contextlib.contextmanager
    def fetched(self, directory: str) -> Iterator[Path]:
        """Yields a directory through the mount /gcs, where there is one, or a copy that is removed again."""
        mounted = files.local_path(self.where(""))
        if files.local_path(f"gs://{self.bucket}").is_dir():
            yield mounted / directory
            return
        with tempfile.TemporaryDirectory(prefix="shardline-") as temporary:
            self._download(f"{directory}/".lstrip("/"), Path(temporary))
            yield Path(temporary)

    def check(self) -> None:
        """Writes an object and removes it, which takes the permissions that publishing takes."""
        name = f"{files.TEMPORARY}check-{os.urandom(8).hex()}"
        self.write(name, "")
        self.remove(name)

    def who(self) -> str:
        """Returns the service account of the credentials, or user@host where they have none."""
        account = getattr(self._client._credentials, "service_account_email", "")
        return account if "@" in account else super().who()

    @cached_property
    def _client(self) -> Client:
        return storage_client()

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _blob(self, name: str) -> Blob:
        return self._client.bucket(self.bucket).blob(self._key(name))

    def _list(self, prefix: str, **options: Any) -> tuple[list[Blob], Iterable[str]]:
        """Returns the objects below a prefix, and with a delimiter the directories in it."""

        def listed(**inner: Any) -> tuple[list[Blob], Iterable[str]]:
            pages = self._client.list_blobs(self.bucket, prefix=self._key(prefix), **inner)
            return list(pages), set(pages.prefixes)

        return self._ask(f"list {self.where(prefix)}", listed, **options)

    def _upload(self, name: str, text: str, **conditions: int) -> None:
        blob = self._blob(name)
        blob.cache_control = "no-store"  # a public object would be shown from a cache for an hour
        doing = f"write {self.where(name)}"
        self._ask(doing, blob.upload_from_string, text, content_type=_JSON, **conditions)

    def _upload_over(self, name: str, text: str, generation: int) -> bool:
        """Writes an object if it still has a generation, 0 for one that is not there; says whether it did."""
        try:
            self._upload(name, text, if_generation_match=generation)
        except PlatformError as error:
            if kind_of(error.__cause__) is not Kind.CONFLICT:
                raise
            return False
        return True

    def _download(self, prefix: str, target: Path) -> None:
        found, _ = self._list(prefix)
        for blob in found:
            path = target / blob.name.removeprefix(self._key(prefix))
            if not path.resolve().is_relative_to(target.resolve()) or blob.name.endswith("/"):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            self._ask(f"read gs://{self.bucket}/{blob.name}", blob.download_to_filename, str(path))

    def _find(self, doing: str, call: Callable[..., T]) -> T | None:
        """Returns what a call gives; None where there is no such object."""
        try:
            return self._ask(doing, call)
        except PlatformError as error:
            if kind_of(error.__cause__) is Kind.MISSING:
                return None
            raise

    def _ask(self, doing: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
        with platform_errors(doing):
            return again(doing, self._client._credentials)(call)(*args, **options, retry=None)
