"""Finishing: the manifest of a dataset, from the completion markers of its shards."""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, islice

import google_crc32c
import numpy as np

from shardline.components.preprocess.plan import records
from shardline.components.preprocess.plan.digests import are_rows_alike, find_repeated
from shardline.components.preprocess.plan.image_locations import NO_LOCATION
from shardline.components.preprocess.plan.plan import Plan, PlannedShard
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.example import WHOLE_FILE
from shardline.components.preprocess.tfrecord.example import parse_entries
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.preprocess.write import markers
from shardline.components.preprocess.write.markers import FoundMarker, Images, Marker
from shardline.trainer.base import files
from shardline.trainer.base.errors import RunError, SourceError
from shardline.trainer.data.features import Feature, Label, Tally
from shardline.trainer.data.manifest import SPLITS, Duplicates, Manifest, Shard, Split

#: Groups of equal examples that are named in the manifest, and the most keys of one of them.
_NAMED, _NAMED_KEYS = 20, 10
# Rows that tell how many others share the value of a column.
_SAMPLED_ROWS = 5000


def describe(plan: Plan, work: WorkDirectory) -> Manifest:
    """Returns the manifest of a dataset; RunError if any of its shards is not done."""
    done = find_done(plan, plan.shards, work)
    missing = [shard.file for shard in plan.shards if shard.file not in done]
    if missing:
        raise RunError(
            f"{len(missing)} of {len(plan.shards)} shards of {work.out} are not written, {missing[0]} among "
            "them; write them first"
        )
    images = Images.merge([found.marker.images for found in done.values()])
    if images.encodings == ("raw",) and None in (images.height, images.width):
        raise SourceError("raw images must be of one size, these differ; give image_size or another encoding")
    resize = plan.settings.resize_mode if plan.settings.image_size else ""
    features = (
        *([images.feature(resize)] if images.channels else []),
        *(label.feature for label in plan.labels),
        Feature("key", "string"),
        *plan.features,
    )
    splits = {}
    for name in dict.fromkeys(shard.split for shard in plan.shards):
        written = [done[shard.file].marker for shard in plan.shards if shard.split == name]
        labels = {
            label.name: Tally.merge([(marker.shard.records, marker.labels[label.name]) for marker in written])
            for label in plan.labels
        }
        splits[name] = Split(shards=tuple(marker.shard for marker in written), labels=labels)
    return Manifest(
        fingerprint=_fingerprint(plan.labels, features, splits),
        source=plan.settings.source,
        settings=recorded_settings(plan.settings, plan.schema),
        labels=plan.labels,
        features=features,
        splits=splits,
        records_in=plan.records_in,
        rejected=dict(sorted(plan.rejected.items())),
        converted=images.converted,
        duplicates=_find_duplicates(plan, work, done, is_table=not images.channels),
        keys=_write_keys(plan, work),
        anomalies=plan.anomalies,
    )


def _write_keys(plan: Plan, work: WorkDirectory) -> Shard | None:
    """Writes the key hash of each example, in the order of the shards; None if the source has no keys."""
    size = checksum = 0
    has_keys = False
    with files.replacing(work.key_hashes) as temporary, temporary.open("wb") as file:
        for block in (
            block for shard in plan.shards for block in records.read(work.records_path(shard.file))
        ):
            known = records.key_hash_bytes(block.heads)
            file.write(known)
            size, checksum = size + len(known), google_crc32c.extend(checksum, known)
            has_keys = has_keys or bool(block.heads["key_hash"].any())
    if not has_keys:  # the source has no keys of its own
        work.key_hashes.unlink(missing_ok=True)
        return None
    return Shard(work.key_hashes.name, plan.records, size, f"{checksum:08x}")


def recorded_settings(settings: PreprocessSettings, schema: str) -> dict[str, object]:
    """Returns the settings that determine the bytes, and the digest of the schema that was checked."""
    names = (
        "split", "stratify", "split_by_time", "split_gap", "split_salt", "seed", "key", "group", "image_size",
        "resize_mode", "encoding", "readers", "shards",
    )  # fmt: skip
    values = asdict(settings)
    checked = {"schema": schema, "on_anomaly": settings.on_anomaly} if schema else {}
    columns = {"columns": dict(settings.columns)} if settings.columns else {}
    return {name: values[name] for name in names} | columns | checked


