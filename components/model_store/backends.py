"""Backends of a model store, disk and bucket: compare-and-swap of one file, and directories written once.

Both have the same methods, which raise SettingsError, RunError or PlatformError where the store cannot be
used; names of files are relative, with slashes. On a disk, the file is compared and renamed over while a lock
is held. In a bucket its generation is compared, through the storage client: a mounted bucket has no atomic
rename, and shows the writes of others with a delay. The mount is used to read large files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from shardline.components.storage import bucket
from shardline.trainer.base import crash, files
from shardline.trainer.base.errors import ModelError, RunError, SettingsError

#: The file that is locked, on a disk, while another one is replaced.
LOCK_FILE = ".lock"
#: Seconds to wait for the lock, which is held for one write.
_LOCK_TIMEOUT_S = 60.0
_NO_LOCK_ERRORS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.EMLINK}
_CHECK_FILE = f"{files.TEMPORARY}check"


class TextFile(NamedTuple):
    """A text file as it was read, None where there was none; in a bucket with its generation."""

    text: str | None
    generation: int = 0


class DiskBackend:
    """A model store in a local directory.

    Attributes:
        path: The directory; it need not be there.
        mounted: Whether it replaces a prefix of a bucket, whose parents may not be writable.
    """

    def __init__(self, path: Path, *, mounted: bool = False) -> None:
        self.path = path
        self.mounted = mounted

    def location(self, name: str) -> str:
        """Returns a local path."""
        return str(self.path / name)

    def read(self, name: str) -> TextFile:
        """Returns a text file; a broken link is unreadable, not missing."""
        path = self.path / name
        with crash.output_errors(f"read {path}"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)
            return TextFile(files.read_text(path, ModelError))
        return TextFile(None)

    def replace(self, name: str, text: str, seen: TextFile) -> bool:
        """Compares and renames while the lock is held, and removes temporary files of killed processes."""
        path = self.path / name
        with self._writing(), self._locked():
            with contextlib.suppress(ModelError):  # damaged, as it was when it was read
                if self.read(name).text != seen.text:
                    return False
            for left in path.parent.glob(f"{files.TEMPORARY}*-{path.name}"):
                left.unlink(missing_ok=True)
            try:
                files.write_text(path, text)
            except OSError as error:
                raise RunError(f"cannot write {path}: {error.strerror}; the champion is unchanged") from error
        return True

    def names(self, directory: str) -> list[str]:
        """Returns the names of files and directories in a directory, sorted."""
        path = self.path / directory
        with crash.output_errors(f"list {path}"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(path))
        return []  # writing reports what is wrong

    def is_file(self) -> bool:
        """Returns whether there is a file where the directory should be."""
        return self.path.exists() and not self.path.is_dir()

    def put(self, source: Path, directory: str) -> None:
        """Copies the files of a directory into a new one, all on disk; a copy that fails is removed."""
        target = self.path / directory
        with self._writing():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.mkdir()
        try:
            for path in files_below(source):
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

    def remove(self, directory: str) -> None:
        """Removes a directory with all that is in it."""
        path = self.path / directory
        # Another process may have removed it meanwhile.
        with crash.output_errors(f"remove {path}"), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    @contextlib.contextmanager
    def fetched(self, directory: str) -> Iterator[Path]:
        """Yields the directory itself."""
        yield self.path / directory

    def check(self) -> None:
        """Makes a file, locks it and removes it."""
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        # In a bucket, an account may be allowed to write below the prefix only, not to its parents.
        if existing != self.path and existing.is_dir() and self.mounted:
            return
        with self._writing(), tempfile.NamedTemporaryFile(dir=existing, prefix=files.TEMPORARY) as file:
            _lock(file.fileno(), Path(file.name))

    def author(self) -> str:
        """Returns the author of changes: user@host."""
        return _user_and_host()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        # Opened for writing: otherwise a network file system grants no exclusive lock.
        descriptor = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # other users may write here, too
                os.fchmod(descriptor, 0o666)
            _lock(descriptor, self.path / LOCK_FILE)
            yield
        finally:
            os.close(descriptor)

    def _writing(self) -> AbstractContextManager[None]:
        """Converts an OSError into a message that the directory cannot be written to."""
        return crash.output_errors(f"write to {self.path}", "choose another champion_uri")


def _lock(descriptor: int, path: Path) -> None:
    """Locks an open file until it is closed; refuses a mounted bucket, which has no hard links."""
    end, link = time.monotonic() + _LOCK_TIMEOUT_S, Path(f"{path}.link")
    try:
        while not files.lock(descriptor):
            if time.monotonic() > end:
                raise RunError(f"{path} has been locked for {_LOCK_TIMEOUT_S:.0f} s; try again")
            time.sleep(0.01)
        link.unlink(missing_ok=True)
        link.hardlink_to(path)
        link.unlink()
    except OSError as error:
        if error.errno not in _NO_LOCK_ERRORS:
            raise
        raise SettingsError(
            f"{path.parent} is on a file system without locks or hard links, which a model store needs; give "
            "a directory on another one, or a bucket by its name, gs://BUCKET/PATH"
        ) from None


class BucketBackend:
    """A model store below a prefix of a bucket, gs://BUCKET/PREFIX."""

    def __init__(self, uri: str) -> None:
        files.local_path(uri)  # refuses '..'
        text = uri.removeprefix("gs://").removeprefix("/gcs/")
        self.bucket, _, prefix = text.partition("/")
        self.prefix = "/".join(part for part in prefix.split("/") if part not in ("", "."))
        if not self.bucket:
            raise SettingsError(f"{uri!r} names no bucket; write gs://BUCKET/PATH")
        self._objects = bucket.Bucket(self.bucket)

    def location(self, name: str) -> str:
        """Returns a URI, gs://."""
        return f"gs://{PurePosixPath(self.bucket, self.prefix, name)}"

    def read(self, name: str) -> TextFile:
        """Returns an object as text with its generation; a bucket that does not exist is an error."""
        content = self._objects.content(self._key(name))
        if content is None:
            next(self._objects.pages(self._key(""), page_size=1))
            return TextFile(None)
        data, generation = content
        if len(data) > files.MAX_TEXT_BYTES:
            raise ModelError(f"{self.location(name)} has more than {files.MAX_TEXT_BYTES >> 20} MiB")
        # Text that is not UTF-8 is not JSON either, and is reported as damaged.
        return TextFile(data.decode("utf-8-sig", "replace"), generation)

    def replace(self, name: str, text: str, seen: TextFile) -> bool:
        """Replaces an object if it still has the generation that was read."""
        # A retry after a lost answer finds the text that was written.
        written = self._objects.write(self._key(name), text, seen.generation)
        return written or self.read(name).text == text

    def names(self, directory: str) -> list[str]:
        """Returns the names of objects and directories below a prefix, sorted."""
        prefix, names = self._key(f"{directory}/") if directory else self._key(""), set[str]()
        # For the store itself, the first thousand names are enough.
        for page in islice(self._objects.pages(prefix, delimiter="/"), None if directory else 1):
            names.update(page.folders, (item.name for item in page))
        return sorted(PurePosixPath(item).name for item in names - {prefix})  # but for the directory's own

    def is_file(self) -> bool:
        """Returns whether there is an object where the prefix should be."""
        if not self.prefix:
            return False
        page = next(self._objects.pages(self.prefix, delimiter="/", page_size=1))
        return any(item.name == self.prefix for item in page)

    def put(self, source: Path, directory: str) -> None:
        """Uploads the files of a local directory."""
        for path in files_below(source):
            name = f"{directory}/{path.relative_to(source).as_posix()}"
            self._objects.upload(self._key(name), path)

    def remove(self, directory: str) -> None:
        """Removes all objects below a prefix."""
        for item in self._below(self._key(f"{directory}/")):
            self._objects.remove(item.name)

    @contextlib.contextmanager
    def fetched(self, directory: str) -> Iterator[Path]:
        """Yields a directory in the mount /gcs, or a temporary copy where there is no mount."""
        if files.local_path(f"gs://{self.bucket}").is_dir():
            yield files.local_path(self.location("")) / directory
            return
        prefix = self._key(f"{directory}/".lstrip("/"))
        with tempfile.TemporaryDirectory(prefix="shardline-") as temporary:
            target = Path(temporary).resolve()
            for item in self._below(prefix):
                path = target / item.name.removeprefix(prefix)
                if path.resolve().is_relative_to(target) and not item.name.endswith("/"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._objects.download(item.name, path)
            yield target

    def check(self) -> None:
        """Writes an object and removes it, which requires the same permissions as publishing."""
        self._objects.write(self._key(_CHECK_FILE), "")
        self._objects.remove(self._key(_CHECK_FILE))

    def author(self) -> str:
        """Returns the service account of the credentials, or user@host where they have none."""
        return self._objects.account or _user_and_host()

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _below(self, prefix: str) -> Iterator[bucket.Object]:
        return chain.from_iterable(self._objects.pages(prefix))


def files_below(directory: Path) -> Iterator[Path]:
    """Yields the files in a directory and those below it, sorted."""
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _user_and_host() -> str:
    return f"{os.environ.get('USER') or os.getuid()}@{socket.gethostname()}"
