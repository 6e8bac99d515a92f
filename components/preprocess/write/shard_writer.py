"""Shard writer: the innermost loop of preprocessing, and the check for bad images before it.

The loop runs once per example, millions of times: it uses bare system calls and bytes only, and computes as
much as possible beforehand.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, tee
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import xxhash

from shardline.components.preprocess.images.codec import Kind
from shardline.components.preprocess.plan import records
from shardline.components.preprocess.plan.image_locations import NO_LOCATION, ImageReader
from shardline.components.preprocess.plan.plan import Plan, PlannedShard, Survey
from shardline.components.preprocess.plan.records import Records
from shardline.components.preprocess.plan.survey import Rejected
from shardline.components.preprocess.process_pool import Processes, Report
from shardline.components.preprocess.sources.example import changed_error
from shardline.components.preprocess.tfrecord import NO_IMAGE, entries, image_start, key_head, mask
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.preprocess.write.finish import Images, Marker, label_tallies, write_marker
from shardline.components.storage import remote_files
from shardline.trainer.base import files
from shardline.trainer.base.errors import BadRecordError, RunError
from shardline.trainer.base.progress import Meter
from shardline.trainer.data.features import LABEL, is_class
from shardline.trainer.data.manifest import Shard

# Bytes collected before a write: they should fit into the processor's cache.
_BLOCK = 1 << 18
# A system call takes at most 1,024 buffers (IOV_MAX), three for a record.
_PIECES = 1000 // 3
# Images up to this average size are copied into their records, which saves calls.
_SMALL = 8192


class ShardWriter:
    """Writes shards of one plan."""

    def __init__(self, plan: Plan, work: WorkDirectory, images: ImageReader, report: Report) -> None:
        self._plan = plan
        self._work = work
        self._images = images
        self._report = report
        self._codec = plan.make_codec(checked=plan.settings.on_bad_record == "skip")
        # Any other label is stored like features.
        classes = plan.labels[0].outputs if is_class(plan.labels) else ()
        self._labels = [entries({LABEL: index}) for index in range(len(classes))]

    def write(self, shard: PlannedShard) -> None:
        """Writes a shard under a temporary name, fsyncs it, and adds it to the others with its marker."""
        temporary = files.temporary_name(self._work.path / shard.file)
        try:
            path, kinds, hashes = self._work.records_path(shard.file), Counter[Kind | None](), list[bytes]()
            with ShardFile(temporary) as output:
                for block in records.read(path):
                    hashes += self._write_block(block, output, kinds)
            written = Shard(shard.file, shard.records, output.size, f"{output.checksum:08x}")
            labels = label_tallies(self._plan.labels, records.read(path))
            images = Images.from_kinds({kind: count for kind, count in kinds.items() if kind})
            identity, surveyed = self._plan.identity(shard), self._plan.surveyed
            marker = Marker(identity, surveyed, written, labels, images)
            self._work.add_shard(temporary, shard.file)
            write_marker(self._work, marker, b"".join(hashes))
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, BadRecordError) and self._plan.settings.on_bad_record == "skip":
                # It was valid when it was checked.
                raise changed_error(error.name, f"became unusable ({error.reason})") from None
            if isinstance(error, OSError):
                raise RunError(
                    f"cannot write {self._work.out / shard.file}: {error.strerror or error}; make room and "
                    "run again to continue from there"
                ) from None
            raise

    def _write_block(self, block: Records, output: ShardFile, kinds: Counter[Kind | None]) -> Iterator[bytes]:
        """Writes records, counts kinds of images, and yields the hashes of the contents, batch by batch."""
        keys, extras = block.keys(), block.features()
        labels = (
            [self._labels[label] for label in block.heads["label"].tolist()]
            if self._labels
            else [b""] * block.count
        )
        tails = list(map(b"".join, zip(map(key_head, map(len, keys)), keys, labels, extras, strict=True)))
        have_image = (block.heads["location"] != NO_LOCATION).tolist()
        end = 0
        for contents in self._images.read_batches(block, _BLOCK):
            start, end = end, end + len(contents)
            have = have_image[start:end]
            hashed = contents = self._stored(contents, keys[start:end], have, kinds)
            sizes = list(map(len, contents))
            if not all(have):
                sizes = [size if has else NO_IMAGE for size, has in zip(sizes, have, strict=True)]
                others = map(operator.add, labels[start:end], extras[start:end])
                hashed = [a if has else b for a, b, has in zip(contents, others, have, strict=True)]
            yield np.fromiter(map(xxhash.xxh3_64_intdigest, hashed), "<u8", len(hashed)).tobytes()
            self._report(len(contents), output.add(contents, sizes, tails[start:end]))

    def _stored(
        self, contents: list[bytes], keys: Sequence[bytes], have: Sequence[bool], kinds: Counter[Kind | None]
    ) -> list[bytes]:
        """Returns images as stored, and counts their kinds; `have` says which examples have one."""
        found: list[Kind | None] = [None] * len(contents)
        for number, has in enumerate(have):
            if not has:
                continue
            image = self._codec.store(contents[number], records.key_text(keys[number]))
            contents[number], found[number] = image.data, image[1:]
        if found.count(found[0]) == len(found):  # mostly true, and faster than counting
            kinds[found[0]] += len(found)
        else:
            kinds.update(found)
        return contents


def write_planned(arguments: Mapping[str, Any], items: Iterable[str], report: Report) -> dict[str, Any]:
    """Writes planned shards, a job of the process pool; `arguments` has `out`, the dataset directory."""
    work = WorkDirectory.from_arguments(arguments)
    plan = Plan.load(work.plan)
    planned = {shard.file: shard for shard in plan.shards}
    with (
        remote_files.local_copies(work.copies),
        contextlib.closing(ImageReader(plan.places, work.spool, plan.surveyed)) as images,
    ):
        writer = ShardWriter(plan, work, images, report)
        items, upcoming = tee(items)
        images.prefetch(
            record
            for file in upcoming
            for block in records.read(work.records_path(file))
            for record in block.fields()
        )
        for file in items:
            writer.write(planned[file])
    return {}


def drop_bad_images(found: Survey, work: WorkDirectory, processes: Processes, rejected: Rejected) -> Survey:
    """Removes examples whose image cannot be stored from the buckets, before they are planned."""
    found.plan.save(work.plan)
    found.buckets.flush()
    meter = Meter("checked", sum(found.codes), rejected=rejected.reasons.total())
    buckets = [path.name for path in found.buckets.paths]
    bad, codes = processes.run(check_buckets, work.arguments, buckets, meter.advance), list(found.codes)
    for bucket in buckets:
        for code, name, reason in bad[bucket]:
            codes[code] -= 1
            rejected.add(BadRecordError(name, reason))
    return replace(found, codes=codes)


def check_buckets(arguments: Mapping[str, Any], items: Iterable[str], report: Report) -> dict[str, Any]:
    """Removes records whose image cannot be stored from bucket files: a job of the process pool.

    Returns the split code, the name and the reason of each, by bucket.
    """
    work = WorkDirectory.from_arguments(arguments)
    plan = Plan.load(work.plan)
    codec, found = plan.make_codec(), dict[str, list[tuple[int, str, str]]]()
    with contextlib.closing(ImageReader(plan.places, work.spool, plan.surveyed)) as images:
        for bucket in items:
            path, bad = work.buckets / bucket, found.setdefault(bucket, [])
            checked = path.with_suffix(".checked")
            checked.touch()
            for block in records.read(path):
                good = list[int]()
                for number, (key, image_path, _, _, location, offset, length) in enumerate(block.fields()):
                    data = b""
                    try:
                        if location != NO_LOCATION:
                            data = images.read(location, offset, length, image_path, key)
                            codec.store(data, records.key_text(key))
                        good.append(number)
                    except BadRecordError as error:
                        bad.append((int(block.heads["code"][number]), error.name, error.reason))
                    report(1, len(data))
                records.append(checked, block.take(np.array(good, np.int64)))
            checked.replace(path)
    return found


class ShardFile(contextlib.AbstractContextManager["ShardFile"]):
    """A file that is written in large blocks: `size` and `checksum` are of what was written."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self.size = self.checksum = 0

    def add(self, contents: Sequence[bytes], sizes: Sequence[int], tails: Sequence[bytes]) -> int:
        """Writes records and returns their size in bytes.

        Each has an image, or b"" and the size `NO_IMAGE`; `tails` are the bytes after the images.
        """
        frames, starts, in_all = zip(*map(image_start, sizes, map(len, tails)), strict=True)
        size: int = sum(in_all)
        if size <= _SMALL * len(contents) or len(contents) > _PIECES:
            records = list(map(b"".join, zip(starts, contents, tails, strict=True)))
            checksums = map(mask, map(google_crc32c.value, records))
            self._write([b"".join(chain.from_iterable(zip(frames, records, checksums, strict=True)))])
            return size
        pieces, value, extend = list[bytes](), google_crc32c.value, google_crc32c.extend
        for frame, start, content, tail in zip(frames, starts, contents, tails, strict=True):
            checksum = mask(extend(extend(value(start), content), tail))
            pieces += frame + start, content, tail + checksum
        self._write(pieces)
        return size

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Fsyncs the file and closes it."""
        try:
            if not kind:
                os.fsync(self.file)
        finally:
            os.close(self.file)

    def _write(self, pieces: list[bytes]) -> None:
        size = sum(map(len, pieces))
        crc, extend = self.checksum, google_crc32c.extend
        for piece in pieces:
            crc = extend(crc, piece)
        self.checksum = crc
        written = os.writev(self.file, pieces)
        if written < size:  # the next call raises if the disk is full
            rest = memoryview(b"".join(pieces))[written:]
            while rest:
                rest = rest[os.write(self.file, rest) :]
        self.size += size
