"""Survey: the one pass over a source, which finds what its examples are and where their images lie.

Examples that cannot be used end the run or, where they may be skipped, are left out and named in a file.
Then every image is looked at before anything is decided (`check_buckets`), so that bad ones are not planned.
"""

from __future__ import annotations

import contextlib
import json
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.components.preprocess import rows
from shardline.components.preprocess.example import FeatureEntries
from shardline.components.preprocess.places import NOWHERE, ImageLocator, ImageReader, Place, brought
from shardline.components.preprocess.plan import Plan, SplitCodes, digest, digests
from shardline.components.preprocess.pool import Report
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import BadExample, Example, Source
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer import plugins
from shardline.trainer.data.manifest import SPLITS, Feature
from shardline.trainer.errors import BadRecordError, SourceError
from shardline.trainer.progress import Meter

#: Progress is reported once for so many examples.
_TICK = 512

_SPLITS = frozenset({None, *SPLITS})


class Rejected:
    """Bad examples, treated as the policy says: "fail", or "skip", and then named in a file of JSON lines.

    Attributes:
        reasons: Number of examples left out, by reason.
    """

    def __init__(self, policy: str, path: Path) -> None:
        self._policy = policy
        self._path = path
        self.reasons: Counter[str] = Counter()

    def add(self, error: BadRecordError) -> None:
        """Leaves an example out; under the policy "fail", raises its error."""
        if self._policy == "fail":
            raise error
        self.reasons[error.reason] += 1
        with self._path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(json.dumps({"file": error.name, "reason": error.reason}) + "\n")

    def check(self, records_in: int, largest_fraction: float) -> None:
        """Ends the run if too many were left out, with the most frequent reason and an example of it."""
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


@dataclass(frozen=True)
class Survey:
    """Content of a source.

    Attributes:
        buckets: A row for every usable example.
        codes: Number of rows by split code.
        sizes: Size of their images by split code, in bytes; counted only where the number of shards
            follows from it.
        existing: All splits that the source gives to any example; None where it gives none.
        bad: Number of examples that the source itself found unusable.
    """

    class_names: tuple[str, ...]
    features: tuple[Feature, ...]
    places: Sequence[Place]
    buckets: rows.Buckets
    codes: Sequence[int]
    sizes: Sequence[int]
    existing: frozenset[str | None]
    bad: int


def survey(source: Source, settings: PreprocessSettings, work: WorkDirectory, rejected: Rejected) -> Survey:
    """Reads a source once. Images that are files, or in files, are not read, unless their content is the key.

    A source without examples or with fewer than two classes, and an example that is not one (a key twice, a
    label out of range), is a SourceError.
    """
    class_names, features, length = _described(source)
    entries, codes = FeatureEntries(features), SplitCodes(settings.split)
    classes, seen, existing = len(class_names), bytearray(len(class_names)), set[str | None]()
    counts, sizes = [0] * codes.count, [0] * codes.count
    bad, count, buckets, meter = 0, 0, rows.Buckets(work.buckets), Meter("read", length)
    seed, salt, pack = settings.seed, settings.split_salt, rows.HEAD.pack
    by_content, measured = settings.key == "content", not settings.shards
    named = by_content or getattr(source, "has_keys", True)  # a position may be another example's tomorrow
    with (
        ImageLocator(work.spool, settings.max_pixels) as images,
        work.keys.open("wb") if by_content else contextlib.nullcontext() as keys,
    ):
        for example in _examples(source, brings=by_content or measured or settings.on_bad_record == "skip"):
            try:
                name, label, image, split, values = _checked(example, classes)
                existing.add(split)
                key = name.encode("utf-8", "surrogateescape")
                where = place, offset, length, path, checksum = images.locate(image, name)
                extra = entries.of(values, name) if features or values else b""
                if keys:  # equal keys are not found by the digests
                    keys.write(digest(key, 0))
                identity = images.content(where, key) + extra if by_content else key
                order, point, known = digests(identity, seed, salt)
            except BadRecordError as error:
                rejected.add(error)
                bad += 1
                continue
            code = codes.code(point, split)
            counts[code] += 1
            seen[label] = 1
            if measured:
                sizes[code] += images.size(length, path or key, place)
            sizes_of = len(key), len(path), len(extra)
            head = pack(
                order, code, *sizes_of, label, place, offset, length, checksum, known if named else b""
            )
            buckets.append(b"".join((head, key, path, extra)))
            if not (count := count + 1) % _TICK:
                meter.advance(_TICK)
    _check_content(count, bad, seen, class_names)
    return Survey(class_names, features, images.places, buckets, counts, sizes, frozenset(existing), bad)


