"""The records of a finished shard as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardline.components.preprocess.records.example import parse
from shardline.components.preprocess.records.reader import read_records
from shardline.trainer.errors import BadRecordError, SourceError

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
