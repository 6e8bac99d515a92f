"""Survey: the one pass over a source, which finds what its examples are and where their images lie.

Examples that cannot be used end the run or, where they may be skipped, are left out and named in a file.
"""

from __future__ import annotations

import contextlib
import json
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from shardline.components.preprocess import rows
from shardline.components.preprocess.example import FeatureEntries
from shardline.components.preprocess.far import brought
from shardline.components.preprocess.places import ImageLocator, Place
from shardline.components.preprocess.plan import Digested, digests
from shardline.components.preprocess.rows import HEAD, Rows
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import BadExample, Example, Source, Span
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer import plugins
from shardline.trainer.data.features import Feature
from shardline.trainer.data.manifest import SPLITS
from shardline.trainer.errors import BadRecordError, SourceError
from shardline.trainer.progress import Meter

#: Examples that are looked at together, at most; progress is reported once for so many.
_TICK = 512

# Bytes of images that are held until they are hashed, about.
_HELD_BYTES = 4 << 20

# Kinds of images that are not in memory.
_PLAIN = frozenset({Span, NoneType, type(Path())})

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

    def sort(self) -> None:
        """Puts the names in order: streams of rows come in another one each time."""
        if self.reasons:
            lines = self._path.read_bytes().splitlines(keepends=True)
            self._path.write_bytes(b"".join(sorted(lines)))

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
        numbers_copies: Whether examples may have the same key, and then get a number with it.
    """

    class_names: tuple[str, ...]
    features: tuple[Feature, ...]
    places: Sequence[Place]
    buckets: rows.Buckets
    codes: Sequence[int]
    sizes: Sequence[int]
    existing: frozenset[str | None]
    bad: int
    numbers_copies: bool


def survey(source: Source, settings: PreprocessSettings, work: WorkDirectory, rejected: Rejected) -> Survey:
    """Reads a source once. Images that are files, or in files, are not read, unless their content is the key.

    A source without examples or with fewer than two classes, and an example that is not one (a key twice, a
    label out of range), is a SourceError.
    """
    class_names, features, length = _described(source)
    by_content = settings.key == "content"
    brings = by_content or not settings.shards or settings.on_bad_record == "skip"
    numbers_copies = bool(getattr(source, "numbers_copies", False))
    named = by_content or getattr(source, "has_keys", True)  # a position may be another example's tomorrow
    with (
        ImageLocator(work.spool, settings.max_pixels) as images,
        work.keys.open("wb") if by_content or numbers_copies else contextlib.nullcontext() as keys,
    ):
        examples = _Examples(images, features, len(class_names), rejected, by_content=by_content)
        taken = _Taken(settings, rows.Buckets(work.buckets), images, keys, len(class_names), named=named)
        meter = Meter("read", length)
        for columns in examples.columns(_examples(source, brings=brings)):
            taken.take(columns)
            meter.advance(len(columns.keys))
    _check_content(taken.count, examples.bad, taken.seen, class_names)
    return Survey(
        class_names=class_names,
        features=features,
        places=images.places,
        buckets=taken.buckets,
        codes=taken.counts.tolist(),
        sizes=taken.sizes.tolist(),
        existing=frozenset(examples.existing),
        bad=examples.bad,
        numbers_copies=numbers_copies,
    )


class _Columns(NamedTuple):
    """What is known of some examples, value by value.

    Attributes:
        places, offsets, lengths, paths, checksums: Where the images are, as in `Location`; of examples whose
            images are spans of one file, one place, path and checksum for all of them.
        extras: Further features, empty where no example has any.
        identities: What digests are made of; empty where that is the key.
    """

    keys: Sequence[bytes]
    labels: Sequence[int]
    splits: Sequence[str | None]
    places: Sequence[int] | int
    offsets: Sequence[int]
    lengths: Sequence[int]
    paths: Sequence[bytes]
    checksums: Sequence[int] | int
    extras: Sequence[bytes]
    identities: Sequence[bytes]


class _Examples:
    """Examples of a source as columns.

    Where they are all plain (a span or path of an image, no further features), which costs little to know,
    hundreds are looked at together. Others are looked at one by one, as soon as the source yields them:
    images in memory take room, and may be in memory that the source uses again.

    Attributes:
        bad: Number of examples that cannot be used.
        existing: Splits that the source gives to any example, None among them where it gives none.
    """

    def __init__(
        self,
        images: ImageLocator,
        features: Sequence[Feature],
        classes: int,
        rejected: Rejected,
        *,
        by_content: bool,
    ) -> None:
        self._images = images
        self._features = features
        self._entries = FeatureEntries(features)
        self._classes = classes
        self._rejected = rejected
        self._by_content = by_content
        self.bad = 0
        self.existing = set[str | None]()

    def columns(self, examples: Iterator[Example | BadExample]) -> Iterator[_Columns]:
        """Yields the examples that can be used."""
        found: list[tuple[Any, ...]] = []
        together, held = 1, 0
        while batch := list(islice(examples, together)):
            plain = None if self._features or self._by_content else self._plain(batch)
            if plain:
                together = _TICK
                yield plain
                continue
            kinds = {type(getattr(example, "image", None)) for example in batch}
            together = 1 if self._by_content or not kinds <= _PLAIN else _TICK
            for example in batch:
                try:
                    found.append(self._one(example))
                    held += len(found[-1][-1])
                except BadRecordError as error:
                    self._rejected.add(error)
                    self.bad += 1
            if len(found) >= _TICK or held > _HELD_BYTES:
                yield self._transposed(found)
                found, held = [], 0
        if found:
            yield self._transposed(found)

    def _plain(self, batch: Sequence[Example | BadExample]) -> _Columns | None:
        """Returns plain examples, or None if one is not, or perhaps cannot be used."""
        if set(map(type, batch)) != {Example}:
            return None
        names, labels, images, splits, values = zip(*batch, strict=True)
        kinds = set(map(type, images))
        if any(values) or not kinds <= _PLAIN or set(map(type, names)) != {str} or not all(names):
            return None
        if set(map(type, labels)) != {int} or not 0 <= min(labels) <= max(labels) < self._classes:
            return None
        if not _SPLITS.issuperset(splits):
            return None
        self.existing.update(splits)
        try:
            keys = list(map(str.encode, names))
        except UnicodeEncodeError:  # undecodable bytes of a file name
            return None
        if kinds == {Span}:
            files, offsets, lengths = zip(*images, strict=True)
            if len(set(files)) == 1 and min(lengths) >= 0:
                place = self._images.locate(images[0], names[0])[0]
                return _Columns(keys, labels, splits, place, offsets, lengths, (), 0, (), ())
        where: tuple[Any, ...] = tuple(zip(*map(self._images.locate, images, names), strict=True))
        return _Columns(*(keys, labels, splits, *where, (), ()))

    def _one(self, found: Any) -> tuple[Any, ...]:
        name, label, image, split, values = _checked(found, self._classes)
        self.existing.add(split)
        try:
            key = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise SourceError(f"key {name!r} of an example is no text that UTF-8 can hold") from None
        where = self._images.locate(image, name)
        extra = self._entries.of(values, name) if self._features or values else b""
        identity = self._images.content(where, key) + extra if self._by_content else b""
        return (key, label, split, *where, extra, identity)

    def _transposed(self, found: Sequence[tuple[Any, ...]]) -> _Columns:
        columns = _Columns(*zip(*found, strict=True))
        return columns if self._by_content else columns._replace(identities=())


class _Taken:
    """Rows of all examples so far, and what is counted."""

    def __init__(
        self,
        settings: PreprocessSettings,
        buckets: rows.Buckets,
        images: ImageLocator,
        keys: BinaryIO | None,
        classes: int,
        *,
        named: bool,
    ) -> None:
        self.buckets = buckets
        self.seen = np.zeros(classes, bool)
        self.count = 0
        self._digested = Digested(settings, named=named)
        self.counts, self.sizes = np.zeros((2, self._digested.codes), np.int64)
        self._settings = settings
        self._images = images
        self._keys = keys

    def take(self, columns: _Columns) -> None:
        """Takes examples."""
        heads = np.zeros(len(columns.keys), HEAD)
        for name in ("label", "place", "offset", "length", "checksum"):
            heads[name] = getattr(columns, f"{name}s")
        self._digested.fill(heads, columns.identities or columns.keys, columns.splits)
        if self._keys:  # equal keys are not found by the digests
            self._keys.write(digests(columns.keys, 0)[1].tobytes())
        texts = columns.keys
        heads["keys"] = list(map(len, columns.keys))
        for name, values in (("paths", columns.paths), ("features", columns.extras)):
            if any(values):
                heads[name] = list(map(len, values))
                texts = list(map(operator.add, texts, values))
        self.seen[heads["label"]] = True
        self.count += len(heads)
        self.counts += np.bincount(heads["code"], minlength=len(self.counts))
        if not self._settings.shards:
            sizes = self._sizes(columns, heads)
            self.sizes += np.bincount(heads["code"], sizes, len(self.sizes)).astype(np.int64)
        self.buckets.append(Rows(heads, texts))

    def _sizes(self, columns: _Columns, heads: rows.Numbers) -> Sequence[int]:
        if heads["length"].min() >= 0:
            return columns.lengths
        paths = (path or key for path, key in zip(columns.paths, columns.keys, strict=True))
        return list(map(self._images.size, columns.lengths, paths, heads["place"].tolist()))


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


def _check_content(count: int, bad: int, seen: rows.Numbers, class_names: Sequence[str]) -> None:
    """Refuses a source without examples, or with examples of one class alone."""
    if not count + bad:
        raise SourceError("the source is empty: it has no example")
    if seen.sum() == 1:
        raise SourceError(
            f"all {count:,} examples are of one class, {class_names[int(seen.argmax())]!r}; bring a second"
        )
