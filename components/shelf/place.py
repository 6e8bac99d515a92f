"""Place of a shelf: files by relative name, and one record that changes only from what was read."""

from __future__ import annotations

import getpass
import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from shardline.components.shelf.version import CHAMPION_FILE, VERSION_FILE, Head, Version
from shardline.trainer import files
from shardline.trainer.errors import ModelError
from shardline.trainer.records import restore

T = TypeVar("T")

#: What can be done about a damaged champion.json.
REMEDY = "repair it, or remove it to fall back on the last commit, if there is any"


class Place(ABC):
    """Directory of a champion, wherever it is; names of files in it are relative, with slashes.

    All methods raise SettingsError, RunError or PlatformError where the place cannot be used.
    """

    @abstractmethod
    def where(self, name: str) -> str:
        """Returns the path or URI of a file or directory in it."""

    @abstractmethod
    def head(self, *, by_hand: bool = False) -> Head:
        """Returns the present champion; raises ModelError where its record is damaged, unless `by_hand`."""

    @abstractmethod
    def commit(self, version: Version, head: Head) -> bool:
        """Makes a record champion.json, if `head` is still the present one; False where it is not."""

    @abstractmethod
    def read(self, name: str) -> str | None:
        """Returns the content of a text file, None where there is none; ModelError where it is unreadable."""

    @abstractmethod
    def write(self, name: str, text: str) -> None:
        """Writes a whole text file or nothing."""

    @abstractmethod
    def replace(self, name: str, text: str) -> None:
        """Writes a text file anew, if it is there; makes none in what somebody else removes."""

    @abstractmethod
    def names(self, directory: str) -> list[str]:
        """Returns the names of the directories in a directory, sorted."""

    @abstractmethod
    def entries(self) -> list[str]:
        """Returns the names of files and directories in the place itself, a thousand at most."""

    @abstractmethod
    def put(self, source: Path, directory: str) -> None:
        """Copies the files of a local directory into a new one, whose name nobody else has."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, or a directory with all that is in it."""

    @abstractmethod
    def fetched(self, directory: str) -> AbstractContextManager[Path]:
        """Yields a local path of a directory in it: through a mount, or a temporary copy."""

    @abstractmethod
    def check(self) -> None:
        """Checks that it can be written to, as far as it is there, and leaves nothing."""

    def who(self) -> str:
        """Returns who writes here: user@host, or the service account."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container may have no entry for its user
            user = str(os.getuid())
        return f"{user}@{socket.gethostname()}"

    def load(self, kind: type[T], name: str, remedy: str) -> T | None:
        """Returns a dataclass from a JSON file, None where there is none; ModelError where it is damaged."""
        what = self.where(name)
        try:
            text = self.read(name)
            if text is None:
                return None
            content = files.parse_json(text, what, ModelError)
        except ModelError as error:
            raise ModelError(f"{error}; {remedy}") from None
        return restore(kind, content, what, ModelError, remedy)

    def champion(self, *, by_hand: bool = False) -> Version | None:
        """Returns what champion.json has; None where there is none, or a damaged one is replaced by hand."""
        try:
            return self.load(Version, CHAMPION_FILE, REMEDY)
        except ModelError:
            if by_hand:
                return None
            raise


def as_text(version: Version) -> str:
    """Returns the content of a record's file."""
    return json.dumps(asdict(version), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def files_below(directory: Path) -> Iterator[Path]:
    """Yields the files of a model and those below it, sorted, without the record of a version of a shelf."""
    return (
        path for path in sorted(directory.rglob("*")) if path.is_file() and path != directory / VERSION_FILE
    )
