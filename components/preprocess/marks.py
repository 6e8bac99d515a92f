"""Marks: what says that a shard is done, beside the hashes of what is in it.

    NAME.mark  a line of JSON, the facts about one or more shards, and behind it their hashes

One that was cut off, or is of another plan, says nothing. On a mounted bucket, where each file is a request
or two, the marks of a few seconds share one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from shardline.components.preprocess import storage
from shardline.components.preprocess.images.codec import Kind
from shardline.components.preprocess.plan import Plan
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.trainer import files, records
from shardline.trainer.data.features import Feature, Tally
from shardline.trainer.data.manifest import Shard
from shardline.trainer.errors import RunError

#: Bytes of the hash of one record's content.
HASH_BYTES = 8

_SECONDS_TOGETHER = 5.0
_BLOCK = HASH_BYTES * 4096


@dataclass(frozen=True)
class Images:
    """Properties that the stored images of one or more shards have in common.

    A height or width is None where they differ, `channels` the largest number of channels, 0 without images.
    `converted` counts images by what was done to them.
    """

    height: int | None = None
    width: int | None = None
    channels: int = 0
    encodings: tuple[str, ...] = ()
    converted: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def merge(cls, parts: Sequence[Images]) -> Images:
        """Returns the common properties of several groups of images."""
        converted: Counter[str] = Counter()
        for part in parts:
            converted.update(part.converted)
        heights, widths = {part.height for part in parts}, {part.width for part in parts}
        return cls(
            heights.pop() if len(heights) == 1 else None,
            widths.pop() if len(widths) == 1 else None,
            max((part.channels for part in parts), default=0),
            tuple(sorted({encoding for part in parts for encoding in part.encodings})),
            dict(sorted(converted.items())),
        )

    @classmethod
    def of(cls, kinds: Mapping[Kind, int]) -> Images:
        """Returns the common properties of images, given how many there are of each kind."""
        return cls.merge(
            [
                cls(height, width, channels, (encoding,), dict.fromkeys(converted, count))
                for (height, width, channels, encoding, converted), count in kinds.items()
            ]
        )

    def feature(self, resize: str) -> Feature:
        """Returns the feature of the manifest."""
        encoding = self.encodings[0] if len(self.encodings) == 1 else "image"
        return Feature("image", "uint8", (self.height, self.width, self.channels), encoding, resize)


@dataclass(frozen=True)
class Mark:
    """Facts about a shard that is done.

    With another `identity` than its plan gives (`Plan.identity`), it is not done. `surveyed` is the start of
    the survey of that plan, in nanoseconds since the epoch.
    """

    identity: str
    surveyed: int
    shard: Shard
    labels: Mapping[str, Tally]
    images: Images


@dataclass(frozen=True)
class Found:
    """A mark that was found: the file that it is in, and where in it the shard's hashes are."""

    mark: Mark
    path: Path
    offset: int

    def hashes(self) -> Iterator[bytes]:
        """Yields the hashes, one behind the other, in blocks."""
        return blocks(self.path, self.offset, HASH_BYTES * self.mark.shard.records)


class Marks:
    """Marks of the shards that this process finishes, from any thread. A context manager."""

    def __init__(self, work: WorkDirectory) -> None:
        self._work = work
        self._pending: list[tuple[Mark, bytes]] = []
        self._lock = threading.Lock()
        self._saved = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What is done stays done, whatever else went wrong.
        with self._lock:
            self._save()

    def add(self, mark: Mark, hashes: bytes) -> None:
        """Marks a shard that lies whole where it belongs."""
        with self._lock:
            self._pending.append((mark, hashes))
            if not self._work.is_far or time.monotonic() - self._saved >= _SECONDS_TOGETHER:
                self._save()

    def _save(self) -> None:
        marks, self._pending, self._saved = self._pending, [], time.monotonic()
        if not marks:
            return
        facts = json.dumps([asdict(mark) for mark, _ in marks])
        path = self._work.done / f"{marks[0][0].shard.file}.mark"
        files.write_bytes(path, b"".join((facts.encode(), b"\n", *(hashes for _, hashes in marks))))
        if self._work.is_far:
            storage.upload(path, self._work.path / path.name)


def load(work: WorkDirectory) -> Mapping[str, Sequence[Found]]:
    """Returns all marks that can be read, by the file of their shard.

    Those that were brought from a bucket and cannot are forgotten, so that they are brought again.
    """
    found: dict[str, list[Found]] = {}
    for path in work.marks():
        in_file = _read(path)
        for each in in_file:
            found.setdefault(each.mark.shard.file, []).append(each)
        if not in_file and work.is_far:
            path.unlink(missing_ok=True)
    return found


def forget_others(plan: Plan, work: WorkDirectory) -> None:
    """Removes the marks of shards that another plan wanted, before they are written anew."""
    identities = {shard.file: plan.identity(shard) for shard in plan.shards}
    for path in work.marks():
        found = _read(path)
        wanted = [each for each in found if each.mark.identity == identities.get(each.mark.shard.file)]
        if len(wanted) < len(found) or not found:
            pairs = [(each.mark, b"".join(each.hashes())) for each in wanted]
            for copy in {path, work.path / path.name}:
                copy.unlink(missing_ok=True)
            if pairs:
                with Marks(work) as marks:
                    for mark, hashes in pairs:
                        marks.add(mark, hashes)


def blocks(path: Path, offset: int = 0, length: int = sys.maxsize) -> Iterator[bytes]:
    """Yields a part of a file of hashes, in blocks of whole ones."""
    with path.open("rb") as file:
        file.seek(offset)
        while length and (block := file.read(min(_BLOCK, length))):
            yield block
            length -= len(block)


def _read(path: Path) -> list[Found]:
    try:
        with path.open("rb") as file:
            line, size = file.readline(files.MAX_TEXT_BYTES), os.fstat(file.fileno()).st_size
        facts = files.parse_json(line, str(path), RunError)
        marks = [records.restore(Mark, each, str(path), RunError) for each in facts]
    except (OSError, RunError, TypeError, ValueError):
        return []
    found, offset = [], len(line)
    for mark in marks:
        found.append(Found(mark, path, offset))
        offset += HASH_BYTES * mark.shard.records
    return found if size == offset else []
