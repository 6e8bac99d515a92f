"""Verification: compares every file and record of a dataset directory with its manifest."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from shardline.components.preprocess.images import UnreadableError, check_file, read_header
from shardline.components.preprocess.inspect.profile import value_text
from shardline.components.preprocess.process_pool import Processes, Report
from shardline.components.preprocess.tfrecord import ShardBatch, read_batches, width
from shardline.components.preprocess.time_split import format_time, scaled_gap
from shardline.components.preprocess.work_directory import REJECTED_FILE
from shardline.components.text import enumerate_names, size
from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import SourceError, printable
from shardline.trainer.base.progress import Meter
from shardline.trainer.manifest import CLASS, MANIFEST_FILE, MULTILABEL, SPLITS, Feature, Manifest, Shard

# Damaged records of one shard, and groups, that are listed one by one.
_MOST_LISTED = 10
_BLOCK = 1 << 20

# Result of checking a shard, as JSON: the sound `records`, the `bytes` of the file, all `damages`, the
# `groups`, and where the split is by time, the first and last of the `times` with keys.
_Check = Mapping[str, Any]


@dataclass(frozen=True)
class Damage:
    """One contradiction between a dataset and its manifest, in a file or one record of it, from 0."""

    file: str
    record: int | None
    what: str

    def __str__(self) -> str:
        where = "" if self.record is None else f", record {self.record:,}"
        return printable(f"{self.file}{where}: {self.what}")


@dataclass(frozen=True)
class Verification:
    """Result of checking a dataset: its shards, the records that are sound, their bytes, all damage."""

    shards: int
    records: int
    bytes: int
    damages: tuple[Damage, ...]

    def summary(self) -> str:
        """Returns the verdict as one line."""
        read = f"{self.records:,} records in {self.shards:,} shards, {size(self.bytes)}"
        if not self.damages:
            return f"sound: {read}"
        damaged = ", ".join(dict.fromkeys(damage.file for damage in self.damages))
        return f"damaged: {damaged}; {read} are sound"

    def to_json(self) -> dict[str, Any]:
        """Returns the same for a program."""
        return {"sound": not self.damages} | asdict(self)


def verify(directory: Path, *, deep: bool = False, processes: int = 0) -> Verification:
    """Reads every record of every shard and compares all of it with the manifest.

    Checked are the size and CRC-32C of each file, the CRC-32Cs of each record, that it parses as an
    Example with exactly the manifest's features, the values of each, that labels are such as their kind has,
    that the file of each image is sound, the number of records by shard, that groups and times are apart,
    and that no file is missing or left over. With `deep` every image is decoded as well. Damage does not end
    it: all shards are read, by `processes` processes, 0 for one per core. Raises DatasetError if the manifest
    cannot be read, or was changed.
    """
    manifest = manifests.load(directory)
    shards = sorted(manifest.shards, key=lambda shard: -shard.records)
    meter = Meter("read", manifest.records, topic="verify")
    arguments = {"directory": str(directory), "deep": deep}
    with Processes(min(processes or len(os.sched_getaffinity(0)), len(shards)), check_shards) as pool:
        checks = pool.run_job(check_shards, arguments, [shard.file for shard in shards], meter.advance)
    damages = [Damage(**each) for shard in manifest.shards for each in checks[shard.file]["damages"]]
    damages += _check_groups(manifest, checks)
    damages += _check_times(manifest, checks)
    damages += _check_rejected(directory, manifest)
    damages += _check_files(directory, manifest)
    return Verification(
        shards=len(checks),
        records=sum(check["records"] for check in checks.values()),
        bytes=sum(check["bytes"] for check in checks.values()),
        damages=tuple(damages),
    )


def _check_rejected(directory: Path, manifest: Manifest) -> Iterator[Damage]:
    expected, path = sum(manifest.rejected.values()), directory / REJECTED_FILE
    if not expected and not path.exists():
        return
    try:
        found = f"names {len([*map(json.loads, path.read_text(encoding='utf-8').splitlines())]):,}"
    except (OSError, ValueError, RecursionError) as error:
        found = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
    if found != f"names {expected:,}":
        yield Damage(REJECTED_FILE, None, f"{found}; the manifest says {expected:,} were rejected")


def _check_files(directory: Path, manifest: Manifest) -> Iterator[Damage]:
    """Yields the damage of the file of keys, if there is one, and files that the manifest does not name."""
    if keys := manifest.keys:
        try:
            yield from _differences(keys, *_size_and_checksum(directory / keys.file, lambda: None))
        except OSError as error:
            yield _unread(keys.file, error)
    named = {file.file for file in manifest.files} | {MANIFEST_FILE, REJECTED_FILE}
    for path in sorted(directory.iterdir()):
        if path.name not in named:
            yield Damage(path.name, None, "is not named in the manifest")


def _unread(file: str, error: OSError) -> Damage:
    is_missing = isinstance(error, FileNotFoundError)
    return Damage(file, None, "is missing" if is_missing else f"cannot be read: {error.strerror or error}")


def _size_and_checksum(path: Path, advance: Callable[[], None]) -> tuple[int, str]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), google_crc32c.extend(crc, block)
            advance()
    return size, f"{crc:08x}"


def _differences(expected: Shard, size: int, checksum: str) -> Iterator[Damage]:
    if size != expected.bytes:
        yield Damage(expected.file, None, f"has {size:,} bytes, the manifest says {expected.bytes:,}")
    if checksum != expected.crc32c:
        yield Damage(expected.file, None, f"has the CRC-32C {checksum}, the manifest says {expected.crc32c}")


def _check_groups(manifest: Manifest, checks: Mapping[str, _Check]) -> Iterator[Damage]:
    splits = defaultdict[str, set[str]](set)
    for name, split in manifest.splits.items():
        for shard in split.shards:
            for group in checks[shard.file]["groups"]:
                splits[group].add(name)
    if leaks := sorted((group, sorted(names)) for group, names in splits.items() if len(names) > 1):
        named = [f"{group!r} in {' and '.join(names)}" for group, names in leaks]
        shown = enumerate_names(named, _MOST_LISTED)
        what = f"groups by {manifest.group!r}, and groups are in several splits: {shown}"
        yield Damage(MANIFEST_FILE, None, what)


def _check_times(manifest: Manifest, checks: Mapping[str, _Check]) -> Iterator[Damage]:
    """Yields the last example of a split that is not before the first of the next one, by the gap if set."""
    feature, gap = manifest.time_feature, str(manifest.settings.get("split_gap") or "")
    splits = {
        name: [time for shard in manifest.splits[name].shards for time in checks[shard.file]["times"]]
        for name in SPLITS
        if name in manifest.splits
    }
    for before, name in pairwise(name for name, times in splits.items() if times):
        (last, key), (first, key_of_first) = max(splits[before]), min(splits[name])
        if last >= first - scaled_gap(gap, feature):
            column, apart = manifest.settings["split_by_time"], f"{gap} before" if gap else "before"
            what = (
                f"splits by {column!r}, and {key!r} in {before}, {format_time(last, feature)}, is not "
                f"{apart} {key_of_first!r} in {name}, {format_time(first, feature)}"
            )
            yield Damage(MANIFEST_FILE, None, what)


def check_shards(arguments: Mapping[str, Any], items: Iterable[str], report: Report) -> dict[str, Any]:
    """Checks shards, a job of the process pool; returns a `_Check` by shard.

    `arguments` has the `directory` of the dataset, and `deep`: whether images are decoded.
    """
    directory = Path(arguments["directory"])
    manifest = manifests.load(directory)
    shards = {shard.file: shard for shard in manifest.shards}
    return {
        file: _Checker(manifest, arguments["deep"], report).check_shard(directory / file, shards[file])
        for file in items
    }


class _Checker:
    def __init__(self, manifest: Manifest, deep: bool, report: Report) -> None:
        self._manifest, self._deep, self._report = manifest, deep, report
        self._records, self._groups, self._times = 0, set[str](), list[tuple[int, str]]()

    def check_shard(self, path: Path, shard: Shard) -> _Check:
        """Reads a shard twice, as bytes and as records, and lists all that is wrong with it."""
        damages, size, file = list[Damage](), 0, shard.file
        try:
            size = path.stat().st_size
            if path.is_file():
                # The report ends a worker whose parent has ended.
                _, checksum = _size_and_checksum(path, lambda: self._report(0, 0))
                damages += _differences(shard, size, checksum)
                damages += self._check_records(path, shard)
            else:
                damages.append(Damage(file, None, "is not a file"))
        except OSError as error:
            damages.append(_unread(file, error))
        return {
            "records": self._records,
            "bytes": size,
            "damages": list(map(asdict, damages)),
            "groups": sorted(self._groups),
            "times": self._times,
        }

    def _check_records(self, path: Path, shard: Shard) -> Iterator[Damage]:
        number = damaged = 0
        try:
            for batch in read_batches(path, self._manifest.features, self._report):
                problems = batch.faults | self._problems(batch)
                for row in sorted(problems):
                    damaged += 1
                    if damaged <= _MOST_LISTED:
                        yield Damage(shard.file, number + row, problems[row])
                number += len(batch.rows) + len(batch.faults)
        except SourceError as error:
            # The end of the record is unknown: the rest of the shard cannot be read.
            yield Damage(shard.file, number, str(error).rpartition(f"record {number}: ")[2])
            return
        finally:
            self._records = number - damaged
        if damaged > _MOST_LISTED:
            yield Damage(shard.file, None, f"has {damaged - _MOST_LISTED:,} more damaged records")
        if number != shard.records:
            yield Damage(shard.file, None, f"holds {number:,} records, the manifest says {shard.records:,}")

    def _problems(self, batch: ShardBatch) -> dict[int, str]:
        """Returns what is wrong with the values of records, by their numbers in the batch."""
        columns, found = batch.columns, dict[int, str]()
        for label in self._manifest.labels:
            values = columns[label.name].flatten().to_numpy().reshape(-1, width(label.feature))
            if label.kind == CLASS:
                bad, what = (values < 0) | (values >= len(label.outputs)), "the number of a class"
            elif label.kind == MULTILABEL:
                bad, what = ~np.isin(values, (0, 1)), "0 or 1 for each of its names"
            else:
                bad, what = ~np.isfinite(values), "a finite number"
            for index in np.flatnonzero(bad.any(axis=1)).tolist():
                shown = ", ".join(map(value_text, values[index].tolist()))
                found.setdefault(batch.rows[index], f"{label.name} is {shown}, not {what}")
        keys = [value_text(key) for key in columns["key"].flatten().to_pylist()]
        found |= {row: "has an empty key" for row, key in zip(batch.rows, keys, strict=True) if not key}
        for feature in self._manifest.features:
            if feature.encoding:
                for row, encoded in zip(batch.rows, columns[feature.name].flatten(), strict=True):
                    if row not in found and (problem := self._image_problem(encoded.as_py(), feature)):
                        found[row] = f"{feature.name} {problem}"
        if group := columns.get(self._manifest.group):
            self._groups |= set(map(value_text, group.flatten().unique().to_pylist()))
        if keys and (moments := columns.get(self._manifest.time_feature)):
            times = [*self._times, *zip(moments.flatten().to_pylist(), keys, strict=True)]
            self._times = [min(times), max(times)]
        return found

    def _image_problem(self, encoded: bytes, feature: Feature) -> str:
        if feature.encoding == "raw":
            height, width, channels = feature.shape
            if height and width and channels and len(encoded) != height * width * channels:
                return f"has {len(encoded):,} bytes, not {height} x {width} x {channels}"
            return ""
        header = read_header(encoded)
        if header is None or feature.encoding not in ("image", header.encoding):
            return f"cannot be decoded as {feature.encoding}: it begins as another file"
        try:
            check_file(encoded, header, deep=self._deep)
        except UnreadableError as fault:
            return f"cannot be decoded as {feature.encoding}: {fault}"
        found, expected = (header.height, header.width), feature.shape[:2]
        if any(side not in (None, side_found) for side, side_found in zip(expected, found, strict=True)):
            return f"has {found[0]} x {found[1]} pixels, the manifest says {expected[0]} x {expected[1]}"
        return ""
