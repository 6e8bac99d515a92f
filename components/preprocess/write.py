"""Writing: the shards of a plan, their completion markers, and the manifest that is made of these.

The innermost loop runs once per example, millions of times: it uses bare system calls and bytes only, and
computes as much as possible beforehand. A marker is a file of a line of JSON, and hashes of the contents of
the shard's examples. One that is cut off, or of another plan, is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, compress, count, islice, pairwise, tee, zip_longest
from pathlib import Path
from struct import iter_unpack
from typing import Any

import google_crc32c
import numpy as np
import xxhash

from shardline.components.preprocess.images import Kind
from shardline.components.preprocess.plan import (
    NO_LOCATION,
    ImageReader,
    Plan,
    PlannedShard,
    Rejected,
    Survey,
    records,
)
from shardline.components.preprocess.plan.records import (
    HASH_BYTES,
    Buckets,
    Numbers,
    Records,
    are_rows_alike,
    find_repeated,
    hash_blocks,
)
from shardline.components.preprocess.process_pool import Processes, Report
from shardline.components.preprocess.schema import tally_label
from shardline.components.preprocess.sources.example import WHOLE_FILE, changed_error
from shardline.components.preprocess.tfrecord import (
    NO_IMAGE,
    as_example,
    by_length,
    concatenate,
    decode,
    encode,
    head,
    image_start,
    mask,
    masks,
)
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.storage import copies
from shardline.trainer.base import deserialize, files
from shardline.trainer.base.errors import BadRecordError, RunError, SourceError
from shardline.trainer.base.progress import Meter
from shardline.trainer.manifest import (
    LABEL,
    SPLITS,
    Duplicates,
    Feature,
    Label,
    Manifest,
    Shard,
    Split,
    Tally,
    is_class,
)

# Bytes collected before a write: they should fit into the processor's cache.
_BLOCK = 1 << 19
# A system call takes at most 1,024 buffers (IOV_MAX), three for a record.
_PIECES = 1000 // 3
# Images up to this average size are copied into their records, which saves calls.
_SMALL = 8192


class ShardWriter:
    """Writes shards of one plan."""

    def __init__(self, plan: Plan, work: WorkDirectory, images: ImageReader, report: Report) -> None:
        import pyarrow as pa

        self._plan = plan
        self._work = work
        self._images = images
        self._report = report
        self._codec = plan.make_codec(checked=plan.settings.on_bad_record == "skip")
        # Any other label is stored like features.
        classes = range(len(plan.labels[0].outputs)) if is_class(plan.labels) else ()
        self._labels = encode({LABEL: pa.array(classes, pa.int64())})

    def write(self, shard: PlannedShard) -> None:
        """Writes a shard under a temporary name, fsyncs it, and adds it to the others with its marker."""
        temporary = files.temporary_name(self._work.path / shard.file)
        try:
            path, kinds, hashes = self._work.records_path(shard.file), Counter[Kind](), list[bytes]()
            with ShardFile(temporary) as output:
                for block in records.read_records(path):
                    hashes += self._write_block(block, output, kinds)
            written = Shard(shard.file, shard.records, output.size, f"{output.checksum:08x}")
            labels = label_tallies(self._plan.labels, records.read_records(path))
            of_kinds = [
                Images(height, width, channels, (encoding,), dict.fromkeys(converted, count))
                for (height, width, channels, encoding, converted), count in kinds.items()
            ]
            identity, surveyed = self._plan.identity(shard), self._plan.surveyed
            marker = Marker(identity, surveyed, written, labels, Images.merge(of_kinds))
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

    def _write_block(self, block: Records, output: ShardFile, kinds: Counter[Kind]) -> Iterator[bytes]:
        """Writes records, counts kinds of images, and yields the hashes of the contents, batch by batch."""
        for part in _parts(block):
            names, _, features = part.texts
            labels = [self._labels.take(part.heads["label"])] if self._labels else []
            values = concatenate(*labels, features)
            tails = concatenate(by_length(names, partial(head, "key")), names, values).to_pylist()
            have_image = (part.heads["location"] != NO_LOCATION).tolist()
            keys, others = part.keys(), [] if all(have_image) else values.to_pylist()
            end = 0
            for contents in self._images.read_batches(part, _BLOCK):
                start, end = end, end + len(contents)
                have, without_image = have_image[start:end], others[start:end]
                sizes = self._store(contents, keys[start:end], have, kinds)
                hashed = [
                    data or other for data, other in zip_longest(contents, without_image, fillvalue=b"")
                ]
                yield np.fromiter(map(xxhash.xxh3_64_intdigest, hashed), "<u8", len(contents)).tobytes()
                self._report(len(contents), output.add(contents, sizes, tails[start:end]))

    def _store(
        self, contents: list[bytes], keys: Sequence[bytes], have: Sequence[bool], kinds: Counter[Kind]
    ) -> list[int]:
        """Replaces images by those that are stored, counts their kinds, and returns their sizes."""
        store, found = self._codec.store, list[Kind]()
        for number in compress(count(), have):
            contents[number], kind = store(contents[number], keys[number])
            found.append(kind)
        kinds.update(found)
        if len(found) == len(contents):
            return list(map(len, contents))
        return [len(data) if has else NO_IMAGE for data, has in zip(contents, have, strict=True)]


def _parts(block: Records) -> Iterator[Records]:
    """Yields records in parts whose texts and images, as far as their sizes are known, fill a block."""
    lengths = block.heads["length"]
    ends = np.cumsum(np.maximum(lengths, ~lengths) + block.sizes) // _BLOCK
    bounds = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), block.count]
    for start, end in pairwise(bounds):
        yield block[start:end]


def write_planned(arguments: Mapping[str, Any], items: Iterable[str], report: Report) -> dict[str, Any]:
    """Writes planned shards, a job of the process pool; `arguments` has `out`, the dataset directory."""
    work = WorkDirectory(Path(arguments["out"]), Path(arguments["path"]))
    plan = Plan.load(work.plan)
    planned = {shard.file: shard for shard in plan.shards}
    with (
        copies.kept_in(work.copies),
        contextlib.closing(ImageReader(plan.places, work.spool, plan.surveyed)) as images,
    ):
        writer = ShardWriter(plan, work, images, report)
        items, upcoming = tee(items)
        images.prefetch(
            record
            for file in upcoming
            for block in records.read_records(work.records_path(file))
            for record in block.fields()
        )
        for file in items:
            writer.write(planned[file])
    return {}


def drop_bad_images(found: Survey, work: WorkDirectory, processes: Processes, rejected: Rejected) -> Survey:
    """Removes examples whose image cannot be stored from the buckets, before they are planned."""
    found.plan.save(work.plan)
    meter = Meter("checked", sum(found.codes), rejected=len(rejected.found))
    buckets = list(map(str, np.flatnonzero(found.buckets.sizes())))
    bad, codes = processes.run_job(check_buckets, work.arguments, buckets, meter.advance), list(found.codes)
    for bucket in buckets:
        for code, name, reason in bad[bucket]:
            codes[code] -= 1
            rejected.add(BadRecordError(name, reason))
    for path in found.buckets.files():
        path.unlink()
    return replace(found, codes=codes, buckets=Buckets(work.checked))


def check_buckets(arguments: Mapping[str, Any], items: Iterable[str], report: Report) -> dict[str, Any]:
    """Copies the records whose image can be stored to other buckets: a job of the process pool.

    Returns the split code, the name and the reason of each that cannot, by bucket.
    """
    work = WorkDirectory(Path(arguments["out"]), Path(arguments["path"]))
    plan = Plan.load(work.plan)
    codec, found = plan.make_codec(), dict[str, list[tuple[int, str, str]]]()
    buckets, checked = Buckets(work.buckets), Buckets(work.checked)
    with contextlib.closing(ImageReader(plan.places, work.spool, plan.surveyed)) as images:
        for bucket in items:
            block, bad, good = buckets.read(int(bucket), int(bucket) + 1), found.setdefault(bucket, []), []
            for number, record in enumerate(block.fields()):
                data = b""
                try:
                    if record.location != NO_LOCATION:
                        data = images.read_image(record)
                        codec.store(data, record.key)
                    good.append(number)
                except BadRecordError as error:
                    bad.append((int(block.heads["code"][number]), error.name, error.reason))
                report(1, len(data))
            checked.append(block.take(np.array(good, np.int64)))
    checked.flush()
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
            crcs = np.fromiter(map(google_crc32c.value, records), np.uint32, len(records))
            checksums = (masked for (masked,) in iter_unpack("4s", masks(crcs)))
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


@dataclass(frozen=True)
class Images:
    """Common properties of the stored images of some shards; a side is None where they differ.

    `channels` is the largest number, 0 without images; `converted` counts images by conversion.
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

    def feature(self, resize: str) -> Feature:
        """Returns the image feature of the manifest."""
        encoding = self.encodings[0] if len(self.encodings) == 1 else "image"
        return Feature("image", "uint8", (self.height, self.width, self.channels), encoding, resize)


