"""Storage: the files below a root, which is a directory of this machine or a prefix of a bucket.

A mounted bucket uploads an object again for each append, copies it for a rename, knows a lock on one machine
only, and reads in 20 to 50 ms. So a path in a bucket, gs:// or /gcs/, is used by Google's client and not
through its mount, files are written once, small records are replaced only if they are unchanged (an object by
its generation, a file under a lock and by a rename), and many reads are in flight (`ordered_map`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, cast

from shardline.components.vertex import RefusalKind, platform_errors, refusal_kind, retry_policy, with_retries
from shardline.trainer.base import crash, files
from shardline.trainer.base.deserialize import restore
from shardline.trainer.base.errors import ModelError, PlatformError, RunError

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client

T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")

#: Reads at the same time: at 30 ms each, 4,000 a second.
IN_FLIGHT = 128
#: Most bytes of results that wait to be consumed, about.
BUFFER_BYTES = 32 << 20

# Reads that are sent before the size of any is known.
_INITIAL_WINDOW = 16
_FIELDS = "items(name,size,generation),prefixes,nextPageToken"
_ATTEMPT_S = 60.0
# Bytes that are requested at once of a file that is read in order.
_CHUNK_BYTES = 4 << 20
# Files that are transferred at the same time.
_TRANSFERS = 16
_LOCK_FILE, _CHECK_FILE = ".lock", f"{files.TEMPORARY}check"
#: Seconds to wait for the lock, which is held for one write.
_LOCK_TIMEOUT_S = 60.0


class File(NamedTuple):
    """A file, or a folder, whose name ends with a slash.

    `name` is relative to what was listed. `version` is the time of change in nanoseconds, or an object's
    generation, which changes with each write. A listing without sizes has size -1 and version "".
    """

    name: str
    path: str
    size: int = -1
    version: str = ""
    is_generation: bool = False


class TextFile(NamedTuple):
    """A text file as it was read, None where there was none; in a bucket with its generation."""

    text: str | None
    generation: int = 0
    location: str = ""

    def restore(self, kind: type[T], remedy: str = "") -> T | None:
        """Returns a dataclass from the JSON, None where there is no file; ModelError where it is damaged."""
        if self.text is None:
            return None
        try:
            content = files.parse_json(self.text, self.location, ModelError)
        except ModelError as error:
            raise ModelError(f"{error}{remedy and f'; {remedy}'}") from None
        return restore(kind, content, self.location, ModelError, remedy)


class Storage:
    """Files below a root, which need not be there; names are relative to it.

    Methods raise SettingsError or RunError where a disk cannot be used, and retry where a bucket's service is
    busy, then raise PlatformError. But listings raise the OSErrors of a disk, and `find`, `open` and
    `read_bytes`, of which many run at a time, try once and raise the errors of Google's client.

    Attributes:
        root: Path of the directory, or gs://BUCKET/PREFIX.
        is_remote: Whether it is in a bucket.
    """

    def __init__(self, root: str | os.PathLike[str], *, advice: str = "", kept: str = "") -> None:
        """Makes nothing yet.

        Args:
            root: A directory, or gs:// or /gcs/ for a prefix of a bucket.
            advice: What to do where the root cannot be used, for messages.
            kept: What a write that fails leaves unchanged, for messages.
        """
        uri = files.bucket_uri(root)
        self.root, self.is_remote = uri or str(files.local_path(root)), bool(uri)
        self._bucket, _, prefix = uri.removeprefix("gs://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._advice, self._kept = advice, kept and f"; {kept}"

    @property
    def author(self) -> str:
        """Who writes: the service account of a bucket's credentials, else user@host."""
        account = getattr(_client()._credentials, "service_account_email", "") if self.is_remote else ""
        user = os.environ.get("USER") or os.getuid()
        return account if "@" in account else f"{user}@{socket.gethostname()}"

    def location(self, name: str = "") -> str:
        """Returns the path or URI of a file or folder."""
        if self.is_remote:
            return f"gs://{PurePosixPath(self._bucket, self._prefix, name)}"
        return str(Path(self.root, name))

    def entries(self, folder: str = "") -> Iterator[File]:
        """Yields the files and folders in a folder, "" or NAME/, named relative to that.

        A disk's are sorted, without sizes and those that are hidden; a bucket's come 1,000 a request, when
        they are needed, and a folder that is missing is empty.
        """
        if self.is_remote:
            return self.objects(folder, len(folder), delimiter="/")
        return self._scan(folder, follow=True)

    def files(self, *, sizes: bool = True) -> Iterator[File]:
        """Yields all files that are not hidden, in the order of the bytes of their names.

        Links to folders are followed only directly in the root. Without `sizes`, a disk's files have none.
        """
        if self.is_remote:
            return (each for each in self.objects() if is_visible(each.name) and each.name[-1] != "/")
        return map(with_stat, self._walk()) if sizes else self._walk()

    def read(self, name: str) -> TextFile:
        """Returns a text file; a broken link is unreadable, not missing; a bucket must be there."""
        if self.is_remote:
            blob = self._blob(name)
            data = self._call("read", name, blob.download_as_bytes, accept=RefusalKind.MISSING)
            if data is None:
                next(self.objects(page_size=1), None)
                return TextFile(None)
            # Text that is not UTF-8 is not JSON either, and is reported as damaged.
            text = data.decode("utf-8-sig", "replace")
            return TextFile(text, int(blob.generation or 0), self.location(name))
        path = Path(self.root, name)
        with crash.output_errors(f"read {path}"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)
            return TextFile(files.read_text(path, ModelError), location=str(path))
        return TextFile(None)

    def replace(self, name: str, text: str, seen: TextFile | None = None) -> bool:
        """Writes a JSON file atomically, one that was `seen` only if it is unchanged; returns whether."""
        if not self.is_remote:
            with (
                crash.output_errors(f"write to {self.root}", self._advice),
                contextlib.nullcontext() if seen is None else self._lock(),
            ):
                return self._replace_on_disk(name, text, seen)
        blob = self._blob(name)
        blob.cache_control = "no-store"  # a public object would be served from a cache for an hour

        def write(**options: Any) -> bool:
            if seen is not None:
                options["if_generation_match"] = seen.generation
            blob.upload_from_string(text, content_type="application/json", **options)
            return True

        written = self._call("write", name, write, accept=seen and RefusalKind.CONFLICT)
        # A retry after a lost answer finds the text that was written.
        return bool(written) or self.read(name).text == text

    def _replace_on_disk(self, name: str, text: str, seen: TextFile | None) -> bool:
        path = Path(self.root, name)
        if seen is not None and self.read(name).text != seen.text:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            files.write_text(path, text)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}{self._kept}") from error
        return True

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        root = Path(self.root)
        root.mkdir(parents=True, exist_ok=True)
        with (root / _LOCK_FILE).open("a") as lock:
            with contextlib.suppress(OSError):  # other users may write, too
                os.fchmod(lock.fileno(), 0o666)
            end = time.monotonic() + _LOCK_TIMEOUT_S
            while not files.lock(lock.fileno()):
                if time.monotonic() > end:
                    raise RunError(f"{lock.name} has been locked for {_LOCK_TIMEOUT_S:.0f} s; try again")
                time.sleep(0.01)
            yield

    def put(self, source: Path, names: Iterable[str], folder: str = "") -> None:
        """Copies files of a local directory: into a bucket, or into a new folder of a disk.

        There a copy that fails is removed. Nothing is copied where the files are already.
        """
        target = Path(self.root, folder)
        if self.is_remote:
            self._each(names, lambda name: self._upload(source / name, f"{folder}{name}"))
            return
        if source == target:
            return
        with crash.output_errors(f"write to {self.root}", self._advice):
            target.mkdir(parents=True)
        try:
            for name in names:
                copy = target / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, copy)
                files.sync(copy)
            for made in (target.parent, target, *(path for path in target.rglob("*") if path.is_dir())):
                files.sync(made)
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            reason = files.with_space(error.strerror or str(error), target)
            raise RunError(f"cannot copy to {target}: {reason}{self._kept}") from error

    def get(self, target: Path, names: Iterable[str]) -> None:
        """Copies files of a bucket to a local directory; those of a disk are used where they are."""
        if not self.is_remote:
            return
        root = target.resolve()

        def get(name: str) -> None:
            path = (root / name).resolve()
            if path.is_relative_to(root):  # the name of an object may lead anywhere
                path.parent.mkdir(parents=True, exist_ok=True)
                self.download(name, path)

        self._each(names, get)

    def download(self, name: str, path: Path) -> None:
        """Copies a file of a bucket to this disk."""
        self._call("read", name, functools.partial(self._blob(name).download_to_filename, str(path)))

    def _upload(self, path: Path, name: str) -> None:
        self._call("write", name, functools.partial(self._blob(name).upload_from_filename, str(path)))

    def remove(self, names: Iterable[str]) -> None:
        """Removes files, in any generation, if they exist."""

        def remove(name: str) -> None:
            if self.is_remote:
                self._call("remove", name, self._blob(name).delete, accept=RefusalKind.MISSING)
            else:
                Path(self.root, name).unlink(missing_ok=True)

        self._each(names, remove)

    @contextlib.contextmanager
    def fetched(self, folder: str = "") -> Iterator[Path]:
        """Yields a folder of a disk itself, a temporary copy of one in a bucket."""
        if not self.is_remote:
            yield Path(self.root, folder)
            return
        there = Storage(self.location(folder))
        with tempfile.TemporaryDirectory(prefix="shardline-") as target:
            there.get(Path(target), (each.name for each in there.objects() if each.name[-1] != "/"))
            yield Path(target).resolve()

    def check(self) -> None:
        """Checks that files can be written, and removed again, on a disk also that they can be locked."""
        if self.is_remote:
            self.replace(_CHECK_FILE, "")
            self.remove([_CHECK_FILE])
            return
        root = Path(self.root)
        existing = next(path for path in (root, *root.parents) if path.exists())
        with (
            crash.output_errors(f"write to {root}", self._advice),
            tempfile.NamedTemporaryFile(dir=existing, prefix=files.TEMPORARY) as file,
        ):
            files.lock(file.fileno())

    def find(self, name: str) -> File:
        """Returns an object's size and generation; FileNotFoundError where there is none."""
        blob = self._existing(name)
        return File(name, self.location(name), int(blob.size or 0), str(blob.generation or 0), True)

    def open(self, name: str) -> BinaryIO:
        """Opens an object, in its present generation, for reading; FileNotFoundError where there is none."""
        return cast(BinaryIO, self._existing(name).open("rb", chunk_size=_CHUNK_BYTES))

    def read_bytes(self, name: str, generation: int = 0) -> bytes:
        """Returns an object as stored, without decompression, optionally of one generation.

        Raises FileNotFoundError where there is none, or not in this generation.
        """
        from google.api_core.exceptions import NotFound

        blob = _client().bucket(self._bucket).blob(self._prefix + name, generation=generation or None)
        options = {"raw_download": True, "checksum": None, "retry": None, "timeout": _ATTEMPT_S}
        try:
            return cast(bytes, blob.download_as_bytes(**options))
        except NotFound:
            raise self._missing(name) from None

    def _existing(self, name: str) -> Blob:
        if (blob := _client().bucket(self._bucket).get_blob(self._prefix + name, retry=None)) is None:
            raise self._missing(name)
        return blob

    def _missing(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.location(name))

    def _blob(self, name: str) -> Blob:
        return _client().bucket(self._bucket).blob(self._prefix + name)

    def _call(
        self, verb: str, name: str, call: Callable[..., T], accept: RefusalKind | None = None
    ) -> T | None:
        """Returns the result of a request about an object, None where it is refused in the accepted way."""
        action = f"{verb} {self.location(name)}"
        try:
            with platform_errors(action):
                return retry_policy(action, _client()._credentials)(call)(retry=None)
        except PlatformError as error:
            if refusal_kind(error.__cause__) is not accept:
                raise
            return None

    def _each(self, names: Iterable[str], call: Callable[[str], None]) -> None:
        with ThreadPoolExecutor(_TRANSFERS, "transfers") as pool:
            list(pool.map(call, names))

    def objects(
        self, prefix: str = "", start: int = 0, *, delimiter: str = "", page_size: int = 1000
    ) -> Iterator[File]:
        """Yields a bucket's objects whose names begin with a prefix, named without `start` characters.

        With the delimiter "/" those in one folder only, and after those of each request its folders.
        """
        first, bucket = len(self._prefix) + start, self._bucket
        action = f"list gs://{bucket}/{self._prefix}{prefix}"
        listing = _client().list_blobs(
            bucket,
            prefix=self._prefix + prefix,
            fields=_FIELDS,
            retry=lambda request: retry_policy(action, _client()._credentials)(request),
            delimiter=delimiter or None,
            page_size=page_size,
        )

        def as_file(_: Any, item: Mapping[str, Any]) -> File:  # a Blob takes longer to make than to read
            name = item["name"]
            return File(name[first:], f"gs://{bucket}/{name}", int(item["size"]), item["generation"], True)

        listing.item_to_value = as_file
        with platform_errors(action):
            for page in listing.pages:
                yield from (each for each in page if each.name)  # not the folder, created in the console
                for name in sorted(listing.prefixes):
                    yield File(name[first:], f"gs://{bucket}/{name}", 0)
                listing.prefixes.clear()  # else the next page has them, too

    def _scan(self, folder: str, *, follow: bool) -> Iterator[File]:
        directory = f"{self.root.rstrip('/')}/{folder}" if folder else self.root
        with os.scandir(directory) as entries:
            found = sorted(
                f"{entry.name}/" if entry.is_dir(follow_symlinks=follow) else entry.name
                for entry in entries
                if entry.name[0] != "."
            )
        yield from (File(name, f"{directory.rstrip('/')}/{name}") for name in found)

    def _walk(self, folder: str = "") -> Iterator[File]:
        for each in self._scan(folder, follow=not folder):
            if each.name[-1] == "/":
                yield from self._walk(folder + each.name)
            else:
                yield each._replace(name=folder + each.name)


def with_stat(file: File) -> File:
    """Returns a file of this disk with its size and its time of change."""
    status = os.stat(file.path)
    return File(file.name, file.path, status.st_size, str(status.st_mtime_ns))


def is_visible(name: str) -> bool:
    """Returns whether a name, relative to the listed folder, is not empty and has no hidden part."""
    return name != "" and "/." not in f"/{name}"


_client_lock = threading.Lock()


def _client() -> Client:
    """Returns the client of Cloud Storage, which all threads share: each would sign in."""
    with _client_lock:
        return _client_of(os.environ.get("STORAGE_EMULATOR_HOST", ""))


@functools.cache
def _client_of(_: str) -> Client:
    from google.cloud.storage import Client
    from requests.adapters import HTTPAdapter

    with platform_errors("sign in to Google Cloud"):
        client = Client(project=None)  # none is needed: a bucket belongs to one
    client._http.mount(client.api_endpoint, HTTPAdapter(pool_maxsize=IN_FLIGHT))
    return client


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
