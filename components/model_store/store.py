"""Places of a model store: a directory of this machine, or a prefix of a bucket.

Both have the same methods, which raise SettingsError, RunError or PlatformError where the place cannot be
used. One file is replaced only if it is unchanged since it was read: on a disk under a lock, by a rename, in
a bucket by its generation.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from shardline.components.runs.record import on_platform
from shardline.components.storage.bucket import parse_uri
from shardline.components.text import truncate
from shardline.trainer.base import crash, files
from shardline.trainer.base.errors import ModelError, RunError, SettingsError

CHAMPION_FILE, VERSIONS, VERSION_FILE = "champion.json", "versions", "version.json"
PROMOTE_COMMAND = "shardline champion promote"
_LOCK_FILE = ".lock"
#: Seconds to wait for the lock, which is held for one write.
_LOCK_TIMEOUT_S = 60.0
_CHECK_FILE = f"{files.TEMPORARY}check"
#: Beginnings of the URI of a directory in a bucket.
_BUCKET_PREFIXES = ("gs://", "/gcs/")
_ADVICE = "choose another champion_uri"


class TextFile(NamedTuple):
    """A text file as it was read, None where there was none; in a bucket with its generation."""

    text: str | None
    generation: int = 0


class DiskStore:
    """A model store in a local directory, which need not be there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.author = f"{os.environ.get('USER') or os.getuid()}@{socket.gethostname()}"

    def location(self, name: str) -> str:
        """Returns the path of a file or directory."""
        return str(self.path / name)

    def read(self, name: str) -> TextFile:
        """Returns a text file; a broken link is unreadable, not missing."""
        path = self.path / name
        with crash.output_errors(f"read {path}"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)
            return TextFile(files.read_text(path, ModelError))
        return TextFile(None)

    def replace(self, name: str, text: str, seen: TextFile) -> bool:
        """Writes a text file if it is unchanged since it was read, and returns whether it was."""
        path = self.path / name
        with crash.output_errors(f"write to {self.path}", _ADVICE):
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / _LOCK_FILE).open("a") as lock:
                with contextlib.suppress(OSError):  # other users may publish, too
                    os.fchmod(lock.fileno(), 0o666)
                end = time.monotonic() + _LOCK_TIMEOUT_S
                while not files.lock(lock.fileno()):
                    if time.monotonic() > end:
                        raise RunError(f"{lock.name} has been locked for {_LOCK_TIMEOUT_S:.0f} s; try again")
                    time.sleep(0.01)
                if self.read(name).text != seen.text:
                    return False
                try:
                    files.write_text(path, text)
                except OSError as error:
                    reason = f"{error.strerror}; the champion is unchanged"
                    raise RunError(f"cannot write {path}: {reason}") from error
        return True

    def names(self, directory: str) -> list[str]:
        """Returns the names of files and directories in a directory, sorted."""
        path = self.path / directory
        with crash.output_errors(f"list {path}"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(path))
        return []  # writing reports what is wrong

    def put(self, source: Path, directory: str) -> None:
        """Copies the files of a directory into a new one, all on disk; a copy that fails is removed."""
        target = self.path / directory
        with crash.output_errors(f"write to {self.path}", _ADVICE):
            target.mkdir(parents=True)
        try:
            for path in _files_below(source):
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
                files.sync(copy)
            for made in (target.parent, target, *(path for path in target.rglob("*") if path.is_dir())):
                files.sync(made)
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            reason = files.with_space(error.strerror or str(error), target)
            raise RunError(f"cannot copy to {target}: {reason}; the champion is unchanged") from error

    @contextlib.contextmanager
    def fetched(self, directory: str) -> Iterator[Path]:
        """Yields the directory itself."""
        yield self.path / directory

    def check(self) -> None:
        """Makes a file, locks it and removes it."""
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        with (
            crash.output_errors(f"write to {self.path}", _ADVICE),
            tempfile.NamedTemporaryFile(dir=existing, prefix=files.TEMPORARY) as file,
        ):
            files.lock(file.fileno())


