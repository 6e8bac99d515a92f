"""Shard writer: the innermost loop of preprocessing, and the mark of each shard that is done.

The loop runs once per example, millions of times: so bare system calls, no objects but bytes, and everything
that can be known before is known before. Small records are joined before they are written; the bytes of a
large image are never copied.
"""

from __future__ import annotations

import contextlib
import gc
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import xxhash

from shardline.components.preprocess import rows
from shardline.components.preprocess.example import entries, key_head
from shardline.components.preprocess.images.codec import Kind
from shardline.components.preprocess.places import NOWHERE, ImageReader, changed
from shardline.components.preprocess.plan import Plan, PlannedShard
from shardline.components.preprocess.pool import Report
from shardline.components.preprocess.tfrecord import image_start, mask, record_start
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer import files, records
from shardline.trainer.data.manifest import Feature, Shard
from shardline.trainer.errors import BadRecordError, RunError

# Bytes that are collected before a write: they should not leave the processor's cache.
_BLOCK = 1 << 18
# A system call takes at most 1,024 pieces (IOV_MAX).
_PIECES = 1000
# An image up to this size is copied into its record, which saves calls.
_SMALL = 8192
_GZIP = 31


@dataclass(frozen=True)
class Images:
    """Properties that the stored images of one or more shards have in common.

    A height or width is None where they differ, `channels` the largest number of channels, 0 without images.
    `converted` counts images by what was done to them.
    """

    height: int | None = None
    width: int | None = None
    channels: int = 0
    encodings: tuple[str, ...] = ()
    converted: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def merge(cls, parts: Sequence[Images]) -> Images:
        """Returns the common properties of several groups of images."""
        converted: Counter[str] = Counter()
        for part in parts:
            converted.update(part.converted)
        heights, widths = {part.height for part in parts}, {part.width for part in parts}
        return cls(
            heights.pop() if len(heights) == 1 else None,
            widths.pop() if len(widths) == 1 else None,
            max((part.channels for part in parts), default=0),
            tuple(sorted({encoding for part in parts for encoding in part.encodings})),
            dict(sorted(converted.items())),
        )

    @classmethod
    def of(cls, kinds: Mapping[Kind, int]) -> Images:
        """Returns the common properties of images, given how many there are of each kind."""
        return cls.merge(
            [
                cls(height, width, channels, (encoding,), dict.fromkeys(converted, count))
                for (height, width, channels, encoding, converted), count in kinds.items()
            ]
        )

    def feature(self, resize: str) -> Feature:
        """Returns the feature of the manifest."""
        encoding = self.encodings[0] if len(self.encodings) == 1 else "image"
        return Feature("image", "uint8", (self.height, self.width, self.channels), encoding, resize)


@dataclass(frozen=True)
class Mark:
    """Facts about a shard that is done.

    With another `identity` than its plan gives (`Plan.identity`), it is not done. `surveyed` is the start of
    the survey of that plan, in nanoseconds since the epoch.
    """

    identity: str
    surveyed: int
    shard: Shard
    class_counts: tuple[int, ...]
    images: Images

    def save(self, path: Path) -> None:
        """Writes the mark, whole or not at all."""
        files.write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Mark | None:
        """Reads a mark; None if there is none that can be read."""
        try:
            return records.load(cls, path, RunError)
        except RunError:
            return None


