"""Inspection of a finished dataset directory: its manifest, profile, card and verification.

It loads no TensorFlow and writes nothing.

It may import all of `preprocess` but the tasks at its top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from shardline.components.preprocess.example import parse
from shardline.components.preprocess.process_pool import Report
from shardline.components.preprocess.tfrecord import read_records
from shardline.trainer.base.errors import BadRecordError, DatasetError, SourceError
from shardline.trainer.data.manifest import Shard

#: How values are stored, by the type of their feature.
KINDS = {"uint8": "bytes", "string": "bytes", "int64": "int64", "float32": "float"}

#: The features of an example by name: the kind ("bytes", "int64", "float") and the values.
Values = Mapping[str, tuple[str, Sequence[Any]]]


def read_values(path: Path, report: Report | None = None) -> Iterator[tuple[int, Values | str]]:
    """Yields the size in bytes of every record of a shard, and its features or what is wrong with it.

    Raises SourceError where the rest of the shard cannot be read: it is cut off, or a length is damaged.
    """
    count = size = 0
    for record in read_records(path):
        if isinstance(record, BadRecordError):
            yield 0, record.reason
            continue
        try:
            yield len(record.data), parse(record.data)
        except ValueError as error:  # UnicodeDecodeError is one too
            yield len(record.data), str(error)
        count += 1
        size += len(record.data)
        if report and count == 256:
            report(count, size)
            count = size = 0
    if report:
        report(count, size)


def first_records(
    path: Path, shards: Sequence[Shard], *, records: int = 0, max_bytes: int = 0, report: Report | None = None
) -> Iterator[Values]:
    """Yields the first records of up to 16 shards, about `records` in all, of large ones fewer; or all.

    They are a random sample, as shards are written in the order of hashes. Each shard is read up to its share
    of `max_bytes`. Raises DatasetError if one cannot be read.
    """
    if records:
        shards = shards[:: -(-len(shards) // 16)]  # remote ones cost some requests each
    most = -(-records // len(shards)) or None
    for shard in shards:
        bytes_left = max(1, max_bytes // len(shards))
        try:
            for size, values in islice(read_values(path / shard.file, report), most):
                if isinstance(values, str):
                    raise SourceError(values)
                yield values
                bytes_left -= size
                if records and bytes_left < 0:
                    break
        except (SourceError, OSError) as error:
            raise DatasetError(
                f"cannot read {shard.file}: {error}; 'shardline dataset verify {path}' lists all damage"
            ) from None


def text(value: bytes | float) -> str:
    """Returns a value of a feature as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else f"{value:g}"