@dataclass(frozen=True)
class Marker:
    """Facts about a completed shard; `identity` and `surveyed` are those of its plan."""

    identity: str
    surveyed: int
    shard: Shard
    labels: Mapping[str, Tally]
    images: Images


@dataclass(frozen=True)
class FoundMarker:
    """A marker that was found: the file that it is in, and where in it the shard's hashes are."""

    marker: Marker
    path: Path
    offset: int

    def hashes(self) -> Iterator[bytes]:
        """Yields the hashes, one behind the other, in blocks."""
        return hash_blocks(self.path, self.offset, HASH_BYTES * self.marker.shard.records)


def label_tallies(labels: Sequence[Label], blocks: Iterable[Records]) -> dict[str, Tally]:
    """Returns the tally of each label in some records, at least one."""
    if is_class(labels):
        classes = len(labels[0].outputs)
        counts = sum(np.bincount(block.heads["label"], minlength=classes) for block in blocks)
        return {LABEL: Tally(tuple(np.asarray(counts).tolist()))}
    values: dict[str, list[Numbers]] = {label.name: [] for label in labels}
    for block in blocks:
        stored, _ = decode(map(as_example, block.texts[2].to_pylist()), names=values)
        for name, found in values.items():
            found.append(stored[name].flatten().to_numpy().reshape(block.count, -1))
    return {label.name: tally_label(label, np.concatenate(values[label.name])) for label in labels}


