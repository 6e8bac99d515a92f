"""Handover: a plan that one machine makes and others write, through a bucket that all of them see.

    plan.json   the plan
    rows.pack   a line of JSON, the lengths of the rows of each shard, and behind it the rows themselves
    spool       images of sources that can be read only once

Where the dataset is on a disk, all see the plan where it was made, and nothing is handed over.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from shardline.components.preprocess import storage
from shardline.components.preprocess.plan import Plan
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer import files
from shardline.trainer.errors import RunError

_BLOCK = 1 << 20


def put(plan: Plan, work: WorkDirectory) -> None:
    """Brings a plan to where others find it; the plan itself last."""
    if not work.is_far:
        return
    (work.path / work.plan.name).unlink(missing_ok=True)  # one that these rows are not of
    lengths = {shard.file: work.rows(shard.file).stat().st_size for shard in plan.shards}
    pack = _pack(work.scratch)
    with pack.open("wb") as file:
        file.write(json.dumps(lengths).encode() + b"\n")
        for name in lengths:
            file.write(work.rows(name).read_bytes())
    for path in (pack, work.spool, work.identities, work.rejected, work.plan):
        if path.exists():
            storage.upload(path, work.path / path.name)


def get(work: WorkDirectory) -> Plan:
    """Returns the plan; RunError if there is none."""
    if not work.is_far:
        return Plan.load(work.plan)
    for directory in (work.rows("x").parent, work.done):
        directory.mkdir(exist_ok=True)
    for path in (work.plan, work.identities, work.rejected):
        _fetch(work, path)
    plan = Plan.load(work.plan)
    if any(place.kind == "spool" for place in plan.places):
        _fetch(work, work.spool)
    return plan


def get_rows(work: WorkDirectory, shards: Collection[str]) -> None:
    """Brings the rows of some shards to this machine."""
    missing = {shard for shard in shards if not work.rows(shard).exists()} if work.is_far else set()
    if not missing:
        return
    pack = _pack(work.path)
    with ExitStack() as stack:
        source = stack.enter_context(storage.open_read(str(pack)))
        line = source.readline(files.MAX_TEXT_BYTES)
        offset = len(line)
        for name, length in files.parse_json(line, str(pack), RunError).items():
            if name in missing:
                source.seek(offset)
                data = source.read(length)
                if len(data) < length:
                    raise RunError(f"{pack} was cut off; plan the dataset again")
                work.rows(Path(name).name).write_bytes(data)
            offset += length


def _pack(directory: Path) -> Path:
    return directory / "rows.pack"


def _fetch(work: WorkDirectory, path: Path) -> None:
    there = work.path / path.name
    if not path.exists() and there.exists():
        storage.fetch(str(there), str(path))