def _checked(found: Any, classes: int) -> Example:
    """Returns an example that is one, of one of the classes; raises SourceError or BadRecordError."""
    if type(found) is not Example:
        raise _bad_example(found)
    example: Example = found
    name, label, split = example.key, example.label, example.split
    if type(name) is not str or not name or type(label) is not int or split not in _SPLITS:
        label = _check(example)
        example = example._replace(label=label)
    if not 0 <= label < classes:
        raise _out_of_range(label, classes, name)
    return example


def _described(source: Source) -> tuple[tuple[str, ...], tuple[Any, ...], int]:
    """Returns what a source says of itself: its classes, its features, and how many examples it may have."""
    with plugins.calling("the source failed", SourceError):
        class_names = _check_class_names(source.class_names)
        return class_names, tuple(getattr(source, "features", ())), operator.length_hint(source, 0)


def check_buckets(given: Mapping[str, Any], items: Sequence[str], report: Report) -> dict[str, Any]:
    """Takes the rows whose image cannot be stored out of bucket files: a job of the process pool.

    `given` has `out`, the dataset directory, whose plan is known as far as settings and places. Beside each
    bucket file, NAME.bad names what was taken out and why, and its split code.
    """
    work = WorkDirectory(Path(given["out"]))
    plan = Plan.load(work.plan)
    codec = plan.make_codec()
    with ImageReader(plan.places, work.spool, plan.surveyed) as images:
        for bucket in items:
            path, good, bad = work.buckets / bucket, [], []
            for row in rows.read(path):
                key, where, _, _, place, offset, length = rows.fields(row)
                data = b""
                try:
                    if place != NOWHERE:
                        data = images.read(place, offset, length, where, key)
                        codec.store(data, rows.key_text(key))
                    good.append(row)
                except BadRecordError as error:
                    code = row[rows.DIGEST_BYTES]
                    bad.append({"file": error.name, "reason": error.reason, "code": code})
                report(1, len(data))
            path.write_bytes(b"".join(good))
            path.with_suffix(".bad").write_text("".join(json.dumps(each) + "\n" for each in bad))
    return {}


def _examples(source: Source, *, brings: bool) -> Iterator[Example | BadExample]:
    """Yields the examples; what a user's own source raises becomes one line with its place.

    `brings`: whether images that are far are brought here, since they will be looked at more than once.
    """
    with plugins.calling("the source failed", SourceError):
        yield from brought(source) if brings else source


def _bad_example(example: object) -> BadRecordError:
    if isinstance(example, BadExample):
        return BadRecordError(example.name, example.reason)
    raise SourceError(
        f"the source yields a {type(example).__name__}, not an Example "
        "(shardline.components.preprocess.sources)"
    )


def _check(example: Example) -> int:
    """Returns the label of an example, which may be an integer of another kind; refuses what it is not."""
    name, label, _, split, _ = example
    if type(name) is not str or not name:
        raise SourceError(f"key {name!r} of an example is not a text of at least one character")
    if split not in _SPLITS:
        raise SourceError(f"split {split!r} of {name!r} is unknown; known: {', '.join(SPLITS)}, None")
    try:
        return operator.index(label)
    except TypeError:
        raise SourceError(f"label {label!r} of {name!r} is not an integer") from None


def _out_of_range(label: int, classes: int, name: str) -> SourceError:
    return SourceError(f"label {label} of {name!r} is out of range 0..{classes - 1} of the {classes} classes")


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


def _check_content(count: int, bad: int, seen: bytearray, class_names: Sequence[str]) -> None:
    """Refuses a source without examples, or with examples of one class alone."""
    if not count + bad:
        raise SourceError("the source is empty: it has no example")
    if sum(seen) == 1:
        raise SourceError(
            f"all {count:,} examples are of one class, {class_names[seen.index(1)]!r}; bring a second"
        )