def write_marker(work: WorkDirectory, marker: Marker, hashes: bytes) -> None:
    """Writes the marker of a shard that is complete and in place, with the hashes of its contents."""
    content = b"".join((json.dumps(asdict(marker)).encode(), b"\n", hashes))
    work.add_marker(f"{marker.shard.file}.mark", content)


def load_markers(work: WorkDirectory) -> dict[str, FoundMarker]:
    """Returns all readable markers, by the file of their shard."""
    return {found.marker.shard.file: found for found in map(_read_marker, work.markers()) if found}


def remove_other_markers(plan: Plan, work: WorkDirectory) -> None:
    """Removes markers of other plans, before their shards are written again."""
    planned = {(shard.file, plan.identity(shard)) for shard in plan.shards}
    for path in work.markers():
        found = _read_marker(path)
        if not found or (found.marker.shard.file, found.marker.identity) not in planned:
            work.remove_marker(path.name)


def _read_marker(path: Path) -> FoundMarker | None:
    try:
        with path.open("rb") as file:
            line, size = file.readline(files.MAX_TEXT_BYTES), os.fstat(file.fileno()).st_size
        facts = files.parse_json(line, str(path), RunError)
        marker = deserialize.restore(Marker, facts, str(path), RunError)
    except (FileNotFoundError, RunError):  # one that cannot be read is not missing
        return None
    is_whole = size == len(line) + HASH_BYTES * marker.shard.records
    return FoundMarker(marker, path, len(line)) if is_whole else None


#: Groups of equal examples that are named in the manifest, and the most keys of one of them.
_NAMED, _NAMED_KEYS = 20, 10
# Rows that tell how many others share the value of a column.
_SAMPLED_ROWS = 5000


def make_manifest(plan: Plan, work: WorkDirectory) -> Manifest:
    """Returns the manifest of a dataset; RunError if any of its shards is not done."""
    done = find_done(plan, plan.shards, work)
    missing = [shard.file for shard in plan.shards if shard.file not in done]
    if missing:
        raise RunError(
            f"{len(missing)} of {len(plan.shards)} shards of {work.out} are not written, {missing[0]} among "
            "them; write them first"
        )
    images = Images.merge([found.marker.images for found in done.values()])
    if images.encodings == ("raw",) and None in (images.height, images.width):
        raise SourceError("raw images must be of one size, these differ; give image_size or another encoding")
    resize = plan.settings.resize_mode if plan.settings.image_size else ""
    features = (
        *([images.feature(resize)] if images.channels else []),
        *(label.feature for label in plan.labels),
        Feature("key", "string"),
        *plan.features,
    )
    splits = {}
    for name in dict.fromkeys(shard.split for shard in plan.shards):
        written = [done[shard.file].marker for shard in plan.shards if shard.split == name]
        labels = {
            label.name: Tally.merge([(marker.shard.records, marker.labels[label.name]) for marker in written])
            for label in plan.labels
        }
        splits[name] = Split(shards=tuple(marker.shard for marker in written), labels=labels)
    return Manifest(
        fingerprint=_fingerprint(plan.labels, features, splits),
        source=plan.settings.source,
        settings=plan.settings.recorded(plan.schema),
        labels=plan.labels,
        features=features,
        splits=splits,
        records_in=plan.records_in,
        rejected=dict(sorted(plan.rejected.items())),
        converted=images.converted,
        duplicates=_find_duplicates(plan, work, done, is_table=not images.channels),
        keys=_write_keys(plan, work),
        anomalies=plan.anomalies,
    )


