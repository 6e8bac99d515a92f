"""Plan: the shards of a dataset and the rows of each, in order, and the file that says so.

The file is read by every process and part that writes shards.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from shardline.components.preprocess import rows, storage
from shardline.components.preprocess.ahead import in_order, persistently
from shardline.components.preprocess.digests import (
    Digested,
    SplitCodes,
    Strata,
    blocks,
    digests,
    points_of,
    repeated,
)
from shardline.components.preprocess.images.codec import Codec
from shardline.components.preprocess.places import Place
from shardline.components.preprocess.rows import Numbers, Rows
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.survey import Survey
from shardline.components.preprocess.work_directory import TOGETHER, WorkDirectory, read_small
from shardline.trainer import files, records
from shardline.trainer.data.features import Anomaly, Feature, Label
from shardline.trainer.data.manifest import SPLITS
from shardline.trainer.errors import RunError, SourceError

#: Part of every shard's identity: raised when the same plan is written as other bytes.
_WRITER_VERSION = 2

# So many parts there are whatever there is to do, and more only for so many records each.
_FEW_PARTS, _RECORDS_PER_PART = 8, 10_000

# In a bucket: the hash of the plan, written last, when parts can begin.
_PLANNED, _ROWS = "planned", "rows"


def shard_count(records: int, training_records: int, *, readers: int, shards: int) -> int:
    """Returns the number of shards of a split with `records` examples, at least one of them.

    It is a multiple of `readers` (rounded up) in proportion to the training split's `shards`, but never
    more than `shards` (rounded up) or the records allow: with fewer records than readers, one record each.
    """
    if records < readers:
        return records
    proportional = shards * min(1.0, records / training_records) if training_records else shards
    wanted = max(1, round(proportional))
    return min(-(-wanted // readers), records // readers) * readers


def shards_for_size(training_bytes: int, shard_size: int) -> int:
    """Returns how many shards of about `shard_size` MiB hold so many bytes."""
    return max(1, round(training_bytes / (shard_size * 2**20)))


def deal(items: Numbers, first: int, count: int) -> list[Numbers]:
    """Deals consecutive examples of a split to its shards: number p goes to shard p % count.

    Over all calls shards therefore differ by at most one example, the longer ones come first, and number
    p is at position p // count of its shard. `first` is the number of the first item.
    """
    return [items[(shard - first) % count :: count] for shard in range(count)]


def shard_name(split: str, index: int, count: int) -> str:
    """Returns the file name of a shard: "train-00003-of-00016.tfrecord"."""
    return f"{split}-{index:05d}-of-{count:05d}.tfrecord"


def refuse_empty_splits(records: Mapping[str, int], shares: Mapping[str, float]) -> None:
    """Refuses a dataset in which a split that was asked for has no example."""
    empty = [split for split in SPLITS if split in shares and not records[split]]
    if empty:
        counts = ", ".join(f"{split} {count:,}" for split, count in records.items())
        raise SourceError(
            f"no example for {' and '.join(empty)} ({counts}); give it more examples (about 50), another "
            "split_salt or other shares, and to a split by time a smaller gap"
        )


@dataclass(frozen=True)
class PlannedShard:
    """One shard before it is written: its file, its split, number of examples, and a hash of its rows."""

    file: str
    split: str
    records: int
    rows: str


@dataclass(frozen=True)
class Plan:
    """Everything that a writer needs beside the rows.

    Attributes:
        labels: What is to be predicted of every example.
        features: Further features of every example, beside image, labels and key.
        surveyed: Start of the survey, in nanoseconds since the epoch.
        records_in: Number of examples of the source.
        rejected: Number of examples left out, by reason.
        schema: Digest of the schema that the source was checked against; "" for none.
        anomalies: What does not fit it.
    """

    settings: PreprocessSettings
    labels: tuple[Label, ...]
    features: tuple[Feature, ...]
    places: tuple[Place, ...]
    surveyed: int
    records_in: int
    rejected: Mapping[str, int]
    shards: tuple[PlannedShard, ...]
    schema: str = ""
    anomalies: tuple[Anomaly, ...] = ()

    @property
    def records(self) -> int:
        """Number of examples that are written."""
        return sum(shard.records for shard in self.shards)

    def useful_parts(self, most: int) -> int:
        """Returns of how many parts, at most so many, each has enough to do for the start of a machine."""
        return max(1, min(most, len(self.shards), max(_FEW_PARTS, self.records // _RECORDS_PER_PART)))

    def make_codec(self, *, checked: bool = False) -> Codec:
        """Returns the codec of the dataset's images; it does not check again those that were `checked`."""
        return Codec(**(self.settings.codec | ({"check": "header"} if checked else {})))

    def identity(self, shard: PlannedShard) -> str:
        """Returns a hash of all that shapes the bytes of a shard, but for the content of the images."""
        content = [
            _WRITER_VERSION,
            shard.file,
            shard.rows,
            self.settings.codec,
            self.settings.compression,
            [asdict(label) for label in self.labels],
            self._places_hash,
        ]
        return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())

    @cached_property
    def _places_hash(self) -> str:
        # The spool is made anew by every survey; its rows carry checksums.
        places = [asdict(place) for place in self.places]
        return xxhash.xxh3_128_hexdigest(json.dumps(places).encode())

    def save(self, path: Path) -> None:
        """Writes the plan, whole or not at all."""
        # Paths may have bytes that are not UTF-8: as escapes they survive.
        files.write_bytes(path, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Reads a plan; RunError if there is none that can be read."""
        remedy = "plan the dataset first, or again if it is complete"
        if not path.exists():
            raise RunError(f"no plan in {path.parent}: {remedy}")
        plan = records.load(cls, path, RunError, remedy)
        if any(shard.file != Path(shard.file).name or shard.records < 1 for shard in plan.shards):
            raise RunError(f"{path} is damaged: a shard lies elsewhere or is empty; {remedy}")
        return plan


def deal_rows(found: Survey, work: WorkDirectory) -> tuple[PlannedShard, ...]:
    """Writes the rows of all shards into the work directory and returns what the shards will be."""
    settings = found.settings
    if found.numbers_copies:
        found = _number_copies(found, work)
    strata = None
    if settings.stratify:
        strata, found = _stratified(found)
    split_of = SplitCodes(settings.split).splits(found.existing)
    counts = _shard_counts(found, split_of)
    names = {
        split: [shard_name(split, index, count) for index in range(count)] for split, count in counts.items()
    }
    hashers = {name: xxhash.xxh3_128() for shards in names.values() for name in shards}
    records = dict.fromkeys(hashers, 0)
    dealt = dict.fromkeys(counts, 0)
    if settings.key == "content" and not found.numbers_copies:
        _refuse_equal_keys(found, work)
    codes = {split: np.array([each == split for each in split_of]) for split in counts}
    for block in found.buckets:
        if settings.key != "content":
            _refuse_equal_digests(block)
        if strata:
            block.heads["code"] = strata.codes(points_of(block, settings.key, settings.split_salt))
        for split, count in counts.items():
            members = np.flatnonzero(codes[split][block.heads["code"]])
            for name, part in zip(names[split], deal(members, dealt[split], count), strict=True):
                if len(part):
                    hashers[name].update(rows.append(work.rows(name), block.take(part)))
                    records[name] += len(part)
            dealt[split] += len(members)
    return tuple(
        PlannedShard(name, split, records[name], hashers[name].hexdigest())
        for split in counts
        for name in names[split]
    )


def _shard_counts(found: Survey, split_of: Sequence[str]) -> dict[str, int]:
    """Returns the number of shards of each split that has examples."""
    settings, records, sizes = found.settings, dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    for split, count, size in zip(split_of, found.codes, found.sizes, strict=True):
        records[split] += count
        sizes[split] += size
    refuse_empty_splits(records, settings.split)
    shards = settings.shards or shards_for_size(sizes["train"], settings.shard_size)
    return {
        split: shard_count(count, records["train"], readers=settings.readers, shards=shards)
        for split, count in records.items()
        if count
    }


def _stratified(found: Survey) -> tuple[Strata, Survey]:
    """Returns the splits of all examples, and how many, and about how many bytes, each of them gets."""
    settings, points, labels = found.settings, [], []
    for block in found.buckets:
        points.append(points_of(block, settings.key, settings.split_salt))
        labels.append(block.heads["label"].copy())
    strata = Strata(np.concatenate(points), np.concatenate(labels), settings.split)
    codes = np.zeros(len(found.codes), np.int64)
    codes[: len(SPLITS)] = strata.counts
    sizes = codes * sum(found.sizes) // max(codes.sum(), 1)
    return strata, replace(found, codes=codes.tolist(), sizes=sizes.tolist())


def _refuse_equal_digests(block: Rows) -> None:
    """Refuses keys that occur twice: their rows follow each other."""
    equal = np.ones(max(block.count - 1, 0), bool)
    for half in ("order", "order_low"):
        equal &= block.heads[half][1:] == block.heads[half][:-1]
    if equal.any():
        raise _occurs_twice(block.keys()[int(equal.argmax())])


def _refuse_equal_keys(found: Survey, work: WorkDirectory) -> None:
    """Refuses keys that occur twice, where the digests are of something else."""
    groups = repeated(blocks(work.keys), sum(found.codes), work.scratch)
    equal = {value for hashes, _ in groups for value in hashes.tolist()}
    if not equal:
        return
    seen = set[bytes]()
    for block in found.buckets:
        keys = block.keys()
        for number, value in enumerate(digests(keys, 0)[1].tolist()):
            if value in equal and keys[number] in seen:
                raise _occurs_twice(keys[number])
            if value in equal:
                seen.add(keys[number])


def _number_copies(found: Survey, work: WorkDirectory) -> Survey:
    """Gives the second, third, ... example of a key KEY the keys KEY#2, KEY#3, ... in the source's order."""
    if next(repeated(blocks(work.keys), sum(found.codes), work.scratch), None) is None:
        return found
    buckets, codes, sizes = (
        rows.Buckets(work.buckets / "numbered"),
        *map(np.array, (found.codes, found.sizes)),
    )
    digested = Digested(found.settings)
    for block in found.buckets:
        copies = _copies(block)
        chosen = np.array(list(copies), np.int64)
        buckets.append(block.take(np.setdiff1d(np.arange(block.count), chosen)))
        if not copies:
            continue
        renamed = block.take(chosen).renamed(list(copies.values()))
        if found.settings.key != "content":
            codes_of_groups = renamed.heads["code"].copy()
            digested.fill(renamed.heads, renamed.keys(), [None] * renamed.count)
            if found.settings.group:
                renamed.heads["code"] = codes_of_groups
        for heads, sign in ((block.heads[chosen], -1), (renamed.heads, 1)):
            codes += sign * np.bincount(heads["code"], minlength=len(codes))
            sizes += sign * np.bincount(heads["code"], heads["length"], len(sizes)).astype(np.int64)
        buckets.append(renamed)
    return replace(found, buckets=buckets, codes=codes.tolist(), sizes=sizes.tolist())


def _copies(block: Rows) -> dict[int, bytes]:
    """Returns the keys of the rows whose key is that of an earlier one, by the number of the row."""
    order = block.heads["order"]
    equal = np.flatnonzero(order[1:] == order[:-1])
    seen, copies = Counter[bytes](), dict[int, bytes]()
    for number in np.union1d(equal, equal + 1).tolist():
        key = block.texts[number][: block.heads["keys"][number]]
        seen[key] += 1
        if seen[key] > 1:
            copies[number] = b"%s#%d" % (key, seen[key])
    return copies


def _occurs_twice(key: bytes) -> SourceError:
    return SourceError(f"key {rows.key_text(key)!r} occurs twice; the key of an example must be unique")


def share(plan: Plan, work: WorkDirectory) -> None:
    """Brings a plan that is written to a bucket, where parts on other machines find it."""
    if not work.is_far:
        return
    for name in (_PLANNED, work.plan.name):
        (work.path / name).unlink(missing_ok=True)
    persistently(lambda path: path.mkdir(exist_ok=True), work.path / _ROWS)

    def upload(name: str) -> int:
        storage.upload(work.scratch / name, work.path / name, before=work.check)
        return 1

    names = [f"{_ROWS}/{shard.file}" for shard in plan.shards]
    names += [path.name for path in (work.spool, work.rejected) if path.exists()]
    for uploaded in in_order(upload, names, size=int, in_flight=TOGETHER):
        if isinstance(uploaded, Exception):
            raise uploaded
    (work.scratch / _PLANNED).write_text(xxhash.xxh3_128_hexdigest(work.plan.read_bytes()))
    for name in (work.plan.name, _PLANNED):
        upload(name)


def load_part(work: WorkDirectory, part: int = 0, parts: int = 1) -> tuple[Plan, Sequence[PlannedShard]]:
    """Returns the plan and the shards of one of its parts, else all; their rows are on this machine then.

    Raises RunError where there is no plan.
    """
    planned = read_small(work.path / _PLANNED) if work.is_far else ""
    if planned:
        work.guard = work.guard or (_PLANNED, planned)
        there = [path.name for path in (work.plan, work.rejected) if (work.path / path.name).exists()]
        _fetch(work, there, work.scratch)
    plan = Plan.load(work.plan)
    shards = plan.shards[part::parts]
    if work.is_far:
        if any(place.kind == "spool" for place in plan.places):
            _fetch(work, [work.spool.name], work.scratch)
        _fetch(work, [f"{_ROWS}/{shard.file}" for shard in shards], work.scratch / _ROWS)
        found = xxhash.xxh3_128_hexdigest(work.plan.read_bytes())
        if {found, read_small(work.path / _PLANNED)} != {planned}:
            raise RunError(f"{work.out} is being planned anew; start its parts when that has ended")
    return plan, shards


def _fetch(work: WorkDirectory, names: Sequence[str], directory: Path) -> None:
    for error in work.fetch(names, directory):
        raise error
