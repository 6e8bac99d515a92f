"""From the marks of all shards to a dataset: what they hold becomes the manifest, which is written last.

Examples with the same content: which repeat another one, and whether they are in two splits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice

from shardline.components.preprocess import deal as digests
from shardline.components.preprocess import rows
from shardline.components.preprocess import write as marks
from shardline.components.preprocess.plan_file import NOWHERE, Plan, PlannedShard
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.source import WHOLE_FILE
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.preprocess.write import Images, Mark
from shardline.trainer.data.manifest import Duplicates, Feature, Manifest, Shard, Split
from shardline.trainer.errors import RunError, SourceError

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


def find_done(plan: Plan, work: WorkDirectory) -> dict[str, Mark]:
    """Returns the marks of the shards that are done exactly as the plan wants them, by file."""
    return {shard.file: mark for shard in plan.shards if (mark := _find_mark(shard, plan, work))}


def describe(plan: Plan, work: WorkDirectory) -> Manifest:
    """Returns the manifest of a dataset whose shards are all done.

    Raises:
        RunError: They are not.
        SourceError: Raw images differ in size.
    """
    done = find_done(plan, work)
    missing = [shard.file for shard in plan.shards if shard.file not in done]
    if missing:
        raise RunError(
            f"{len(missing)} of {len(plan.shards)} shards of {work.out} are not written, {missing[0]} among "
            "them; write them first"
        )
    images = Images.merge(mark.images for mark in done.values())
    if images.encodings == ("raw",) and None in (images.height, images.width):
        raise SourceError("raw images must be of one size, these differ; give image_size or another encoding")
    resize = plan.settings.resize_mode if plan.settings.image_size else ""
    features = (
        *([images.feature(resize)] if images.channels else []),
        Feature("label", "int64"),
        Feature("key", "string"),
        *plan.features,
    )
    splits = {name: _split([done[s.file] for s in shards]) for name, shards in _by_split(plan).items()}
    compression = "" if plan.settings.compression == "none" else plan.settings.compression
    return Manifest(
        fingerprint=_fingerprint(plan.class_names, features, splits, compression),
        source=plan.settings.source,
        settings=recorded_settings(plan.settings),
        class_names=plan.class_names,
        features=features,
        splits=splits,
        compression=compression,
        records_in=plan.records_in,
        rejected=dict(sorted(plan.rejected.items())),
        converted=images.converted or {},
        duplicates=find(plan, work),
    )


def recorded_settings(settings: PreprocessSettings) -> dict[str, object]:
    """Returns the settings that shape the bytes."""
    names = (
        "split", "seed", "key", "image_size", "resize_mode", "encoding", "readers", "shards", "shard_size",
        "compression",
    )  # fmt: skip
    values = asdict(settings)
    return {name: values[name] for name in names}


def _find_mark(shard: PlannedShard, plan: Plan, work: WorkDirectory) -> Mark | None:
    mark = marks.load(work.mark(shard.file))
    if mark is None or mark.identity != plan.identity(shard):
        return None
    try:
        whole = work.find_shard(shard.file).stat().st_size == mark.shard.bytes
        whole = whole and work.digests(shard.file).stat().st_size == rows.DIGEST_BYTES * shard.records
    except OSError:
        return None
    unchanged = mark.surveyed == plan.surveyed or _are_unchanged(shard, plan, work, mark.surveyed)
    return mark if whole and unchanged else None


def _are_unchanged(shard: PlannedShard, plan: Plan, work: WorkDirectory, since: int) -> bool:
    """Returns whether the image files of a shard are those that an earlier run has read."""
    prefixes = [os.fsencode(place.path) for place in plan.places]
    for data in rows.read(work.rows(shard.file)):
        row = rows.parse(data)
        if row.place == NOWHERE or row.length != WHOLE_FILE:
            continue
        try:
            if os.stat(prefixes[row.place] + (row.path or row.key)).st_ctime_ns > since:
                return False
        except OSError:
            return False
    return True


def _by_split(plan: Plan) -> Mapping[str, list[PlannedShard]]:
    shards: dict[str, list[PlannedShard]] = {}
    for shard in plan.shards:
        shards.setdefault(shard.split, []).append(shard)
    return shards


def _split(done: Sequence[Mark]) -> Split:
    return Split(
        shards=tuple(mark.shard for mark in done),
        class_counts=tuple(map(sum, zip(*(mark.class_counts for mark in done), strict=True))),
    )


def _fingerprint(
    class_names: Sequence[str], features: Sequence[Feature], splits: Mapping[str, Split], compression: str
) -> str:
    """Returns the identity of a dataset: its bytes and what they mean.

    Settings are in it by their effect on the bytes; where the source lies, when and by whom it was read
    are not. Checksum, size and number of records stand for the bytes of a shard.
    """
    content = {
        "class_names": class_names,
        "features": [asdict(feature) for feature in features],
        "shards": [asdict(shard) for shard in _shards(splits)],
        "compression": compression,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _shards(splits: Mapping[str, Split]) -> Iterator[Shard]:
    for split in splits.values():
        yield from split.shards
