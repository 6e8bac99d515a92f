"""The encoded bytes of one image, from wherever they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from shardline.components.preprocess.plan_file import Place
from shardline.components.preprocess.sources.source import WHOLE_FILE
from shardline.trainer.errors import BadRecordError, SourceError

#: Files that are open at the same time.
_OPEN_FILES = 128


def changed(name: str, how: str) -> SourceError:
    """Returns the error of a source that changed between the survey and the writing."""
    return SourceError(f"{name!r} {how} while it was read; run again when nothing writes to the source")


class Payloads:
    """Reads images; files that hold many of them stay open. A context manager.

    Args:
        places: The places of the dataset.
        spool: File of the work directory with the images that were copied.
        surveyed: When the survey began, in nanoseconds since the epoch.

    Raises:
        SourceError: A file that holds many images is not what it was.
    """

    def __init__(self, places: Sequence[Place], spool: Path, surveyed: int) -> None:
        self._places = places
        self._spool = spool
        self._surveyed = surveyed
        self._files: dict[int, int] = {}

    def close(self) -> None:
        """Closes all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def file(self, place: int) -> int:
        """Returns the open file of a place that holds many images.

        Raises:
            SourceError: It is not what it was when it was surveyed.
        """
        file = self._files.get(place)
        if file is None:
            if len(self._files) >= _OPEN_FILES:
                self.close()
            file = self._files[place] = self._open(self._places[place])
        return file

    def _open(self, place: Place) -> int:
        try:
            file = os.open(self._spool if place.kind == "spool" else place.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise changed(place.path, f"cannot be read any more ({error.strerror})") from None
        status = os.fstat(file)
        if place.kind == "file" and (status.st_size, status.st_mtime_ns) != (place.size, place.changed):
            os.close(file)
            raise changed(place.path, "changed")
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, place: int, offset: int, length: int, path: bytes, key: bytes) -> bytes:
        """Returns an encoded image; the arguments are those of its row.

        Raises:
            BadRecordError: Its file cannot be read.
            SourceError: It changed since the survey.
        """
        if length == WHOLE_FILE:
            return self.read_file(os.fsencode(self._places[place].path) + (path or key), key)
        return self.read_span(self.file(place), length, offset, key)

    def read_file(self, path: bytes, key: bytes) -> bytes:
        """Returns the content of an image file; the hottest piece of reading, so in bare system calls."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            name = _name(key)
            if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
                raise BadRecordError(name, "there is no such file (any more)") from None
            raise _unreadable(name, error) from None
        try:
            status = os.fstat(file)
            size = status.st_size
            # One byte more, so that a file that grew is found without another call.
            data = os.read(file, size + 1)
        except OSError as error:
            raise _unreadable(_name(key), error) from None
        finally:
            os.close(file)
        if status.st_ctime_ns > self._surveyed or len(data) != size:
            return self._reread(path, key, size)
        return data

    def read_span(self, file: int, length: int, offset: int, key: bytes) -> bytes:
        """Returns a span of a file that holds many images."""
        try:
            data = os.pread(file, length, offset)
        except OSError as error:
            raise _unreadable(_name(key), error) from None
        if len(data) != length:
            raise changed(_name(key), "became shorter")
        return data

    def _reread(self, path: bytes, key: bytes, size: int) -> bytes:
        """Tells a file that changed since the survey from one that a single call cannot read (2 GiB)."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise _unreadable(_name(key), error) from None
        if status.st_ctime_ns > self._surveyed or status.st_size != size:
            raise changed(_name(key), "changed")
        with open(path, "rb") as file:
            data = file.read()
        if len(data) != size:
            raise changed(_name(key), "changed")
        return data


def _name(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _unreadable(name: str, error: OSError | ValueError) -> BadRecordError:
    return BadRecordError(name, f"cannot be read ({getattr(error, 'strerror', None) or error})")
