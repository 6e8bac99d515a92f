"""The same work for every shard of a dataset, in several processes.

The records of a finished shard as values.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardline.components.preprocess.records.example import parse
from shardline.components.preprocess.records.reader import read_records
from shardline.components.text import size
from shardline.trainer import progress
from shardline.trainer.data.manifest import Manifest, Shard
from shardline.trainer.errors import BadRecordError, SettingsError, SourceError

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")


def each_shard(
    work: Callable[[Path, Shard, _Given], _Found],
    directory: Path,
    manifest: Manifest,
    given: _Given,
    *,
    topic: str,
    processes: int = 0,
) -> dict[str, _Found]:
    """Calls `work(directory, shard, given)` for every shard and returns what it found, by file.

    Args:
        work: A function of a module.
        directory: The dataset directory.
        manifest: Its manifest.
        given: The same for all shards.
        topic: Under which progress is reported.
        processes: How many processes work; 0 for one per core. One works in this process.

    Raises:
        SettingsError: `processes` is negative.
    """
    if processes < 0:
        raise SettingsError(f"processes must be at least 1, or 0 for one per core, not {processes}")
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    call = functools.partial(_call, work, directory, given)
    processes = min(processes or len(os.sched_getaffinity(0)), len(shards))
    found: dict[str, _Found] = {}
    for done in _report(_run(call, shards, processes), shards, topic):
        found[done[0]] = done[1]
    return found


def _call(
    work: Callable[[Path, Shard, _Given], _Found], directory: Path, given: _Given, shard: Shard
) -> tuple[str, _Found]:
    return shard.file, work(directory, shard, given)


def _run(
    call: Callable[[Shard], tuple[str, _Found]], shards: Sequence[Shard], processes: int
) -> Iterator[tuple[str, _Found]]:
    if processes <= 1:
        yield from map(call, shards)
        return
    # A forked process would inherit the threads of a progress bar in the middle of what they do.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(call, shards)


def _report(
    found: Iterator[tuple[str, _Found]], shards: Sequence[Shard], topic: str
) -> Iterator[tuple[str, _Found]]:
    by_file = {shard.file: shard for shard in shards}
    total, records, read, started = sum(shard.records for shard in shards), 0, 0, time.monotonic()
    for item in found:
        records += by_file[item[0]].records
        read += by_file[item[0]].bytes
        rate = read / max(time.monotonic() - started, 1e-9)
        progress.advance(topic, records, total, "records", f"{size(rate)}/s")
        yield item


#: The features of an example by name: the kind ("bytes", "int64", "float") and the values.
Values = Mapping[str, tuple[str, Sequence[Any]]]


def read_values(path: Path, compression: str) -> Iterator[tuple[int, Values | str]]:
    """Yields every record of a shard: its size in bytes, and its features or what is wrong with it.

    Raises:
        SourceError: The rest of the shard cannot be read: it is cut off, or where the next record starts is
            damaged.
    """
    damaged: list[BadRecordError] = []

    def drain() -> Iterator[tuple[int, str]]:
        while damaged:
            yield 0, damaged.pop(0).reason

    try:
        for record in read_records(path, compression=compression, on_damage=damaged.append):
            yield from drain()
            try:
                yield len(record.data), parse(record.data)
            except ValueError as error:  # UnicodeDecodeError is one too
                yield len(record.data), str(error)
    except SourceError:
        yield from drain()
        raise
    yield from drain()
