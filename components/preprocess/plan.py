"""Deciding: which example goes to which split, shard and position. Pure arithmetic on keys.

Everything follows from salted hashes of the keys, so that it depends neither on the order in which a
source yields its examples nor on the machine, and an example keeps its split when the source grows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainer.data.manifest import SPLITS
from trainer.errors import SourceError

#: Share of the examples by split. "train" is what the others leave.
SHARES: Mapping[str, float] = {"train": 0.8, "validation": 0.1, "test": 0.1}


@dataclass(frozen=True)
class PlannedShard:
    """One shard before it is written.

    Attributes:
        file: Name of the file.
        members: Indices of its examples, in the order in which they are written.
    """

    file: str
    members: Sequence[int]


def make_plan(
    keys: Sequence[str], own_splits: Sequence[str | None], *, readers: int, shards: int, seed: int
) -> dict[str, tuple[PlannedShard, ...]]:
    """Plans all shards of a dataset.

    Args:
        keys: Key of every example, unique.
        own_splits: The split that the source gives to each example, or None.
        readers: Number of input workers; the number of shards of a split is a multiple of it.
        shards: About how many shards the training split gets; smaller splits get fewer.
        seed: Salt of the hashes.

    Returns:
        The shards by split, in the order of `SPLITS`.

    Raises:
        SourceError: A split has no example.
    """
    existing = {split for split in own_splits if split is not None}
    members: dict[str, list[int]] = {split: [] for split in SPLITS}
    for index, (key, own) in enumerate(zip(keys, own_splits, strict=True)):
        members[choose_split(key, own, existing, seed)].append(index)
    _refuse_empty_splits({split: len(indices) for split, indices in members.items()})
    plan = {}
    for split, indices in members.items():
        count = shard_count(len(indices), len(members["train"]), readers=readers, shards=shards)
        ordered = sorted(indices, key=lambda index: (_hash(keys[index], "order", seed), keys[index]))
        plan[split] = deal(split, ordered, count)
    return plan


def choose_split(key: str, own: str | None, existing: Collection[str], seed: int) -> str:
    """Returns the split of one example.

    An example keeps the split that its source gives it, with one exception: where the source has splits
    but no validation or test split, the missing one takes its share out of the source's training split.

    Args:
        key: The example's key.
        own: The split that the source gives to the example, or None.
        existing: All splits that the source gives to any example.
        seed: Salt of the hash.
    """
    if own in ("validation", "test"):
        return own
    point, reached = _hash(key, "split", seed) / 2**64, 0.0
    for split in ("validation", "test"):
        if own is None or split not in existing:
            reached += SHARES[split]
            if point < reached:
                return split
    return "train"


def shard_count(records: int, training_records: int, *, readers: int, shards: int) -> int:
    """Returns the number of shards of a split with `records` examples, at least one of them.

    It is a multiple of `readers` (rounded up) in proportion to the training split's `shards`, but never
    more than `shards` (rounded up) or the records allow: with fewer records than readers, one record each.
    """
    if records < readers:
        return records
    proportional = shards * min(1.0, records / training_records)
    wanted = max(1, round(proportional))
    return min(-(-wanted // readers), records // readers) * readers


def deal(split: str, ordered: Sequence[int], count: int) -> tuple[PlannedShard, ...]:
    """Deals a split's examples to its shards: number p goes to shard p % count, position p // count.

    Shards therefore differ by at most one example, and the longer ones come first.
    """
    return tuple(PlannedShard(shard_name(split, i, count), ordered[i::count]) for i in range(count))


def shard_name(split: str, index: int, count: int) -> str:
    """Returns the file name of a shard: "train-00003-of-00016.tfrecord"."""
    return f"{split}-{index:05d}-of-{count:05d}.tfrecord"


def _hash(key: str, purpose: str, seed: int) -> int:
    """Returns 64 bits that depend on the key; independent of each other for two purposes or two seeds."""
    text = f"{purpose}/{seed}/{key}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _refuse_empty_splits(records: Mapping[str, int]) -> None:
    empty = [split for split, count in records.items() if not count]
    if empty:
        counts = ", ".join(f"{split} {count:,}" for split, count in records.items())
        raise SourceError(
            f"no example for {' and '.join(empty)} ({counts}); give it more examples (about 50) "
            "or try another seed"
        )