def find_done(plan: Plan, shards: Sequence[PlannedShard], work: WorkDirectory) -> dict[str, FoundMarker]:
    """Returns the markers of the shards that are done exactly as planned, by file."""
    known, sizes = markers.load(work), work.shard_sizes()
    return {
        shard.file: found
        for shard in shards
        if (found := known.get(shard.file))
        and sizes.get(shard.file) == found.marker.shard.bytes
        and _is_done(shard, found.marker, plan, work)
    }


def _is_done(shard: PlannedShard, marker: Marker, plan: Plan, work: WorkDirectory) -> bool:
    if marker.identity != plan.identity(shard) or marker.shard.records != shard.records:
        return False
    if marker.labels.keys() != {label.name for label in plan.labels}:
        return False
    return marker.surveyed == plan.surveyed or _are_unchanged(shard, plan, work, marker.surveyed)


def _are_unchanged(shard: PlannedShard, plan: Plan, work: WorkDirectory, since: int) -> bool:
    prefixes = [os.fsencode(location.path) for location in plan.places]
    paths = (
        prefixes[location] + (path or key)
        for block in records.read(work.records_path(shard.file))
        for key, path, _, _, location, generation, length in block.fields()
        # The generations of objects are part of the plan.
        if location != NO_LOCATION and length <= WHOLE_FILE and not generation
    )
    try:
        return all(os.stat(path).st_ctime_ns <= since for path in paths)
    except OSError:
        return False


def _fingerprint(labels: Sequence[Label], features: Sequence[Feature], splits: Mapping[str, Split]) -> str:
    """Returns the hash of a dataset's bytes and their meaning; not of its source and the time of reading."""
    content = {
        "labels": [asdict(label) for label in labels],
        "features": [asdict(feature) for feature in features],
        "shards": [asdict(shard) for split in splits.values() for shard in split.shards],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _find_duplicates(
    plan: Plan, work: WorkDirectory, done: Mapping[str, FoundMarker], *, is_table: bool
) -> Duplicates:
    shards = plan.shards
    starts = np.array([0, *accumulate(shard.records for shard in shards)])
    split_bits = np.array([1 << SPLITS.index(shard.split) for shard in shards], np.uint8)
    blocks = (block for shard in shards for block in done[shard.file].hashes())
    repeats = straddling = 0
    groups: list[tuple[int, list[int]]] = []
    for hashes, numbers in find_repeated(blocks, plan.records, work.path):
        begins = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
        repeats += len(hashes) - len(begins)
        of_shard = np.searchsorted(starts, numbers, side="right") - 1
        split_masks = np.bitwise_or.reduceat(split_bits[of_shard], begins).astype(np.int64)
        splits = (split_masks & 1) + (split_masks >> 1 & 1) + (split_masks >> 2)
        straddling += int((splits > 1).sum())
        # Those that straddle splits come first: they need attention.
        ends = np.append(begins[1:], len(hashes))
        for group in np.lexsort((numbers[begins], -splits))[:_NAMED].tolist():
            members = numbers[begins[group] : min(ends[group], begins[group] + _NAMED_KEYS)].tolist()
            groups.append((-int(splits[group]), members))
        groups = heapq.nsmallest(_NAMED, groups)

    if repeats and is_table and _are_rows_alike(plan, work):
        return Duplicates(repeats, by_chance=True)

    def name(number: int) -> str:
        index = int(np.searchsorted(starts, number, side="right")) - 1
        shard, position = shards[index], number - int(starts[index])
        for block in records.read(work.records_path(shard.file)):
            if position < block.count:
                key = records.key_text(block.keys()[position]).encode("utf-8", "backslashreplace").decode()
                return f"{shard.split}: {key}"
            position -= block.count
        raise IndexError(number)

    named = tuple(tuple(map(name, members)) for _, members in groups)
    return Duplicates(examples=repeats, straddling=straddling, named=named)


def _are_rows_alike(plan: Plan, work: WorkDirectory) -> bool:
    largest = max(plan.shards, key=lambda shard: shard.records)  # a random sample
    blocks = records.read(work.records_path(largest.file))
    columns: dict[str, Counter[str]] = defaultdict(Counter)
    for row in islice((row for block in blocks for row in block.features()), _SAMPLED_ROWS):
        for name, (_, values) in parse_entries(row).items():
            columns[name][str(values)] += 1
    return are_rows_alike(columns.values(), plan.records)
