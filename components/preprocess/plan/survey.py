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

from shardline.components.preprocess.plan import records
from shardline.components.preprocess.plan.digests import SplitCodes, digests
from shardline.components.preprocess.plan.image_locations import ImageLocation, ImageLocator
from shardline.components.preprocess.plan.records import HEAD, Records
from shardline.components.preprocess.plan.source_checks import (
    SPLIT_NAMES,
    Targets,
    check_features,
    check_group,
    check_labels,
    check_stratified,
    checked,
    group_of,
)
from shardline.components.preprocess.schema.anomalies import SchemaCheck
from shardline.components.preprocess.schema.labels import check_malformed_values
from shardline.components.preprocess.schema.schema import read as read_schema
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.example import BadExample, Example, Source, Span, prefetched
from shardline.components.preprocess.tfrecord.example import FeatureEntries
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.base import plugins
from shardline.trainer.base.errors import BadRecordError, SourceError
from shardline.trainer.base.progress import Meter
from shardline.trainer.data.features import Anomaly, Feature, Label, is_class

#: Examples that are looked at together, at most; progress is reported once for so many.
_TICK = 512

# Bytes of images that are held until they are hashed, about.
_HELD_BYTES = 4 << 20

# Kinds of images that are not in memory.
_PLAIN = frozenset({Span, NoneType, type(Path())})


class Rejected:
    """Bad examples, by policy: "fail", or "skip", and then named in a file and counted in `reasons`."""

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
        schema: Digest of the schema that the source was checked against; "" for none.
        buckets: A row for every usable example.
        codes: Number of rows by split code.
        sizes: Bytes of their images by split code, where the number of shards follows from it.
        existing: All splits that the source gives to any example; None where it gives none.
        bad: Number of examples that the source itself found unusable.
        numbers_copies: Whether examples may have the same key, and then get a number with it.
    """

    settings: PreprocessSettings
    schema: str
    labels: tuple[Label, ...]
    features: tuple[Feature, ...]
    places: Sequence[ImageLocation]
    buckets: records.Buckets
    codes: Sequence[int]
    sizes: Sequence[int]
    existing: frozenset[str | None]
    bad: int
    numbers_copies: bool
    anomalies: tuple[Anomaly, ...] = ()


def survey(settings: PreprocessSettings, work: WorkDirectory, rejected: Rejected) -> Survey:
    """Reads the source once; not images that are files, or in files, unless their content is the key.

    A source without examples or with fewer than two classes, and what is no example, is a SourceError.
    """
    schema = read_schema(settings.schema) if settings.schema else None
    source = open_source(settings, schema)
    with plugins.calling("the source failed", SourceError):
        labels, features = check_labels(source), check_features(source)
        length = operator.length_hint(source, 0)
    if settings.stratify:
        check_stratified(labels, ())
    by_content = settings.key == "content"
    brings = by_content or not settings.shards or settings.on_bad_record == "skip"
    numbers_copies = bool(getattr(source, "numbers_copies", False))
    check = None
    if schema:
        wholes = getattr(source, "wholes", ())
        check = SchemaCheck(schema, features, labels, settings.label_column, wholes)
    with (
        ImageLocator(work.spool, settings.max_pixels) as images,
        work.keys.open("wb") if by_content and not numbers_copies else contextlib.nullcontext() as keys,
    ):
        buckets = records.Buckets(work.buckets)
        named = by_content or getattr(source, "has_keys", True)  # a position may be another's tomorrow
        taken = _Taken(settings, labels, features, images, buckets, keys, rejected, check, named=named)
        meter = Meter("read", length)
        for columns in taken.columns(_examples(source, brings=brings)):
            taken.add(columns)
            meter.advance(len(columns.keys))
    check_malformed_values(getattr(source, "slips", ()), settings.group)
    taken.check()
    return Survey(
        settings=settings,
        schema=schema.digest if schema else "",
        labels=labels,
        features=features,
        places=images.places,
        buckets=buckets,
        codes=taken.counts.tolist(),
        sizes=taken.sizes.tolist(),
        existing=frozenset(taken.existing),
        bad=taken.bad,
        numbers_copies=numbers_copies,
        anomalies=check.anomalies() if check else (),
    )


class _SurveyColumns(NamedTuple):
    """What is known of some examples, value by value.

    Where images are is as in `Location`, of spans of one file one place and checksum for all of them. Paths,
    `extras` (further features), `identities` (what digests are of, if not the key) and `groups` may be empty.
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
    groups: Sequence[bytes]


