"""Plan: which example goes to which split, shard and position, and the file that says so.

All of it follows from salted hashes of the keys, so that it depends neither on the order in which a source
yields its examples nor on the machine, and an example keeps its split when the source grows. The digest with
the seed is the example's position in the order; the second half of the one with the split's salt chooses its
split, whatever the seed. The second half of the one with 0 is what an example is known by in other datasets.

The file is read by every process and task that writes shards.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import cast

import numpy as np
import xxhash

from shardline.components.preprocess.images.codec import Codec
from shardline.components.preprocess.places import Place
from shardline.components.preprocess.rows import Numbers
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer import files, records
from shardline.trainer.data.features import Anomaly, Feature, Label
from shardline.trainer.data.manifest import SPLITS
from shardline.trainer.errors import RunError, SourceError

#: Codes below this are indices into `SPLITS`; from here on, the example was in the source's "train".
_FROM_TRAIN = len(SPLITS)

_NO_SPLIT = 255
_OWN_CODES = {None: _NO_SPLIT} | {split: index for index, split in enumerate(SPLITS)}

#: Part of every shard's identity: raised when the same plan is written as other bytes.
_WRITER_VERSION = 2

# A slow task, or a lost one, holds up no more than a part of its share.
_CHUNKS_PER_TASK = 4
# So many tasks are started whatever there is to do, and more only for so many records each.
_FEW_TASKS, _RECORDS_PER_TASK = 8, 10_000


def digests(keys: Iterable[bytes], seed: int) -> tuple[Numbers, Numbers]:
    """Returns both halves of the digest of each key; those of two seeds are independent of each other."""
    found = b"".join(map(xxhash.xxh3_128_digest, keys, repeat(seed % 2**64)))
    halves = np.frombuffer(found, ">u8").astype("<u8")
    return halves[::2], halves[1::2]


def choose_split(
    point: float, own: str | None, existing: Collection[str | None], shares: Mapping[str, float]
) -> str:
    """Returns the split of one example, whose hash is `point` (0 <= point < 1).

    An example keeps the split that its source gives it, with one exception: where the source has splits
    but no validation or test split, the missing one takes its share out of the source's training split.
    `existing` are all splits that the source gives to any example, None among them where it gives none.
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
    """One byte per example that gives its split as soon as it is known which splits the source has."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = shares
        validation, test = shares.get("validation", 0.0), shares.get("test", 0.0)
        self._bounds = [0.0, *sorted({validation, test, validation + test} - {0.0})]
        self._numbers = np.array([min(round(each * 2**64), 2**64 - 1) for each in self._bounds], np.uint64)
        without_split = [SPLITS.index(choose_split(bound, None, (), shares)) for bound in self._bounds]
        self._without_split = np.array(without_split, np.uint8)
        self.count = _FROM_TRAIN + len(self._bounds)

    def codes(self, points: Numbers, own: Sequence[str | None]) -> Numbers:
        """Returns the codes of examples, from the second halves of their digests and their own splits."""
        regions = (np.searchsorted(self._numbers, points, side="right") - 1).astype(np.uint8)
        if set(own) == {None}:
            return cast(Numbers, self._without_split[regions])
        given = np.array([_OWN_CODES[split] for split in own], np.uint8)
        carved = np.where(given == SPLITS.index("train"), regions + np.uint8(_FROM_TRAIN), given)
        return np.where(given == _NO_SPLIT, self._without_split[regions], carved)

    def splits(self, existing: Collection[str | None]) -> tuple[str, ...]:
        """Returns the split of each code, given all splits that the source gives to any example."""
        carved = (choose_split(bound, "train", existing, self._shares) for bound in self._bounds)
        return (*SPLITS, *carved)


class Digested:
    """What follows from the digests of examples, for the heads of their rows.

    `named` says whether an example is known by its key in other datasets.
    """

    def __init__(self, settings: PreprocessSettings, *, named: bool = True) -> None:
        self._seed, self._salt, self._named = settings.seed, settings.split_salt, named
        self._codes = SplitCodes(settings.split)
        self.codes = self._codes.count

    def fill(
        self,
        heads: Numbers,
        identities: Iterable[bytes],
        own: Sequence[str | None],
        groups: Sequence[bytes] = (),
    ) -> None:
        """Fills in order, code of the split and what the examples are known by.

        Examples of one group, where there are groups, are in one split.
        """
        identities = list(identities)
        found = {number: digests(identities, number) for number in {0, self._seed, self._salt}}
        heads["order"], heads["order_low"] = found[self._seed]
        points = digests(groups, self._salt)[1] if groups else found[self._salt][1]
        heads["code"] = self._codes.codes(points, own)
        heads["known"] = found[0][1] if self._named else 0


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

    def chunks(self, tasks: int) -> list[Sequence[PlannedShard]]:
        """Returns the shards in the parts that tasks claim one after the other, some for each of them."""
        size = max(1, len(self.shards) // (tasks * _CHUNKS_PER_TASK))
        return [self.shards[first : first + size] for first in range(0, len(self.shards), size)]

    def useful_tasks(self, tasks: int) -> int:
        """Returns how many of so many tasks have enough to do, each of which costs a machine's start."""
        return max(1, min(tasks, len(self.shards), max(_FEW_TASKS, self.records // _RECORDS_PER_TASK)))

    def make_codec(self, *, checked: bool = False) -> Codec:
        """Returns the codec of the dataset's images; it does not check again those that were `checked`."""
        names = ("image_size", "resize_mode", "encoding", "max_pixels")
        check = "header" if checked else self.settings.check_images
        return Codec(check=check, **{name: getattr(self.settings, name) for name in names})

    def identity(self, shard: PlannedShard) -> str:
        """Returns a hash of all that shapes the bytes of a shard, but for the content of the images."""
        names = ("image_size", "resize_mode", "encoding", "compression", "max_pixels", "check_images")
        content = [
            _WRITER_VERSION,
            shard.file,
            shard.rows,
            *(getattr(self.settings, name) for name in names),
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
