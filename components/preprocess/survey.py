"""The one pass over a source: what its examples are, and where their images are.

Examples that cannot be used: the first ends the run, or all are left out and named in a file.

Looking at every image before anything is decided, so that bad ones can be left out of the plan.
"""

from __future__ import annotations

import json
import operator
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardline.components.preprocess import plan, rows
from shardline.components.preprocess.images.codec import Codec
from shardline.components.preprocess.payload import Payloads
from shardline.components.preprocess.plan_file import NOWHERE, Place, Places, Plan
from shardline.components.preprocess.records.frame import FeatureEntries
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.source import WHOLE_FILE, BadExample, Example, Source, Span
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer import plugins
from shardline.trainer.data.manifest import SPLITS, Feature
from shardline.trainer.errors import BadRecordError, ShardlineError, SourceError
from shardline.trainer.progress import Meter


class Rejected:
    """Takes bad examples as the policy says.

    Args:
        policy: "fail" or "skip".
        path: The file that names those that are left out, one JSON object per line.
    """

    def __init__(self, policy: str, path: Path) -> None:
        self._policy = policy
        self._path = path
        self.reasons: Counter[str] = Counter()

    def add(self, error: BadRecordError) -> None:
        """Leaves an example out.

        Raises:
            BadRecordError: Under the policy "fail".
        """
        if self._policy == "fail":
            raise error
        self.reasons[error.reason] += 1
        with self._path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(json.dumps({"file": error.name, "reason": error.reason}) + "\n")

    def check(self, records_in: int, largest_fraction: float) -> None:
        """Ends the run if too many were left out.

        Raises:
            SourceError: With the most frequent reason and an example of it.
        """
        total = self.reasons.total()
        if total <= largest_fraction * records_in:
            return
        reason, count = self.reasons.most_common(1)[0]
        with self._path.open(encoding="utf-8") as file:
            name = next(found["file"] for found in map(json.loads, file) if found["reason"] == reason)
        raise SourceError(
            f"{total:,} of {records_in:,} examples cannot be used, more than max_bad_fraction "
            f"{largest_fraction:g} allows; {count:,} of them: {reason} ({name!r})"
        )


#: Progress is reported once for so many examples.
_TICK = 512

_SPLITS = frozenset({None, *SPLITS})
_Image = tuple[int, int, int, bytes, int]


@dataclass(frozen=True)
class Survey:
    """What a source holds.

    Attributes:
        class_names: Name of each class.
        features: Further features of every example.
        places: Where the images are; only nowhere if there are none.
        buckets: A row for every usable example.
        codes: Number of rows by split code.
        sizes: Size of their images by split code, in bytes; counted only where the number of shards
            follows from it.
        existing: All splits that the source gives to any example.
        bad: Examples that the source itself found unusable.
    """

    class_names: tuple[str, ...]
    features: tuple[Feature, ...]
    places: Sequence[Place]
    buckets: rows.Buckets
    codes: Sequence[int]
    sizes: Sequence[int]
    existing: frozenset[str]
    bad: int


