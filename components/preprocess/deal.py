"""Dealing of a survey's examples: the rows of every shard, in order, in a file of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xxhash

from shardline.components.preprocess import plan, rows
from shardline.components.preprocess.duplicates import repeated
from shardline.components.preprocess.marks import blocks
from shardline.components.preprocess.plan import PlannedShard
from shardline.components.preprocess.rows import Rows
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.strata import Strata, points_of
from shardline.components.preprocess.survey import Survey
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.data.manifest import SPLITS
from shardline.trainer.errors import SourceError


def deal_rows(found: Survey, settings: PreprocessSettings, work: WorkDirectory) -> tuple[PlannedShard, ...]:
    """Writes the rows of all shards into the work directory and returns what the shards will be."""
    if found.numbers_copies:
        found = _number_copies(found, settings, work)
    strata = None
    if settings.stratify:
        strata, found = _stratified(found, settings)
    split_of = plan.SplitCodes(settings.split).splits(found.existing)
    counts = _shard_counts(found, settings, split_of)
    names = {
        split: [plan.shard_name(split, index, count) for index in range(count)]
        for split, count in counts.items()
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
            for name, part in zip(names[split], plan.deal(members, dealt[split], count), strict=True):
                if len(part):
                    hashers[name].update(rows.append(work.rows(name), block.take(part)))
                    records[name] += len(part)
            dealt[split] += len(members)
    return tuple(
        PlannedShard(name, split, records[name], hashers[name].hexdigest())
        for split in counts
        for name in names[split]
    )


def _shard_counts(found: Survey, settings: PreprocessSettings, split_of: Sequence[str]) -> dict[str, int]:
    """Returns the number of shards of each split that has examples."""
    records, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    for split, count, size in zip(split_of, found.codes, found.sizes, strict=True):
        records[split] += count
        sizes[split] += size
    plan.refuse_empty_splits(records, settings.split)
    shards = settings.shards or plan.shards_for_size(sizes["train"], settings.shard_size)
    return {
        split: plan.shard_count(count, records["train"], readers=settings.readers, shards=shards)
        for split, count in records.items()
        if count
    }


def _stratified(found: Survey, settings: PreprocessSettings) -> tuple[Strata, Survey]:
    """Returns the splits of all examples, and how many, and about how many bytes, each of them gets."""
    points, labels = [], []
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
        for number, value in enumerate(plan.digests(keys, 0)[1].tolist()):
            if value in equal and keys[number] in seen:
                raise _occurs_twice(keys[number])
            if value in equal:
                seen.add(keys[number])


def _number_copies(found: Survey, settings: PreprocessSettings, work: WorkDirectory) -> Survey:
    """Gives the second, third, ... example of a key KEY the keys KEY#2, KEY#3, ... in the source's order."""
    if next(repeated(blocks(work.keys), sum(found.codes), work.scratch), None) is None:
        return found
    buckets, codes, sizes = (
        rows.Buckets(work.buckets / "numbered"),
        *map(np.array, (found.codes, found.sizes)),
    )
    digested = plan.Digested(settings)
    for block in found.buckets:
        copies = _copies(block)
        chosen = np.array(list(copies), np.int64)
        buckets.append(block.take(np.setdiff1d(np.arange(block.count), chosen)))
        if not copies:
            continue
        renamed = block.take(chosen).renamed(list(copies.values()))
        if settings.key != "content":
            codes_of_groups = renamed.heads["code"].copy()
            digested.fill(renamed.heads, renamed.keys(), [None] * renamed.count)
            if settings.group:
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
