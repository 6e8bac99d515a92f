"""Plan: the shards of a dataset and the records of each, in a file that every process and part reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from struct import iter_unpack

import numpy as np
import xxhash

from shardline.components.preprocess.images import Codec
from shardline.components.preprocess.plan import records
from shardline.components.preprocess.plan.image_locations import ImageLocation
from shardline.components.preprocess.plan.records import (
    Numbers,
    Records,
    SplitCodes,
    StratifiedSplit,
    digests,
    find_repeated,
    hash_blocks,
)
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.base import deserialize, files
from shardline.trainer.base.errors import RunError, SourceError
from shardline.trainer.manifest import KEY_BYTES, SPLITS, Anomaly, Feature, Label

#: Part of every shard's identity: raised when the same plan is written as other bytes.
_WRITER_VERSION = 2

# Up to so many parts are always useful; each further one needs so many records.
_FEW_PARTS, _RECORDS_PER_PART = 8, 10_000


def shard_count(records: int, training_records: int, *, readers: int, shards: int) -> int:
    """Returns the number of shards of a split with `records` examples, at least one of them.

    It is a multiple of `readers` in proportion to the training split's `shards`, but never more than `shards`
    (rounded up) or the records allow: with fewer records than readers, one record each.
    """
    if records < readers:
        return records
    proportional = shards * min(1.0, records / training_records) if training_records else shards
    wanted = max(1, round(proportional))
    return min(-(-wanted // readers), records // readers) * readers


def split_among_shards(items: Numbers, first: int, count: int) -> list[Numbers]:
    """Assigns consecutive examples of a split, from number `first` on, to its shards: p goes to p % count."""
    return [items[(shard - first) % count :: count] for shard in range(count)]


def shard_name(split: str, index: int, count: int) -> str:
    """Returns the file name of a shard: "train-00003-of-00016.tfrecord"."""
    return f"{split}-{index:05d}-of-{count:05d}.tfrecord"


@dataclass(frozen=True)
class PlannedShard:
    """One shard before it is written: its file, its split, number of examples, and a hash of its records."""

    file: str
    split: str
    records: int
    digest: str


@dataclass(frozen=True)
class Plan:
    """Everything that a writer needs apart from the records.

    Attributes:
        features: Features of every example other than image, labels and key.
        surveyed: Start of the survey, in nanoseconds since the epoch.
        records_in: Number of examples of the source.
        rejected: Number of examples left out, by reason.
        schema: Digest of the schema that the source was checked against; "" for none.
    """

    settings: PreprocessSettings
    labels: tuple[Label, ...]
    features: tuple[Feature, ...]
    places: tuple[ImageLocation, ...]
    surveyed: int
    records_in: int
    rejected: Mapping[str, int] = field(default_factory=dict)
    shards: tuple[PlannedShard, ...] = ()
    schema: str = ""
    anomalies: tuple[Anomaly, ...] = ()

    @property
    def records(self) -> int:
        """Number of examples that are written."""
        return sum(shard.records for shard in self.shards)

    def useful_parts(self, most: int) -> int:
        """Returns the number of parts, at most `most`, that each justify the start of a machine."""
        return max(1, min(most, len(self.shards), max(_FEW_PARTS, self.records // _RECORDS_PER_PART)))

    def make_codec(self, *, checked: bool = False) -> Codec:
        """Returns the codec of the dataset's images; `checked` ones are not checked again."""
        return Codec(**(self.settings.codec | ({"check": "header"} if checked else {})))

    def identity(self, shard: PlannedShard) -> str:
        """Returns a hash of everything that determines a shard's bytes except the content of its images."""
        content = [
            _WRITER_VERSION,
            shard.file,
            shard.digest,
            self.settings.codec,
            [asdict(label) for label in self.labels],
            # Every survey rewrites the spool; its records carry checksums.
            self._locations_hash,
        ]
        return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())

    @cached_property
    def _locations_hash(self) -> str:
        locations = [asdict(location) for location in self.places]
        return xxhash.xxh3_128_hexdigest(json.dumps(locations).encode())

    def save(self, path: Path) -> None:
        """Writes the plan, whole or not at all."""
        # JSON escapes keep bytes of paths that are not UTF-8.
        files.write_bytes(path, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Reads a plan; RunError if there is none that can be read."""
        remedy = "plan the dataset first, or again if it is complete"
        if not path.exists():
            raise RunError(f"no plan in {path.parent}: {remedy}")
        plan = deserialize.load(cls, path, RunError, remedy)
        if any(shard.file != Path(shard.file).name or shard.records < 1 for shard in plan.shards):
            raise RunError(f"{path} is damaged: a shard is outside the directory or empty; {remedy}")
        return plan


@dataclass(frozen=True)
class Survey:
    """Content of a source.

    Attributes:
        plan: The plan without shards.
        buckets: A record for every usable example.
        codes: Number of records by split code.
        existing: All splits that the source assigns; None for examples without one.
        numbers_copies: Whether examples may have the same key, to which a number is then appended.
    """

    plan: Plan
    buckets: records.Buckets
    codes: Sequence[int]
    existing: frozenset[str | None]
    numbers_copies: bool

    def points(self, block: Records) -> Numbers:
        """Returns the points of examples, from their keys, or with the key "content" from their content."""
        keys: Iterable[bytes] = block.keys()
        if self.plan.settings.key == "content":
            keys = (key for (key,) in iter_unpack(f"{KEY_BYTES}s", records.key_hash_bytes(block.heads)))
        return digests(keys, self.plan.settings.split_salt)[1]


def assign_shards(found: Survey, work: WorkDirectory) -> tuple[PlannedShard, ...]:
    """Writes the records of all shards into the work directory and returns the planned shards."""
    settings, by_content = found.plan.settings, found.plan.settings.key == "content"
    split_of: Sequence[str] = SplitCodes(settings.split).splits(found.existing)
    stratified = None
    if settings.stratify:
        stratified, split_of = _stratified_split(found), SPLITS
        found = replace(found, codes=stratified.counts.tolist())
    counts = _shard_counts(found, split_of)
    names = {
        split: [shard_name(split, index, count) for index in range(count)] for split, count in counts.items()
    }
    hashers = {name: xxhash.xxh3_128() for shards in names.values() for name in shards}
    written = dict.fromkeys(hashers, 0)
    assigned = dict.fromkeys(counts, 0)
    if by_content and not found.numbers_copies:
        _refuse_equal_keys(found, work)
    codes = {split: np.array([each == split for each in split_of]) for split in counts}
    for block in _blocks(found):
        if not (by_content or found.numbers_copies):  # records of one key follow each other
            heads = block.heads[["order", "order_low"]]
            for number in np.flatnonzero(heads[1:] == heads[:-1]).tolist():
                raise _duplicate_key(block.keys()[number])
        if stratified:
            block.heads["code"] = stratified.codes(found.points(block))
        for split, count in counts.items():
            members = np.flatnonzero(codes[split][block.heads["code"]])
            for name, part in zip(
                names[split], split_among_shards(members, assigned[split], count), strict=True
            ):
                if len(part):
                    hashers[name].update(records.append(work.records_path(name), block.take(part)))
                    written[name] += len(part)
            assigned[split] += len(members)
    return tuple(
        PlannedShard(name, split, written[name], hashers[name].hexdigest())
        for split in counts
        for name in names[split]
    )


def _shard_counts(found: Survey, split_of: Sequence[str]) -> dict[str, int]:
    settings, examples = found.plan.settings, dict.fromkeys(SPLITS, 0)
    for split, count in zip(split_of, found.codes, strict=True):
        examples[split] += count
    if empty := [split for split in SPLITS if split in settings.split and not examples[split]]:
        counts = ", ".join(f"{split} {count:,}" for split, count in examples.items())
        raise SourceError(
            f"no example for {' and '.join(empty)} ({counts}); add examples (about 50), choose another "
            "split_salt or other shares, or a smaller gap for a split by time"
        )
    return {
        split: shard_count(count, examples["train"], readers=settings.readers, shards=settings.shards)
        for split, count in examples.items()
        if count
    }


def _blocks(found: Survey) -> Iterator[Records]:
    """Yields all records in order; the second, third, ... of a key KEY have the keys KEY#2, KEY#3, ..."""
    for block in found.buckets:
        order = block.heads["order"]
        equal = np.flatnonzero(order[1:] == order[:-1]) if found.numbers_copies else np.empty(0, np.int64)
        seen, keys = Counter[bytes](), list(block.keys()) if len(equal) else []
        for number in np.union1d(equal, equal + 1).tolist():
            seen[key := keys[number]] += 1
            keys[number] = b"%s#%d" % (key, seen[key]) if seen[key] > 1 else key
        yield block.renamed(keys) if keys else block


def _stratified_split(found: Survey) -> StratifiedSplit:
    points, labels = [], []
    for block in _blocks(found):
        points.append(found.points(block))
        labels.append(block.heads["label"].copy())
    return StratifiedSplit(np.concatenate(points), np.concatenate(labels), found.plan.settings.split)


def _refuse_equal_keys(found: Survey, work: WorkDirectory) -> None:
    groups = find_repeated(hash_blocks(work.keys), sum(found.codes), work.path)
    equal = {value for hashes, _ in groups for value in hashes.tolist()}
    if not equal:
        return
    seen = set[bytes]()
    for block in found.buckets:
        keys = block.keys()
        for number, value in enumerate(digests(keys, 0)[1].tolist()):
            if value in equal and keys[number] in seen:
                raise _duplicate_key(keys[number])
            if value in equal:
                seen.add(keys[number])


def _duplicate_key(key: bytes) -> SourceError:
    return SourceError(f"key {records.key_text(key)!r} occurs twice; the key of an example must be unique")


def load_part(work: WorkDirectory, part: int = 0, parts: int = 1) -> tuple[Plan, Sequence[PlannedShard]]:
    """Returns the plan and the shards of one part, or of all; their records are then on this machine."""
    work.fetch_plan()
    plan = Plan.load(work.plan)
    shards = plan.shards[part::parts]
    work.fetch_records(shard.file for shard in shards)
    return plan, shards
