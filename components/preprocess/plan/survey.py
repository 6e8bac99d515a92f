"""Survey: the only pass over a source, which records each example and the location of its image.

Examples that cannot be used end the run or, with on_bad_record="skip", are left out and named in a file.
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
    Targets,
    check_example,
    check_features,
    check_group,
    check_labels,
    check_stratified,
    example_group,
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

#: Examples that are checked together, at most; progress is reported once for so many.
_TICK = 512

# Bytes of images that are held until they are hashed, about.
_HELD_BYTES = 4 << 20

# Types of images that are not in memory.
_FILE_IMAGES = frozenset({Span, NoneType, type(Path())})


class Rejected:
    """Bad examples: with the policy "fail" an error; with "skip" named in a file and counted in `reasons`."""

    def __init__(self, policy: str, path: Path) -> None:
        self._policy = policy
        self._path = path
        self.reasons: Counter[str] = Counter()

    def add(self, error: BadRecordError) -> None:
        """Leaves an example out; under the policy "fail", raises its error."""
        if self._policy == "fail":
            skip = (
                "correct it, or leave such examples out: --on-bad-record skip (on_bad_record in a pipeline)"
            )
            raise BadRecordError(error.name, f"{error.reason}; {skip}")
        self.reasons[error.reason] += 1
        with self._path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(json.dumps({"file": error.name, "reason": error.reason}) + "\n")

    def sort(self) -> None:
        """Sorts the names: the order of a stream of rows differs from run to run."""
        if self.reasons:
            lines = self._path.read_bytes().splitlines(keepends=True)
            self._path.write_bytes(b"".join(sorted(lines)))

    def check(self, records_in: int, largest_fraction: float) -> None:
        """Raises SourceError if too many were left out, with the most frequent reason and an example."""
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
        buckets: A record for every usable example.
        codes: Number of records by split code.
        existing: All splits that the source assigns; None for examples without one.
        bad: Number of examples that the source itself found unusable.
        numbers_copies: Whether examples may have the same key, to which a number is then appended.
    """

    settings: PreprocessSettings
    schema: str
    labels: tuple[Label, ...]
    features: tuple[Feature, ...]
    locations: Sequence[ImageLocation]
    buckets: records.Buckets
    codes: Sequence[int]
    existing: frozenset[str | None]
    bad: int
    numbers_copies: bool
    anomalies: tuple[Anomaly, ...] = ()


def survey(settings: PreprocessSettings, work: WorkDirectory, rejected: Rejected) -> Survey:
    """Reads the source once; images that are files, or in files, only position their content is the key.

    Raises SourceError for a source without examples or with fewer than two classes, and for invalid examples.
    """
    schema = read_schema(settings.schema) if settings.schema else None
    source = open_source(settings, schema)
    with plugins.calling("the source failed", SourceError):
        labels, features = check_labels(source), check_features(source)
        length = operator.length_hint(source, 0)
    if settings.stratify:
        check_stratified(labels, ())
    by_content = settings.key == "content"
    prefetch = by_content or settings.on_bad_record == "skip"
    numbers_copies = bool(getattr(source, "numbers_copies", False))
    check = None
    if schema:
        integer_texts = getattr(source, "integer_texts", ())
        check = SchemaCheck(schema, features, labels, settings.label_column, integer_texts)
    with (
        ImageLocator(work.spool, settings.max_pixels) as images,
        work.keys.open("wb") if by_content and not numbers_copies else contextlib.nullcontext() as keys,
    ):
        buckets = records.Buckets(work.buckets)
        has_keys = by_content or getattr(source, "has_keys", True)  # a position may be another's tomorrow
        builder = _RecordBuilder(
            settings, labels, features, images, buckets, keys, rejected, check, has_keys=has_keys
        )
        meter = Meter("read", length)
        for columns in builder.columns(_examples(source, prefetch=prefetch)):
            builder.add(columns)
            meter.advance(len(columns.keys))
    check_malformed_values(getattr(source, "malformed", ()), settings.group)
    builder.check()
    return Survey(
        settings=settings,
        schema=schema.digest if schema else "",
        labels=labels,
        features=features,
        locations=images.locations,
        buckets=buckets,
        codes=builder.counts.tolist(),
        existing=frozenset(builder.existing),
        bad=builder.bad,
        numbers_copies=numbers_copies,
        anomalies=check.anomalies() if check else (),
    )