class ShardWriter:
    """Writes shards of one plan."""

    def __init__(self, plan: Plan, work: WorkDirectory, images: ImageReader, report: Report) -> None:
        self._plan = plan
        self._work = work
        self._images = images
        self._report = report
        self._codec = plan.make_codec(checked=plan.settings.on_bad_record == "skip")
        self._labels = [entries({"label": label}) for label in range(len(plan.class_names))]

    def write(self, shard: PlannedShard) -> None:
        """Writes a shard and its mark: temporary name, fsync, rename, and the mark last.

        Raises:
            BadRecordError: An image cannot be used.
            SourceError: The source changed since the survey.
            RunError: No space is left, or the disk failed.
        """
        path = self._work.shard(shard.file)
        temporary, hashes = files.temporary_name(path), files.temporary_name(path)
        try:
            counts, kinds = [0] * len(self._labels), dict[Any, int]()
            with (
                hashes.open("wb") as digests,
                _opened(temporary, self._plan.settings.compression) as output,
            ):
                for block in rows.read_fields(self._work.rows(shard.file)):
                    digests.write(self._write_block(block, output, counts, kinds))
            kinds.pop(None, None)
            written = Shard(shard.file, sum(counts), output.size, f"{output.checksum:08x}")
            identity, surveyed = self._plan.identity(shard), self._plan.surveyed
            mark = Mark(identity, surveyed, written, tuple(counts), Images.of(kinds))
            files.sync(hashes)
            hashes.replace(self._work.digests(shard.file))
            temporary.replace(path)
            mark.save(self._work.mark(shard.file))
        except BadRecordError as error:
            if self._plan.settings.on_bad_record == "skip":  # when it was checked, it was good
                raise changed(error.name, f"became unusable ({error.reason})") from None
            raise
        except OSError as error:
            raise RunError(
                f"cannot write {path}: {error.strerror or error}; make room and run again, it will go on "
                "from there"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)
            hashes.unlink(missing_ok=True)

    def _write_block(
        self, block: list[rows.Fields], output: _Output, counts: list[int], kinds: dict[Any, int]
    ) -> bytes:
        """Writes records, counts classes and kinds of images, and returns the hashes of the contents."""
        known, store, labels, read = self._codec.known, self._codec.store, self._labels, self._images.read
        value, extend, digest_of = google_crc32c.value, google_crc32c.extend, xxhash.xxh3_128_digest
        hashes: list[bytes] = []
        pieces, pending, count = output.pieces, 0, 0
        # Small images are often all of one kind: then comparing with the one before is faster than counting.
        kind, alike = None, 0
        for key, path, extra, label, place, offset, length in block:
            counts[label] += 1
            tail = key_head(len(key)) + key + labels[label] + extra
            if place == NOWHERE:
                frame, start = record_start(len(tail))
                record = start + tail
                hashes.append(digest_of(labels[label] + extra))
                pieces += frame, record, mask(value(record))
                pending += len(record) + 16
            else:
                data = read(place, offset, length, path, key)
                found = known(data)
                if found is None:
                    stored = store(data, rows.key_text(key))
                    data, found = stored.data, stored.kind
                if found is not kind:
                    kinds[kind] = kinds.get(kind, 0) + alike
                    kind, alike = found, 0
                alike += 1
                hashes.append(digest_of(data))
                size = len(data)
                frame, start, in_all = image_start(size, len(tail))
                if size <= _SMALL:
                    record = b"".join((start, data, tail))
                    pieces += frame, record, mask(value(record))
                else:
                    crc = extend(extend(value(start), data), tail)
                    pieces += frame + start, data, tail + mask(crc)
                pending += in_all
            count += 1
            if pending >= _BLOCK or len(pieces) >= _PIECES:
                output.flush()
                self._report(count, pending)
                count = pending = 0
        output.flush()
        self._report(count, pending)
        kinds[kind] = kinds.get(kind, 0) + alike
        return b"".join(hashes)


def write_planned(given: Mapping[str, Any], items: Sequence[str], report: Report) -> dict[str, Any]:
    """Writes planned shards, a job of the process pool; `given` has `out`, the dataset directory."""
    work = WorkDirectory(Path(given["out"]))
    plan = Plan.load(work.plan)
    planned = {shard.file: shard for shard in plan.shards}
    collects = gc.isenabled()
    with ImageReader(plan.places, work.spool, plan.surveyed) as images:
        writer = ShardWriter(plan, work, images, report)
        for file in items:
            gc.disable()  # the loop makes no cycles, and looking for some takes a twentieth of its time
            try:
                writer.write(planned[file])
            finally:
                if collects:
                    gc.enable()
    return {}


class _Output:
    """A file that is written in large blocks: `size` and `checksum` are of what was written."""

    def __init__(self, path: Path, compression: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self.pieces: list[bytes] = []
        self.size = self.checksum = 0
        self._compressor = zlib.compressobj(wbits=_GZIP) if compression == "gzip" else None

    def flush(self) -> None:
        """Writes the pieces."""
        if self._compressor:
            self.pieces[:] = [self._compressor.compress(b"".join(self.pieces))]
        self._write()

    def close(self) -> None:
        """Writes the rest, to the disk itself."""
        self.flush()
        if self._compressor:
            self.pieces.append(self._compressor.flush())
            self._write()
        os.fsync(self.file)

    def _write(self) -> None:
        size = sum(map(len, self.pieces))
        # Three pieces are a record. Many small ones are faster as one.
        pieces = self.pieces if size * 3 > _SMALL * len(self.pieces) else [b"".join(self.pieces)]
        crc, extend = self.checksum, google_crc32c.extend
        for piece in pieces:
            crc = extend(crc, piece)
        self.checksum = crc
        written = os.writev(self.file, pieces)
        if written < size:  # a full disk says so at the next call
            rest = memoryview(b"".join(pieces))[written:]
            while rest:
                rest = rest[os.write(self.file, rest) :]
        self.size += size
        self.pieces.clear()


@contextlib.contextmanager
def _opened(path: Path, compression: str) -> Iterator[_Output]:
    output = _Output(path, compression)
    try:
        yield output
        output.close()
    finally:
        os.close(output.file)