def _write_keys(plan: Plan, work: WorkDirectory) -> Shard | None:
    """Writes the key hash of each example, in the order of the shards; None if the source has no keys."""
    size = checksum = 0
    has_keys = False
    with files.replacing(work.key_hashes) as temporary, temporary.open("wb") as file:
        for block in (
            block for shard in plan.shards for block in records.read_records(work.records_path(shard.file))
        ):
            known = records.key_hash_bytes(block.heads)
            file.write(known)
            size, checksum = size + len(known), google_crc32c.extend(checksum, known)
            has_keys = has_keys or bool(block.heads["key_hash"].any())
    if not has_keys:  # the source has no keys of its own
        work.key_hashes.unlink(missing_ok=True)
        return None
    return Shard(work.key_hashes.name, plan.records, size, f"{checksum:08x}")


def find_done(plan: Plan, shards: Sequence[PlannedShard], work: WorkDirectory) -> dict[str, FoundMarker]:
    """Returns the markers of the shards that are done exactly as planned, by file."""
    known, sizes = load_markers(work), work.shard_sizes()
    return {
        shard.file: found
        for shard in shards
        if (found := known.get(shard.file))
        and sizes.get(shard.file) == found.marker.shard.bytes
        and found.marker.identity == plan.identity(shard)
        and (found.marker.surveyed == plan.surveyed or _are_unchanged(shard, plan, work, found.marker))
    }


def _are_unchanged(shard: PlannedShard, plan: Plan, work: WorkDirectory, marker: Marker) -> bool:
    prefixes = [os.fsencode(location.path) for location in plan.places]
    paths = (
        prefixes[location] + (path or key)
        for block in records.read_records(work.records_path(shard.file))
        for key, path, _, _, location, generation, length in block.fields()
        # The generations of objects are part of the plan.
        if location != NO_LOCATION and length <= WHOLE_FILE and not generation
    )
    try:
        return all(os.stat(path).st_ctime_ns <= marker.surveyed for path in paths)
    except OSError:
        return False


def _fingerprint(labels: Sequence[Label], features: Sequence[Feature], splits: Mapping[str, Split]) -> str:
    """Returns the hash of a dataset's bytes and their meaning; not of its source and the time of reading."""
    content = {
        "labels": [asdict(label) for label in labels],
        "features": [asdict(feature) for feature in features],
        "shards": [asdict(shard) for split in splits.values() for shard in split.shards],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _find_duplicates(
    plan: Plan, work: WorkDirectory, done: Mapping[str, FoundMarker], *, is_table: bool
) -> Duplicates:
    shards = plan.shards
    starts = np.array([0, *accumulate(shard.records for shard in shards)])
    split_bits = np.array([1 << SPLITS.index(shard.split) for shard in shards], np.uint8)
    blocks = (block for shard in shards for block in done[shard.file].hashes())
    repeats = straddling = 0
    groups: list[tuple[int, list[int]]] = []
    for hashes, numbers in find_repeated(blocks, plan.records, work.path):
        begins = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
        repeats += len(hashes) - len(begins)
        of_shard = np.searchsorted(starts, numbers, side="right") - 1
        split_masks = np.bitwise_or.reduceat(split_bits[of_shard], begins).astype(np.int64)
        splits = (split_masks & 1) + (split_masks >> 1 & 1) + (split_masks >> 2)
        straddling += int((splits > 1).sum())
        # Those that straddle splits come first: they need attention.
        ends = np.append(begins[1:], len(hashes))
        for group in np.lexsort((numbers[begins], -splits))[:_NAMED].tolist():
            members = numbers[begins[group] : min(ends[group], begins[group] + _NAMED_KEYS)].tolist()
            groups.append((-int(splits[group]), members))
        groups = heapq.nsmallest(_NAMED, groups)

    if repeats and is_table and _are_rows_alike(plan, work):
        return Duplicates(repeats, by_chance=True)

    def name(number: int) -> str:
        index = int(np.searchsorted(starts, number, side="right")) - 1
        shard, position = shards[index], number - int(starts[index])
        for block in records.read_records(work.records_path(shard.file)):
            if position < block.count:
                key = records.key_text(block.keys()[position]).encode("utf-8", "backslashreplace").decode()
                return f"{shard.split}: {key}"
            position -= block.count
        raise IndexError(number)

    named = tuple(tuple(map(name, members)) for _, members in groups)
    return Duplicates(examples=repeats, straddling=straddling, named=named)


def _are_rows_alike(plan: Plan, work: WorkDirectory) -> bool:
    largest = max(plan.shards, key=lambda shard: shard.records)  # a random sample
    blocks = records.read_records(work.records_path(largest.file))
    rows = islice((row for block in blocks for row in block.texts[2].to_pylist()), _SAMPLED_ROWS)
    columns, _ = decode(map(as_example, rows))
    counts = [Counter(map(str, column.to_pylist())) for column in columns.values()]
    return are_rows_alike(counts, plan.records)