class _SurveyColumns(NamedTuple):
    """Facts about some examples, as columns.

    Positions of images are as in `ImagePosition`. `extras` are other features, `identities` what is hashed if
    that is not the key; the latter and `groups` may be empty.
    """

    keys: Sequence[bytes]
    labels: Sequence[int]
    splits: Sequence[str | None]
    locations: Sequence[int]
    offsets: Sequence[int]
    lengths: Sequence[int]
    paths: Sequence[bytes]
    checksums: Sequence[int]
    extras: Sequence[bytes]
    identities: Sequence[bytes]
    groups: Sequence[bytes]


class _RecordBuilder:
    """Builds records of the examples of a source, and counts them.

    Images in memory are copied as soon as the source yields them, since it may reuse that memory; others are
    read by the hundred.

    Attributes:
        bad: Number of examples that cannot be used.
        existing: Splits that the source assigns, None among them for examples without one.
        counts: Number of examples by split code.
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
        has_keys: bool,
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
        # Labels other than one class, which are stored as features are.
        self._targets = None if is_class(labels) else Targets(labels)
        self._classes = len(labels[0].outputs) if is_class(labels) else None
        self._by_content = settings.key == "content"
        self._seen = np.zeros(max(len(label.outputs) for label in labels), bool)
        self._groups = set[bytes]()  # up to two of them, or a few more
        self._has_keys = has_keys
        self._codes = SplitCodes(settings.split)
        self._unchecked: list[tuple[Any, ...]] = []  # waiting for the check of the schema
        self.counts = np.zeros(self._codes.count, np.int64)
        self.bad = 0
        self.existing = set[str | None]()

    def columns(self, examples: Iterator[Example | BadExample]) -> Iterator[_SurveyColumns]:
        """Yields the examples that can be used."""
        found: list[tuple[Any, ...]] = []
        together, held = 1, 0
        while batch := list(islice(examples, together)):
            kinds = {type(getattr(example, "image", None)) for example in batch}
            together = 1 if self._by_content or not kinds <= _FILE_IMAGES else _TICK
            for example in batch:
                try:
                    found.append(self._row(example))
                    held += len(found[-1][-2])
                except BadRecordError as error:
                    self._rejected.add(error)
                    self.bad += 1
            if len(found) >= _TICK or held > _HELD_BYTES:
                yield self._transposed(found)
                found, held = [], 0
        if found:
            yield self._transposed(found)

    def _row(self, example: Any) -> tuple[Any, ...]:
        name, target, image, split, values = check_example(example, self._classes)
        label, targets = self._targets.serialize(target, name) if self._targets else (target, b"")
        self.existing.add(split)
        try:
            key = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise SourceError(f"key {name!r} of an example cannot be encoded as UTF-8") from None
        position = self._images.locate(image, name)
        extra = targets + (self._entries.serialize(values, name) if self._features or values else b"")
        identity = self._images.content(position, key) + extra if self._by_content else b""
        group = example_group(values, self._group, name) if self._group else b""
        if self._check:
            self._unchecked.append((name, target, values))
        return (key, label, split, *position, extra, identity, group)

    def _transposed(self, found: Sequence[tuple[Any, ...]]) -> _SurveyColumns:
        if self._check:
            self._check.add(*zip(*self._unchecked, strict=True))
            self._unchecked = []
        columns = _SurveyColumns(*zip(*found, strict=True))
        columns = columns if self._by_content else columns._replace(identities=())
        return columns if self._group else columns._replace(groups=())

    def add(self, columns: _SurveyColumns) -> None:
        """Adds the records of some examples."""
        heads = np.zeros(len(columns.keys), HEAD)
        for name in ("label", "location", "offset", "length", "checksum"):
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
        heads["key_hash"] = found[0][1] if self._has_keys else 0
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
        self._buckets.append(Records(heads, texts))

    def check(self) -> None:
        """Refuses examples that together make no dataset."""
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
            raise SourceError(f"all {count:,} examples are of one class, {name!r}; add examples of another")
        if self._settings.stratify:
            check_stratified(self._labels, self.existing)


def _examples(source: Source, *, prefetch: bool) -> Iterator[Example | BadExample]:
    """Yields the examples; an exception of a user's own source becomes one line with its location.

    `prefetch`: whether remote images are read here, since they will be needed more than once.
    """
    with plugins.calling("the source failed", SourceError):
        yield from prefetched(source) if prefetch else source