def survey(source: Source, settings: PreprocessSettings, work: WorkDirectory, rejected: Rejected) -> Survey:
    """Reads a source once. Images that are files, or in files, are not read, unless their content is the key.

    Args:
        source: The source.
        settings: How it becomes a dataset.
        work: Keeps the rows, and images that cannot be read again.
        rejected: Takes examples that the source cannot give.

    Raises:
        SourceError: The source has no examples or fewer than two classes, or an example is not usable: a
            key twice, a label out of range.
    """
    class_names = _check_class_names(source.class_names)
    features = tuple(getattr(source, "features", ()))
    entries = FeatureEntries(features)
    codes = plan.SplitCodes(settings.split)
    seen = bytearray(len(class_names))
    counts, sizes = [0] * codes.count, [0] * codes.count
    existing: set[str] = set()
    bad = count = 0
    buckets = rows.Buckets(work.buckets)
    seed, classes = settings.seed, len(class_names)
    by_content, measured = settings.key == "content", not settings.shards
    append, pack, code_of, digest_of = buckets.append, rows.HEAD.pack, codes.code, plan.digest
    meter = Meter("read", operator.length_hint(source, 0))
    with _Images(settings, work) as images:
        locate = images.locate
        for example in _examples(source):
            if type(example) is not Example:
                rejected.add(_bad_example(example))
                bad += 1
                continue
            name, label, image, split, values = example
            if type(name) is not str or not name:
                raise SourceError(f"key {name!r} of an example is not a text of at least one character")
            if type(label) is not int or not 0 <= label < classes:
                label = _check_label(label, classes, name)
            if split not in _SPLITS:
                raise SourceError(f"split {split!r} of {name!r} is unknown; known: {', '.join(SPLITS)}, None")
            if split is not None:
                existing.add(split)
            key = name.encode("utf-8", "surrogateescape")
            try:
                where = place, offset, length, path, checksum = locate(image, name)
                extra = entries.of(values, name) if features or values else b""
                digest = digest_of(images.content(where, key) + extra if by_content else key, seed)
            except BadRecordError as error:
                rejected.add(error)
                bad += 1
                continue
            code = code_of(digest[8:], split)
            counts[code] += 1
            seen[label] = 1
            if measured:
                sizes[code] += images.size(length, path or key, place)
            head = pack(digest, code, len(key), len(path), len(extra), label, place, offset, length, checksum)
            append(b"".join((head, key, path, extra)))
            count += 1
            if not count % _TICK:
                meter.advance(_TICK)
    if not count + bad:
        raise SourceError("the source is empty: it has no example")
    if sum(seen) == 1:
        raise SourceError(
            f"all {count:,} examples are of one class, {class_names[seen.index(1)]!r}; bring a second"
        )
    return Survey(
        class_names, features, images.places.all(), buckets, counts, sizes, frozenset(existing), bad
    )


class _Images:
    """Where the images of examples are; those that cannot be read again are copied into the spool."""

    def __init__(self, settings: PreprocessSettings, work: WorkDirectory) -> None:
        self._work = work
        self._spool: Any = None
        self._keys: Any = None
        self._kept, self._end = b"", 0
        self._prefix, self._prefix_place = "", -1
        self._file, self._file_place = "", -1
        self._codec = Codec(image_size=0, resize_mode="crop", encoding="keep", max_pixels=settings.max_pixels)
        self._stack = ExitStack()
        self.places = Places()
        self._payloads = self._stack.enter_context(Payloads(self.places.all(), work.spool, sys.maxsize))

    def __enter__(self) -> _Images:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def locate(self, image: Any, name: str) -> _Image:
        """Returns the place of an image, its offset and length, its path if not the key, and its checksum."""
        kind = type(image)
        if kind is Span:
            file, offset, length = image
            if length == WHOLE_FILE:
                return self._whole_file(file, name)
            if file != self._file:
                self._file, self._file_place = file, self.places.number("file", file)
            return self._file_place, offset, length, b"", 0
        if kind is bytes:
            return self._keep(image)
        if image is None:
            return NOWHERE, 0, 0, b"", 0
        if isinstance(image, Path):
            return self._whole_file(str(image), name)
        if isinstance(image, bytes | bytearray | memoryview):
            return self._keep(bytes(image))
        if hasattr(image, "dtype"):
            return self._keep(self._codec.from_pixels(image, name))
        raise SourceError(
            f"image {name!r} is a {kind.__name__}; expected bytes, a Path, a Span or a uint8 array"
        )

    def content(self, where: _Image, key: bytes) -> bytes:
        """Returns an image's encoded bytes, and notes its key: equal keys are not found by their digests.

        Raises:
            BadRecordError: It cannot be read.
        """
        if self._keys is None:
            self._keys = self._stack.enter_context(self._work.keys.open("wb"))
        self._keys.write(plan.digest(key, 0))
        place, offset, length, path, _ = where
        if place == NOWHERE:
            return b""
        if self.places.all()[place].kind == "spool":
            return self._kept
        return self._payloads.read(place, offset, length, path, key)

    def size(self, length: int, path: bytes, place: int) -> int:
        """Returns the size of an image in bytes, or 0 if it cannot be found."""
        if length != WHOLE_FILE:
            return length
        try:
            return os.stat(os.fsencode(self.places.all()[place].path) + path).st_size
        except OSError:
            return 0

    def _whole_file(self, path: str, name: str) -> _Image:
        # Nearly always a path is a directory and the key, and the directory that of the example before.
        prefix, rest = (path[: -len(name)], b"") if path.endswith(name) else ("", os.fsencode(path))
        if prefix != self._prefix or self._prefix_place < 0:
            self._prefix, self._prefix_place = prefix, self.places.number("directory", prefix)
        return self._prefix_place, 0, WHOLE_FILE, rest, 0

    def _keep(self, data: bytes) -> _Image:
        if self._spool is None:
            self._spool = self._stack.enter_context(self._work.spool.open("wb"))
            self._spool_place = self.places.number("spool", "")
        self._kept, offset, length = data, self._end, len(data)
        self._spool.write(data)
        self._end += length
        return self._spool_place, offset, length, b"", xxhash.xxh3_64_intdigest(data)