class _Taken:
    """Rows of the examples of a source so far, and what is counted of them.

    Plain ones (spans or paths of images, no further features) are looked at by the hundred, others as soon as
    the source yields them: their images take room, and may be in memory that it uses again.

    Attributes:
        bad: Number of examples that cannot be used.
        existing: Splits that the source gives to any example, None among them where it gives none.
        counts, sizes: Number of examples, and bytes of their images, by split code.
    """

    def __init__(
        self,
        settings: PreprocessSettings,
        labels: Sequence[Label],
        features: Sequence[Feature],
        images: ImageLocator,
        buckets: records.Buckets,
        keys: BinaryIO | None,
        rejected: Rejected,
        check: SchemaCheck | None,
        *,
        named: bool,
    ) -> None:
        self._settings = settings
        self._labels = labels
        self._features = features
        self._images = images
        self._buckets = buckets
        self._keys = keys
        self._rejected = rejected
        self._check = check
        self._group = check_group(settings.group, features)
        self._entries = FeatureEntries(features, labels)
        # What labels are where they are not one class each, and are stored as features are.
        self._targets = None if is_class(labels) else Targets(labels)
        self._classes = len(labels[0].outputs) if is_class(labels) else None
        self._by_content = settings.key == "content"
        self._seen = np.zeros(max(len(label.outputs) for label in labels), bool)
        self._groups = set[bytes]()  # some of them, as long as there are fewer than two
        self._named = named
        self._codes = SplitCodes(settings.split)
        self._looked: list[tuple[Any, ...]] = []  # what the schema is to be compared with
        self.counts, self.sizes = np.zeros((2, self._codes.count), np.int64)
        self.bad = 0
        self.existing = set[str | None]()

    def columns(self, examples: Iterator[Example | BadExample]) -> Iterator[_SurveyColumns]:
        """Yields the examples that can be used."""
        found: list[tuple[Any, ...]] = []
        together, held = 1, 0
        while batch := list(islice(examples, together)):
            plain = None if self._features or self._by_content or self._targets else self._plain(batch)
            if plain:
                together = _TICK
                yield plain
                continue
            kinds = {type(getattr(example, "image", None)) for example in batch}
            together = 1 if self._by_content or not kinds <= _PLAIN else _TICK
            for example in batch:
                try:
                    found.append(self._one(example))
                    held += len(found[-1][-2])
                except BadRecordError as error:
                    self._rejected.add(error)
                    self.bad += 1
            if len(found) >= _TICK or held > _HELD_BYTES:
                yield self._transposed(found)
                found, held = [], 0
        if found:
            yield self._transposed(found)

    def _plain(self, batch: Sequence[Example | BadExample]) -> _SurveyColumns | None:
        """Returns plain examples, or None if one is not, or perhaps cannot be used."""
        if set(map(type, batch)) != {Example}:
            return None
        names, labels, images, splits, values = zip(*batch, strict=True)
        kinds = set(map(type, images))
        if any(values) or not kinds <= _PLAIN or set(map(type, names)) != {str} or not all(names):
            return None
        if set(map(type, labels)) != {int} or not 0 <= min(labels) <= max(labels) < (self._classes or 0):
            return None
        if not SPLIT_NAMES.issuperset(splits):
            return None
        self.existing.update(splits)
        try:
            keys = list(map(str.encode, names))
        except UnicodeEncodeError:  # undecodable bytes of a file name
            return None
        if self._check:
            self._check.take(names, labels)
        if kinds == {Span}:
            files, offsets, lengths = zip(*images, strict=True)
            if len(set(files)) == 1 and min(lengths) >= 0:
                place = self._images.locate(images[0], names[0])[0]
                return _SurveyColumns(keys, labels, splits, place, offsets, lengths, (), 0, (), (), ())
        where: tuple[Any, ...] = tuple(zip(*map(self._images.locate, images, names), strict=True))
        return _SurveyColumns(*(keys, labels, splits, *where, (), (), ()))

    def _one(self, found: Any) -> tuple[Any, ...]:
        name, given, image, split, values = checked(found, self._classes)
        label, targets = self._targets.of(given, name) if self._targets else (given, b"")
        self.existing.add(split)
        try:
            key = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise SourceError(f"key {name!r} of an example is no text that UTF-8 can hold") from None
        where = self._images.locate(image, name)
        extra = targets + (self._entries.of(values, name) if self._features or values else b"")
        identity = self._images.content(where, key) + extra if self._by_content else b""
        group = group_of(values, self._group, name) if self._group else b""
        if self._check:
            self._looked.append((name, given, values))
        return (key, label, split, *where, extra, identity, group)

    def _transposed(self, found: Sequence[tuple[Any, ...]]) -> _SurveyColumns:
        if self._check:
            self._check.take(*zip(*self._looked, strict=True))
            self._looked = []
        columns = _SurveyColumns(*zip(*found, strict=True))
        columns = columns if self._by_content else columns._replace(identities=())
        return columns if self._group else columns._replace(groups=())

    def add(self, columns: _SurveyColumns) -> None:
        """Takes examples as rows."""
        heads = np.zeros(len(columns.keys), HEAD)
        for name in ("label", "place", "offset", "length", "checksum"):
            heads[name] = getattr(columns, f"{name}s")
        identities, seed, salt = (
            columns.identities or columns.keys,
            self._settings.seed,
            self._settings.split_salt,
        )
        found = {number: digests(identities, number) for number in {0, seed, salt}}
        heads["order"], heads["order_low"] = found[seed]
        points = digests(columns.groups, salt)[1] if columns.groups else found[salt][1]
        heads["code"] = self._codes.codes(points, columns.splits)
        heads["known"] = found[0][1] if self._named else 0
        self._groups.update(columns.groups if len(self._groups) < 2 else ())
        if self._keys:  # equal keys are not found by the digests
            self._keys.write(digests(columns.keys, 0)[1].tobytes())
        texts = columns.keys
        heads["keys"] = list(map(len, columns.keys))
        for name, values in (("paths", columns.paths), ("features", columns.extras)):
            if any(values):
                heads[name] = list(map(len, values))
                texts = list(map(operator.add, texts, values))
        self._seen[heads["label"]] = True
        self.counts += np.bincount(heads["code"], minlength=len(self.counts))
        if not self._settings.shards:
            sizes = columns.lengths
            if heads["length"].min() < 0:
                paths = (path or key for path, key in zip(columns.paths, columns.keys, strict=True))
                sizes = list(map(self._images.size, columns.lengths, paths, heads["place"].tolist()))
            self.sizes += np.bincount(heads["code"], sizes, len(self.sizes)).astype(np.int64)
        self._buckets.append(Records(heads, texts))

    def check(self) -> None:
        """Refuses examples of which, all together, no dataset can be made."""
        count = int(self.counts.sum())
        if not count + self.bad:
            raise SourceError("the source is empty: it has no example")
        if len(self._groups) == 1:
            raise SourceError(
                f"all {count:,} examples are of one group of {self._group!r}: no split can be made of it"
            )
        if self._targets:
            self._targets.check(count)
        elif self._seen.sum() == 1:
            name = self._labels[0].outputs[int(self._seen.argmax())]
            raise SourceError(f"all {count:,} examples are of one class, {name!r}; bring a second")
        if self._settings.stratify:
            check_stratified(self._labels, self.existing)


def _examples(source: Source, *, brings: bool) -> Iterator[Example | BadExample]:
    """Yields the examples; what a user's own source raises becomes one line with its place.

    `brings`: whether images that are far are brought here, since they will be looked at more than once.
    """
    with plugins.calling("the source failed", SourceError):
        yield from prefetched(source) if brings else source
