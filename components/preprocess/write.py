"""Shard writer: the innermost loop of preprocessing, and the delivery of each shard that is done.

The loop runs once per example, millions of times: so bare system calls, no objects but bytes, and everything
that can be known before is known before. Small records are joined before they are written; the bytes of a
large image are never copied.
"""

from __future__ import annotations

import contextlib
import gc
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import google_crc32c
import xxhash

from shardline.components.preprocess import copies, rows, storage
from shardline.components.preprocess.example import entries, key_head
from shardline.components.preprocess.marks import Images, Mark, Marks
from shardline.components.preprocess.places import NOWHERE, ImageReader, changed
from shardline.components.preprocess.plan import Plan, PlannedShard
from shardline.components.preprocess.pool import Report
from shardline.components.preprocess.tfrecord import image_start, mask, record_start
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer import files
from shardline.trainer.data.manifest import Shard
from shardline.trainer.errors import BadRecordError, RunError

# Bytes that are collected before a write: they should not leave the processor's cache.
_BLOCK = 1 << 18
# A system call takes at most 1,024 pieces (IOV_MAX).
_PIECES = 1000
# An image up to this size is copied into its record, which saves calls.
_SMALL = 8192
_GZIP = 31
# Shards that wait to be brought to a bucket, on this disk; so many streams share its bandwidth.
_UPLOADS = 4


class ShardWriter:
    """Writes shards of one plan."""

    def __init__(self, plan: Plan, work: WorkDirectory, images: ImageReader, report: Report) -> None:
        self._plan = plan
        self._work = work
        self._images = images
        self._report = report
        self._codec = plan.make_codec(checked=plan.settings.on_bad_record == "skip")
        self._labels = [entries({"label": label}) for label in range(len(plan.class_names))]

    def write(self, shard: PlannedShard, delivery: Delivery) -> None:
        """Writes a shard under a temporary name, fsyncs it and hands it to `delivery` with its mark.

        Raises:
            BadRecordError: An image cannot be used.
            SourceError: The source changed since the survey.
            RunError: No space is left, or the disk failed.
        """
        path = self._work.shard(shard.file)
        temporary = files.temporary_name(self._work.scratch / shard.file)
        try:
            counts, kinds, hashes = [0] * len(self._labels), dict[Any, int](), list[bytes]()
            with _opened(temporary, self._plan.settings.compression) as output:
                for block in rows.read_fields(self._work.rows(shard.file)):
                    hashes.append(self._write_block(block, output, counts, kinds))
            kinds.pop(None, None)
            written = Shard(shard.file, sum(counts), output.size, f"{output.checksum:08x}")
            identity, surveyed = self._plan.identity(shard), self._plan.surveyed
            mark = Mark(identity, surveyed, written, tuple(counts), Images.of(kinds))
            delivery.take(temporary, path, mark, b"".join(hashes))
        except BadRecordError as error:
            temporary.unlink(missing_ok=True)
            if self._plan.settings.on_bad_record == "skip":  # when it was checked, it was good
                raise changed(error.name, f"became unusable ({error.reason})") from None
            raise
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise RunError(
                f"cannot write {path}: {error.strerror or error}; make room and run again, it will go on "
                "from there"
            ) from None
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

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
    with (
        copies.kept_in(work.copies),
        ImageReader(plan.places, work.spool, plan.surveyed) as images,
        Marks(work) as marks,
        Delivery(marks, is_far=work.is_far) as delivery,
    ):
        writer = ShardWriter(plan, work, images, report)
        images.expect(row for file in items for block in rows.read_fields(work.rows(file)) for row in block)
        for file in items:
            gc.disable()  # the loop makes no cycles, and looking for some takes a twentieth of its time
            try:
                writer.write(planned[file], delivery)
            finally:
                if collects:
                    gc.enable()
    return {}


class Delivery:
    """Brings shards that are written to where they belong, and marks them. A context manager.

    Where that is far, they are on their way while the next ones are written.
    """

    def __init__(self, marks: Marks, *, is_far: bool) -> None:
        self._marks = marks
        self._pool = ThreadPoolExecutor(_UPLOADS, "upload") if is_far else None
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while self._pending and error is None:
                self._pending.popleft().result()
        finally:
            if self._pool:
                self._pool.shutdown(cancel_futures=True)

    def take(self, temporary: Path, path: Path, mark: Mark, hashes: bytes) -> None:
        """Takes a shard that is whole on this disk."""
        if self._pool is None:
            temporary.replace(path)
            self._marks.add(mark, hashes)
            return
        while len(self._pending) >= _UPLOADS:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._bring, temporary, path, mark, hashes))

    def _bring(self, temporary: Path, path: Path, mark: Mark, hashes: bytes) -> None:
        try:
            storage.upload(temporary, path)
            self._marks.add(mark, hashes)
        finally:
            temporary.unlink(missing_ok=True)


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