def _examples(source: Source) -> Iterator[Example | BadExample]:
    """Yields the examples; what a user's own source raises becomes one line with its place."""
    try:
        yield from source
    except ShardlineError:
        raise
    except Exception as failure:
        raise SourceError(f"the source failed: {plugins.describe(failure)}") from failure


def _bad_example(example: object) -> BadRecordError:
    if isinstance(example, BadExample):
        return BadRecordError(example.name, example.reason)
    raise SourceError(
        f"the source yields a {type(example).__name__}, not an Example "
        " (shardline.components.preprocess.sources)"
    )


def _check_class_names(names: Sequence[str]) -> tuple[str, ...]:
    class_names = tuple(names)
    for name in class_names:
        if not isinstance(name, str) or not name.isprintable():
            raise SourceError(f"class name {name!r} is not printable text; rename the class")
    if len(set(class_names)) != len(class_names):
        raise SourceError(f"class names are not unique: {', '.join(class_names)}")
    if len(class_names) < 2:
        there = f"only {class_names[0]!r}" if class_names else "none"
        raise SourceError(f"at least 2 classes are needed, the source has {there}")
    return class_names


def _check_label(label: Any, classes: int, name: str) -> int:
    try:
        index = operator.index(label)
    except TypeError:
        raise SourceError(f"label {label!r} of {name!r} is not an integer") from None
    if not 0 <= index < classes:
        raise SourceError(
            f"label {index} of {name!r} is out of range 0..{classes - 1} of the {classes} classes"
        )
    return index


def check_bucket(plan: Plan, work: WorkDirectory, path: Path, report: Callable[[int, int], None]) -> None:
    """Takes the rows whose image cannot be stored out of a bucket file.

    Args:
        plan: The plan as far as it is known: settings and places.
        work: The work directory.
        path: The bucket file; beside it, NAME.bad names what was taken out and why, and its split code.
        report: Told of progress: records and bytes since the last call.
    """
    codec = plan.make_codec()
    good, bad = [], []
    with Payloads(plan.places, work.spool, plan.surveyed) as payloads:
        for row in rows.read(path):
            parsed = rows.parse(row)
            data = b""
            try:
                if parsed.place != NOWHERE:
                    data = payloads.read(parsed.place, parsed.offset, parsed.length, parsed.path, parsed.key)
                    codec.store(data, parsed.name)
                good.append(row)
            except BadRecordError as error:
                bad.append({"file": error.name, "reason": error.reason, "code": parsed.code})
            report(1, len(data))
    path.write_bytes(b"".join(good))
    path.with_suffix(".bad").write_text("".join(json.dumps(each) + "\n" for each in bad))
