"""Image locations: the files and directories that hold a dataset's images, and the reading of an image."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from shardline.components.preprocess.plan.records import Fields, Records, key_text
from shardline.components.preprocess.sources.example import WHOLE_FILE, Span, changed_error, read_remote
from shardline.components.storage import as_source_error, copies, ordered_map, resolve, size_and_version
from shardline.trainer.base import files
from shardline.trainer.base.errors import BadRecordError, RunError, ShardlineError, SourceError

#: Number of the location of examples without an image.
NO_LOCATION = 0

#: Number of an image's location, its offset and length, its path if that is not the key, and its checksum.
ImagePosition = tuple[int, int, int, bytes, int]

#: Files open at the same time.
_OPEN_FILES = 128


@dataclass(frozen=True)
class ImageLocation:
    """A file or directory that images are in.

    Attributes:
        kind: "directory": each image is a file, whose path is `path` and the one in the record; "file": each
            image is a span of this file; "spool": the same, of a file on scratch; "none".
        path: The beginning of the images' paths, or the file.
        size: Size of the file when it was surveyed, in bytes.
        changed: Time of its last change, in nanoseconds since the epoch; for gs://, its generation.
    """

    kind: str
    path: str = ""
    size: int = 0
    changed: int = 0


class ImageReader:
    """Reads encoded images; files that hold many of them stay open until it is closed.

    A file that has changed since the survey, which was `surveyed` ns since the epoch, is a SourceError.
    """

    def __init__(self, locations: Sequence[ImageLocation], spool: Path, surveyed: int) -> None:
        self._locations = locations
        self._spool = spool
        self._surveyed = surveyed
        self._files: dict[int, int] = {}
        self._prefixes: dict[int, bytes] = {}
        self._is_prefetching = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Closes all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def prefetch(self, records: Iterable[Fields]) -> None:
        """Prefetches the images of records in a bucket; then `read_image` must be called for each."""
        if len(self._locations) == 1:  # that of examples without an image
            return
        with_image = (record for record in records if record.location != NO_LOCATION)
        first = next(with_image, None)
        if first is None:
            return
        directories = [each.path for each in self._locations if each.kind == "directory" and each.path]
        if first.length <= WHOLE_FILE:
            path = self._locations[first.location].path + key_text(first.path or first.key)
            directories.append(path)
        if not any(map(files.bucket_uri, directories)):
            return

        prefetched = ordered_map(self.read_image, chain([first], with_image))

        def read_next(_: Fields) -> bytes:
            if isinstance(data := next(prefetched), Exception):
                raise data
            return data

        self.read_image = read_next  # type: ignore[method-assign,assignment]
        self._is_prefetching = True

    def read_image(self, record: Fields) -> bytes:
        """Returns the encoded image of a record; BadRecordError if its file cannot be read."""
        key, path, _, _, location, offset, length = record
        if length > WHOLE_FILE:
            return self._read_spans([location], [offset], [length], [key])[0]
        if (prefix := self._prefixes.get(location)) is None:
            prefix = self._prefixes[location] = os.fsencode(self._locations[location].path)
        file = prefix + (path or key)
        if file.startswith(b"gs://"):
            return read_remote(os.fsdecode(file), key_text(key), ~length, offset)
        return self._read_file(file, key)

    def read_batches(self, block: Records, size: int) -> Iterator[list[bytes]]:
        """Yields the encoded images of records, b"" for those without one.

        They are in lists of about `size` bytes, or in one if the records say how long each image is.
        """
        locations, lengths = block.heads["location"], block.heads["length"]
        if not locations.any():
            yield [b""] * block.count
            return
        if not self._is_prefetching and locations.all() and (lengths > WHOLE_FILE).all():
            offsets = block.heads["offset"].tolist()
            yield self._read_spans(locations.tolist(), offsets, lengths.tolist(), block.keys())
            return
        batch, held = list[bytes](), 0
        for record in block.fields():
            data = b"" if record.location == NO_LOCATION else self.read_image(record)
            batch.append(data)
            held += len(data)
            if held >= size:
                yield batch
                batch, held = [], 0
        if batch:
            yield batch

    def _read_spans(
        self, locations: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], keys: Sequence[bytes]
    ) -> list[bytes]:
        found = list[bytes]()
        try:
            with self._lock:  # files are closed when there are too many
                found.extend(map(os.pread, map(self._file, locations), lengths, offsets))
        except OSError as error:
            raise _unreadable(keys[len(found)], error) from None
        for data, length, key in zip(found, lengths, keys, strict=True):
            if len(data) != length:
                raise changed_error(key_text(key), "became shorter")
        return found

    def _file(self, number: int) -> int:
        if (known := self._files.get(number)) is not None:
            return known
        if len(self._files) >= _OPEN_FILES:
            self.close()
        location = self._locations[number]
        copy = ""
        if location.kind == "file" and files.bucket_uri(location.path):
            with as_source_error(location.path):
                copy = copies.path(location.path)
        try:
            path = copy or (self._spool if location.kind == "spool" else location.path)
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise changed_error(location.path, f"cannot be read any more ({error.strerror})") from None
        self._files[number] = file
        status = os.fstat(file)
        # Of an object, what there is now that the copy is here: it is no later.
        found = size_and_version(location.path) if copy else (status.st_size, status.st_mtime_ns)
        if location.kind == "file" and found != (location.size, location.changed):
            raise changed_error(location.path, "changed")
        return file

    def _read_file(self, path: bytes, key: bytes) -> bytes:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(file)
                data = os.read(file, status.st_size)
                while len(data) < status.st_size and (more := os.read(file, status.st_size - len(data))):
                    data += more
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
                raise BadRecordError(key_text(key), "there is no such file (any more)") from None
            raise _unreadable(key, error) from None
        if len(data) < status.st_size or status.st_ctime_ns > self._surveyed:
            raise changed_error(key_text(key), "changed")
        return data


class ImageLocator:
    """Locates the images of a survey; copies to `spool` those that cannot be read again, until it is closed.

    `locations` are those found so far, by number.
    """

    def __init__(self, spool: Path) -> None:
        self.locations = [ImageLocation("none")]
        self._numbers: dict[tuple[str, str], int] = {}
        self._file, self._file_number = "", NO_LOCATION
        self._spool_path = spool
        self._spool: Any = None
        self._kept, self._end = b"", 0
        self._reader = ImageReader(self.locations, spool, sys.maxsize)

    def close(self) -> None:
        """Closes all files."""
        self._reader.close()
        if self._spool:
            self._spool.close()

    def locate(self, image: Any, name: str) -> ImagePosition:
        """Returns the position of the image of the example `name`; one in memory is bytes."""
        if image.__class__ is Span:
            file, offset, length = image
            if length <= WHOLE_FILE:
                return self._whole_file(file, name, offset, length)
            if file != self._file:
                self._file, self._file_number = file, self._number("file", file)
            return self._file_number, offset, length, b"", 0
        if isinstance(image, bytes):
            return self._keep(image)
        if image is None:
            return NO_LOCATION, 0, 0, b"", 0
        if isinstance(image, Path):
            return self._whole_file(resolve(str(image)), name)
        raise SourceError(
            f"image {name!r} is a {type(image).__name__}; expected bytes, a Path, a Span or a uint8 array"
        )

    def content(self, position: ImagePosition, key: bytes) -> bytes:
        """Returns the encoded bytes of the image that was located last, b"" where there is none."""
        location, offset, length, path, _ = position
        if location == NO_LOCATION:
            return b""
        if self.locations[location].kind == "spool":
            return self._kept
        return self._reader.read_image(Fields(key, path, b"", 0, location, offset, length))

    def _whole_file(
        self, path: str, name: str, generation: int = 0, length: int = WHOLE_FILE
    ) -> ImagePosition:
        # Nearly always a path is a directory and the key.
        prefix, rest = (path[: -len(name)], b"") if path.endswith(name) else ("", os.fsencode(path))
        return self._number("directory", prefix), generation, length, rest, 0

    def _keep(self, data: bytes) -> ImagePosition:
        if self._spool is None:
            self._spool = self._spool_path.open("wb")
            self._spool_location = self._number("spool", "")
        self._kept, offset, length = data, self._end, len(data)
        self._spool.write(data)
        self._end += length
        return self._spool_location, offset, length, b"", xxhash.xxh3_64_intdigest(data)

    def _number(self, kind: str, path: str) -> int:
        known = self._numbers.setdefault((kind, path), len(self.locations))
        if known == len(self.locations):
            size, changed = size_and_version(path) if kind == "file" else (0, 0)
            self.locations.append(ImageLocation(kind, path, size, changed))
        return known


def _unreadable(key: bytes, error: OSError | ValueError) -> ShardlineError:
    """Returns the error for an image; one that the machine could not read now is not a bad one."""
    reason = getattr(error, "strerror", None) or error
    if files.cannot_read_now(error):
        return RunError(f"cannot read {key_text(key)!r}: {reason}; run again to continue from there")
    return BadRecordError(key_text(key), f"cannot be read ({reason})")
