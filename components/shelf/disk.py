"""Shelf on a disk: commits are numbered records, and the number can be taken only once.

    commits/<n>.json    record of the n-th change of the champion, linked to its name when it is complete
    champion.json       the same as the last of them, for whoever reads nothing else

A link to a name that is taken fails, for processes of one machine as of two that share a file system. So
nobody waits, nothing has to be unlocked, and a process that is killed leaves the commit undone or done. In
the second case champion.json may be one commit behind, which each reader sees by the next number.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardline.components.shelf.place import Place, as_text, files_below
from shardline.components.shelf.version import CHAMPION_FILE, Head, Version
from shardline.trainer import crash, files
from shardline.trainer.errors import ModelError, RunError, SettingsError, ShardlineError
from shardline.trainer.progress import say

COMMITS = "commits"

_WITHOUT_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


class Disk(Place):
    """A shelf in a local directory.

    Attributes:
        path: The directory; it need not be there.
        mounted: Whether it is in a mounted bucket, of which nothing above it may be writable.
    """

    def __init__(self, path: Path, *, mounted: bool = False) -> None:
        self.path = path
        self.mounted = mounted

    def where(self, name: str) -> str:
        """Returns a local path."""
        return str(self.path / name)

    def head(self, *, by_hand: bool = False) -> Head:
        """Returns the champion of the last commit, also where champion.json is behind it."""
        shown = newest = self.champion(by_hand=by_hand)
        serial = newest.commit.serial if newest else max(0, self._highest() - 1)
        while (later := self._commit_of(serial + 1)) is not None:
            newest, serial = later, serial + 1
        if newest is not None and newest is not shown:
            with contextlib.suppress(OSError):  # of one that may only read
                self._show(newest)
        return Head(newest, serial)

    def commit(self, version: Version, head: Head) -> bool:
        """Links a complete record to the next number, if nobody has."""
        target = self.path / self._name(head.token + 1)
        temporary = files.temporary_name(target)
        try:
            target.parent.mkdir(exist_ok=True)
            temporary.write_text(as_text(version), encoding="utf-8")
            files.sync(temporary)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, target)
            # Over a network the answer may be lost, and the second attempt find the link of the first.
            won = os.path.samefile(temporary, target)
            files.sync(target.parent)
        except OSError as error:
            raise _unwritten(target, error) from error
        finally:
            temporary.unlink(missing_ok=True)
        if won:
            self._show_or_warn(version)
        return won

    def read(self, name: str) -> str | None:
        """Returns the content of a text file; a link that leads nowhere is unreadable, not missing."""
        path = self.path / name
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise crash.of_place(error, f"cannot read {path}: {error.strerror}") from None
        try:
            return files.read_text(path, ModelError)
        except ModelError:
            if os.path.lexists(path):
                raise
            return None  # removed meanwhile

    def write(self, name: str, text: str) -> None:
        """Replaces a text file in one step."""
        try:
            files.write_text(self.path / name, text)
        except OSError as error:
            raise _unwritten(self.path / name, error) from error

    def replace(self, name: str, text: str) -> None:
        """Replaces a text file that is there; where its directory goes meanwhile, it goes too."""
        if (self.path / name).exists():
            self.write(name, text)

    def names(self, directory: str) -> list[str]:
        """Returns the names of the directories in a directory, sorted."""
        return sorted(path.name for path in self._listed(directory) if path.is_dir())

    def entries(self) -> list[str]:
        """Returns the names of files and directories in the directory itself."""
        return sorted(path.name for path in self._listed(""))

    def put(self, source: Path, directory: str) -> None:
        """Copies the files of a directory, all on disk; a copy that fails is removed."""
        target = self.path / directory
        with self._writing():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.mkdir()
        try:
            for path in files_below(source):
                _copy_file(path, target / path.relative_to(source))
            for made in (target.parent, target, *(path for path in target.rglob("*") if path.is_dir())):
                files.sync(made)
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            raise RunError(f"cannot copy to {target}: {error.strerror}; the champion is unchanged") from error

    def remove(self, name: str) -> None:
        """Removes a file or a directory."""
        path = self.path / name
        while path.exists():
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTEMPTY):  # another process is at it, too
                    continue
                raise crash.of_place(error, f"cannot remove {path}: {error.strerror}") from error

    @contextlib.contextmanager
    def fetched(self, directory: str) -> Iterator[Path]:
        """Yields the directory itself."""
        yield self.path / directory

    def check(self) -> None:
        """Makes a file and a hard link and removes them."""
        place = next(path for path in (self.path, *self.path.parents) if path.exists())
        # In a bucket an account may write below a prefix only, and what is above it says nothing.
        if place != self.path and place.is_dir() and self.mounted:
            return
        with self._writing(), tempfile.NamedTemporaryFile(dir=place, prefix=files.TEMPORARY) as file:
            os.link(file.name, f"{file.name}.link")
            os.unlink(f"{file.name}.link")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says in one line that the directory cannot be written to."""
        try:
            yield
        except OSError as error:
            raise _unusable(self.path, error) from None

    def _listed(self, directory: str) -> list[Path]:
        try:
            return list((self.path / directory).iterdir())
        except (FileNotFoundError, NotADirectoryError):  # writing says what is wrong
            return []
        except OSError as error:
            raise crash.of_place(error, f"cannot list {self.path / directory}: {error.strerror}") from None

    def _highest(self) -> int:
        """Returns the highest number of a commit, for whoever cannot count from champion.json."""
        numbers = (path.stem for path in (self.path / COMMITS).glob("*.json"))
        return max((int(number) for number in numbers if number.isdecimal()), default=0)

    def _name(self, serial: int) -> str:
        return f"{COMMITS}/{serial}.json"

    def _commit_of(self, serial: int) -> Version | None:
        return self.load(Version, self._name(serial), "repair it, or remove it with all that follow")

    def _show(self, newest: Version | None) -> None:
        """Writes champion.json, and again where another has committed, but may have written it before."""
        while newest is not None:
            files.write_text(self.path / CHAMPION_FILE, as_text(newest))
            newest = self._commit_of(newest.commit.serial + 1)

    def _show_or_warn(self, version: Version) -> None:
        try:
            self._show(version)
        except OSError as error:
            say("register", f"warning: {self.where(CHAMPION_FILE)} is not up to date yet: {error.strerror}")


def _unusable(path: Path, error: OSError) -> ShardlineError:
    if error.errno in _WITHOUT_LINKS and error.filename2:
        return SettingsError(
            f"{path} is on a file system without hard links, by which publishers are kept apart; give a "
            "directory on another one, or a bucket by its name, gs://BUCKET/PATH"
        )
    text = f"cannot write to {path}: {error.strerror}; choose another champion_uri"
    return crash.of_place(error, text)


def _unwritten(path: Path, error: OSError) -> ShardlineError:
    if error.errno in _WITHOUT_LINKS and error.filename2:
        return _unusable(path.parent, error)
    return RunError(f"cannot write {path}: {error.strerror}; the champion is unchanged")


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    files.sync(target)
