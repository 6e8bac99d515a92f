"""The same work for every shard of a dataset, in several processes."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from shardline.components.preprocess.inspect.text import size
from shardline.trainer import progress
from shardline.trainer.data.manifest import Manifest, Shard
from shardline.trainer.errors import SettingsError

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
