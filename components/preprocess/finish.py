"""Finishing: the marks of all shards become the manifest of the dataset."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import google_crc32c

from shardline.components.preprocess import rows
from shardline.components.preprocess.duplicates import find_duplicates
from shardline.components.preprocess.places import NOWHERE
from shardline.components.preprocess.plan import Plan, PlannedShard
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import WHOLE_FILE
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.preprocess.write import Images, Mark
from shardline.trainer import files
from shardline.trainer.data.manifest import Feature, Manifest, Shard, Split
from shardline.trainer.errors import RunError, SourceError


def describe(plan: Plan, work: WorkDirectory) -> Manifest:
    """Returns the manifest of a dataset whose shards are all done; refuses one of which some are not."""
    done = find_done(plan, work)
    missing = [shard.file for shard in plan.shards if shard.file not in done]
    if missing:
        raise RunError(
            f"{len(missing)} of {len(plan.shards)} shards of {work.out} are not written, {missing[0]} among "
            "them; write them first"
        )
    images = Images.merge([mark.images for mark in done.values()])
    if images.encodings == ("raw",) and None in (images.height, images.width):
        raise SourceError("raw images must be of one size, these differ; give image_size or another encoding")
    resize = plan.settings.resize_mode if plan.settings.image_size else ""
    features = (
        *([images.feature(resize)] if images.channels else []),
        Feature("label", "int64"),
        Feature("key", "string"),
        *plan.features,
    )
    marks: dict[str, list[Mark]] = {}
    for shard in plan.shards:
        marks.setdefault(shard.split, []).append(done[shard.file])
    splits = {
        name: Split(
            shards=tuple(mark.shard for mark in of_split),
            class_counts=tuple(map(sum, zip(*(mark.class_counts for mark in of_split), strict=True))),
        )
        for name, of_split in marks.items()
    }
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
        converted=images.converted,
        duplicates=find_duplicates(plan, work),
        keys=_write_keys(plan, work),
    )


def _write_keys(plan: Plan, work: WorkDirectory) -> Shard | None:
    """Writes what each example is known by in other datasets, in the order of the shards, if by anything."""
    data = bytearray()
    for shard in plan.shards:
        data += b"".join([rows.identity(row) for row in rows.read(work.rows(shard.file))])
    if not any(data):  # the source has no keys of its own
        work.identities.unlink(missing_ok=True)
        return None
    files.write_bytes(work.identities, bytes(data))
    return Shard(work.identities.name, plan.records, len(data), f"{google_crc32c.value(bytes(data)):08x}")


def recorded_settings(settings: PreprocessSettings) -> dict[str, object]:
    """Returns the settings that shape the bytes."""
    names = (
        "split", "split_salt", "seed", "key", "image_size", "resize_mode", "encoding", "readers", "shards",
        "shard_size", "compression",
    )  # fmt: skip
    values = asdict(settings)
    return {name: values[name] for name in names}


def find_done(plan: Plan, work: WorkDirectory) -> dict[str, Mark]:
    """Returns the marks of the shards that are done exactly as the plan wants them, by file."""
    return {shard.file: mark for shard in plan.shards if (mark := _find_mark(shard, plan, work))}


def _find_mark(shard: PlannedShard, plan: Plan, work: WorkDirectory) -> Mark | None:
    mark = Mark.load(work.mark(shard.file))
    if mark is None or mark.identity != plan.identity(shard) or mark.shard.file != shard.file:
        return None
    if len(mark.class_counts) != len(plan.class_names) or sum(mark.class_counts) != shard.records:
        return None
    try:
        whole = work.find_shard(shard.file).stat().st_size == mark.shard.bytes
        whole = whole and work.digests(shard.file).stat().st_size == rows.DIGEST_BYTES * shard.records
        unchanged = mark.surveyed == plan.surveyed or _are_unchanged(shard, plan, work, mark.surveyed)
    except OSError:
        return None
    return mark if whole and unchanged else None


def _are_unchanged(shard: PlannedShard, plan: Plan, work: WorkDirectory, since: int) -> bool:
    """Returns whether the image files of a shard, which must be there, are those that were read."""
    prefixes = [os.fsencode(place.path) for place in plan.places]
    for block in rows.read_fields(work.rows(shard.file)):
        for key, path, _, _, place, _, length in block:
            if place == NOWHERE or length != WHOLE_FILE:
                continue
            if os.stat(prefixes[place] + (path or key)).st_ctime_ns > since:
                return False
    return True


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
        "shards": [asdict(shard) for split in splits.values() for shard in split.shards],
        "compression": compression,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
