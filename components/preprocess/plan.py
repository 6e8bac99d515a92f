"""Deciding: which example goes to which split, shard and position. Pure arithmetic on digests.

Everything follows from salted hashes of the keys, so that it depends neither on the order in which a
source yields its examples nor on the machine, and an example keeps its split when the source grows. The
first half of a digest is the example's place in the order, the second half chooses its split.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import xxhash

from shardline.trainer.data.manifest import SPLITS
from shardline.trainer.errors import SourceError

_Item = TypeVar("_Item")

#: Codes below this are indices into `SPLITS`; from here on, the example was in the source's "train".
_FROM_TRAIN = len(SPLITS)


def digest(key: bytes, seed: int) -> bytes:
    """Returns 16 bytes that follow from the key; those of two seeds are independent of each other."""
    return xxhash.xxh3_128_digest(key, seed % 2**64)


def choose_split(
    point: float, own: str | None, existing: Collection[str], shares: Mapping[str, float]
) -> str:
    """Returns the split of one example.

    An example keeps the split that its source gives it, with one exception: where the source has splits
    but no validation or test split, the missing one takes its share out of the source's training split.

    Args:
        point: What the example's hash says, 0 <= point < 1.
        own: The split that the source gives to the example, or None.
        existing: All splits that the source gives to any example.
        shares: Share of the examples by split.
    """
    if own in ("validation", "test"):
        return own
    reached = 0.0
    for split in ("validation", "test"):
        if own is None or split not in existing:
            reached += shares.get(split, 0.0)
            if point < reached:
                return split
    return "train"


class SplitCodes:
    """One byte per example that gives its split as soon as it is known which splits the source has.

    Args:
        shares: Share of the examples by split.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = shares
        validation, test = shares.get("validation", 0.0), shares.get("test", 0.0)
        self._bounds = [0.0, *sorted({validation, test, validation + test} - {0.0})]
        self._bounds_as_digest = [_as_digest(bound) for bound in self._bounds]
        self._without_split = [SPLITS.index(choose_split(bound, None, (), shares)) for bound in self._bounds]
        self.count = _FROM_TRAIN + len(self._bounds)

    def code(self, point: bytes, own: str | None) -> int:
        """Returns the code of an example.

        Args:
            point: Second half of the example's digest.
            own: The split that the source gives to it, or None.
        """
        region = bisect_right(self._bounds_as_digest, point) - 1
        if own is None:
            return self._without_split[region]
        return _FROM_TRAIN + region if own == "train" else SPLITS.index(own)

    def splits(self, existing: Collection[str]) -> tuple[str, ...]:
        """Returns the split of each code.

        Args:
            existing: All splits that the source gives to any example.
        """
        carved = (choose_split(bound, "train", existing, self._shares) for bound in self._bounds)
        return (*SPLITS, *carved)


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


def deal(items: Sequence[_Item], first: int, count: int) -> list[Sequence[_Item]]:
    """Deals consecutive examples of a split to its shards: number p goes to shard p % count.

    Over all calls shards therefore differ by at most one example, the longer ones come first, and number
    p is at position p // count of its shard.

    Args:
        items: The examples.
        first: Number of the first of them.
        count: Number of shards.
    """
    return [items[(shard - first) % count :: count] for shard in range(count)]


def shard_name(split: str, index: int, count: int) -> str:
    """Returns the file name of a shard: "train-00003-of-00016.tfrecord"."""
    return f"{split}-{index:05d}-of-{count:05d}.tfrecord"


def refuse_empty_splits(records: Mapping[str, int], shares: Mapping[str, float]) -> None:
    """Refuses a dataset in which a split that was asked for has no example.

    Raises:
        SourceError: Names them.
    """
    empty = [split for split in SPLITS if split in shares and not records[split]]
    if empty:
        counts = ", ".join(f"{split} {count:,}" for split, count in records.items())
        raise SourceError(
            f"no example for {' and '.join(empty)} ({counts}); give it more examples (about 50), another "
            "seed or other shares"
        )


def _as_digest(bound: float) -> bytes:
    return min(round(bound * 2**64), 2**64 - 1).to_bytes(8)
