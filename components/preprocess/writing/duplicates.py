"""Examples with the same content: which repeat another one, and whether they are in two splits."""

from __future__ import annotations

from itertools import islice

from shardline.components.preprocess.planning import digests, rows
from shardline.components.preprocess.planning.plan_file import Plan
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer.data.manifest import Duplicates

#: Groups of equal examples that are named in the manifest, and the most keys of one of them.
_NAMED, _NAMED_KEYS = 20, 10


def find(plan: Plan, work: WorkDirectory) -> Duplicates:
    """Finds the examples of a dataset whose stored content is the same to the byte."""
    repeats, found = digests.repeated((work.digests(shard.file) for shard in plan.shards), plan.records)
    if not repeats:
        return Duplicates()
    splits: dict[bytes, set[str]] = {each: set() for each in found}
    members: dict[bytes, list[tuple[str, str, int]]] = {}
    for shard in plan.shards:
        for position, each in enumerate(digests.read(work.digests(shard.file))):
            if each in splits:
                splits[each].add(shard.split)
                places = members.setdefault(each, [])
                if len(places) < _NAMED_KEYS:
                    places.append((shard.split, shard.file, position))
    straddling = sum(len(where) > 1 for where in splits.values())
    # Those that straddle splits first: they are what must be looked at.
    first = sorted(members, key=lambda each: (-len(splits[each]), members[each]))[:_NAMED]
    return Duplicates(
        examples=repeats,
        straddling=straddling,
        named=tuple(tuple(f"{s}: {_key(work, f, p)}" for s, f, p in members[each]) for each in first),
    )


def _key(work: WorkDirectory, shard: str, position: int) -> str:
    row = next(islice(rows.read(work.rows(shard)), position, None))
    name = rows.parse(row).name
    return name.encode("utf-8", "backslashreplace").decode()