class BucketStore:
    """A model store below a prefix of a bucket, gs://BUCKET/PREFIX."""

    def __init__(self, uri: str) -> None:
        files.local_path(uri)  # refuses '..'
        self._bucket, path = parse_uri(f"gs://{uri.removeprefix('gs://').removeprefix('/gcs/')}")
        self._prefix = "/".join(part for part in path.split("/") if part not in ("", "."))
        if not self._bucket.name:
            raise SettingsError(f"{uri!r} names no bucket; write gs://BUCKET/PATH")

    @property
    def author(self) -> str:
        """The service account of the credentials, or user@host where they have none."""
        return self._bucket.account or DiskStore(Path()).author

    def location(self, name: str) -> str:
        """Returns the URI of an object or directory, gs://."""
        return f"gs://{PurePosixPath(self._bucket.name, self._prefix, name)}"

    def read(self, name: str) -> TextFile:
        """Returns an object as text with its generation; a bucket that does not exist is an error."""
        content = self._bucket.content(self._key(name))
        if content is None:
            next(self._bucket.pages(self._key(""), page_size=1))
            return TextFile(None)
        # Text that is not UTF-8 is not JSON either, and is reported as damaged.
        return TextFile(content[0].decode("utf-8-sig", "replace"), content[1])

    def replace(self, name: str, text: str, seen: TextFile) -> bool:
        """Writes an object if it has the generation that was read, and returns whether it had."""
        # A retry after a lost answer finds the text that was written.
        written = self._bucket.write(self._key(name), text, seen.generation)
        return written or self.read(name).text == text

    def names(self, directory: str) -> list[str]:
        """Returns the names of objects and directories below a prefix, sorted."""
        prefix, names = self._key(f"{directory}/") if directory else self._key(""), set[str]()
        # For the store itself, the first thousand names are enough.
        for page in islice(self._bucket.pages(prefix, delimiter="/"), None if directory else 1):
            names.update(page.folders, (item.name for item in page))
        return sorted(PurePosixPath(item).name for item in names - {prefix})  # but for the directory's own

    def put(self, source: Path, directory: str) -> None:
        """Uploads the files of a local directory."""
        for path in _files_below(source):
            name = f"{directory}/{path.relative_to(source).as_posix()}"
            self._bucket.upload(self._key(name), path)

    @contextlib.contextmanager
    def fetched(self, directory: str) -> Iterator[Path]:
        """Yields a temporary copy."""
        prefix = self._key(f"{directory}/".lstrip("/"))
        with tempfile.TemporaryDirectory(prefix="shardline-") as temporary:
            target = Path(temporary).resolve()
            for item in chain.from_iterable(self._bucket.pages(prefix)):
                path = target / item.name.removeprefix(prefix)
                if path.resolve().is_relative_to(target) and not item.name.endswith("/"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._bucket.download(item.name, path)
            yield target

    def check(self) -> None:
        """Writes an object and removes it, which requires the same permissions as publishing."""
        self._bucket.write(self._key(_CHECK_FILE), "")
        self._bucket.remove(self._key(_CHECK_FILE))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


def _files_below(directory: Path) -> Iterator[Path]:
    """Yields the files of a validation; it may be a version, whose record is not copied."""
    return (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != VERSION_FILE)


Store = DiskStore | BucketStore


def open_store(champion: str | os.PathLike[str]) -> Store:
    """Returns the model store at a path or URI.

    Where SHARDLINE_GCS_ROOT replaces all buckets, one is a directory there. Raises SettingsError when that
    directory is missing, or a URI names no bucket.
    """
    uri = os.fspath(champion)
    if not uri.startswith(_BUCKET_PREFIXES):
        return DiskStore(Path(uri))
    if os.environ.get(files.GCS_ROOT_VARIABLE):
        return DiskStore(champion_directory(uri))
    return BucketStore(uri)


def champion_directory(uri: str) -> Path:
    """Returns the local path of a URI: a local directory, or gs:// or /gcs/ in the mount.

    Raises SettingsError when the bucket is not mounted: a directory made in its place would be lost.
    """
    path = files.local_path(uri)
    if uri.startswith(_BUCKET_PREFIXES):
        bucket = files.local_path(f"gs://{uri.removeprefix('gs://').removeprefix('/gcs/').partition('/')[0]}")
        if not bucket.is_dir():
            raise SettingsError(
                f"cannot reach {uri}: {bucket} is not mounted here; on Vertex grant the service account "
                "access to the bucket, elsewhere give a local directory"
            )
    return path


def require_store(uri: str | os.PathLike[str]) -> None:
    """Raises SettingsError for a missing local directory, and as `refuse_other_content` does.

    An unmounted disk, or the directory of one model, would look like a store without a champion. A prefix in
    a bucket needs not exist.
    """
    if not os.fspath(uri).startswith(_BUCKET_PREFIXES) and not Path(uri).is_dir():
        raise SettingsError(
            f"there is no directory {uri} for champions: mount the disk that it is on, or begin anew "
            f"with mkdir -p {uri}"
        )
    refuse_other_content(open_store(uri))


def refuse_other_content(store: Store) -> None:
    """Raises SettingsError for a directory with anything but a model store, such as that of one model.

    Hidden files, and what a new disk has, are no content. A directory of versions that has lost its
    champion.json is a damaged model store, which readers report.
    """
    names = [name for name in store.names("") if not name.startswith(".") and name != "lost+found"]
    if names and CHAMPION_FILE not in names and names != [VERSIONS]:
        raise SettingsError(
            f"{store.location('')} holds no champions (no {CHAMPION_FILE}), but "
            f"{truncate(', '.join(names), 80)}; give the directory of champions, or an empty one, in which "
            f"'{PROMOTE_COMMAND} DIR MODEL/' makes a model the champion"
        )


def refuse_container_path(name: str, uri: str) -> None:
    """Raises SettingsError, on the platform, for a directory of the container, which is lost with the task.

    `name` is the name of the parameter.
    """
    if uri and not uri.startswith(_BUCKET_PREFIXES) and on_platform():
        raise SettingsError(
            f"{name} is {uri!r}, a directory of this container, which is thrown away with it; give "
            f"{name}=gs://BUCKET/PATH"
        )
