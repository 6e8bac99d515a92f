"""Inspection of a finished dataset directory: its manifest, profile, card and verification.

It loads no TensorFlow and writes nothing.

It may import all of `preprocess` but the tasks at its top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardline.components.preprocess.example import KINDS, decode
from shardline.components.preprocess.process_pool import Report
from shardline.components.preprocess.tfrecord import Record, read_records
from shardline.trainer.base.errors import BadRecordError, DatasetError, SourceError
from shardline.trainer.base.progress import Meter
from shardline.trainer.manifest import Feature, Manifest, Shard

# Most records of a batch, and bytes after which it ends.
_ROWS, _BYTES = 256, 4 << 20
# Records of a sample, and bytes after which it ends.
_SAMPLE, _SAMPLE_BYTES = 2_000, 128 << 20

#: The values of each feature in some records, as lists of the feature's length.
Columns = Mapping[str, Any]


class Batch(NamedTuple):
    """Successive records of a shard.

    Attributes:
        columns: Values of the records that have what the manifest says.
        rows: Numbers of these in the batch.
        faults: What is wrong with the others, by their numbers.
        bytes: Size of all.
    """

    columns: Columns
    rows: Sequence[int]
    faults: dict[int, str]
    bytes: int


def read_batches(
    path: Path, features: Sequence[Feature], report: Report | None = None, most: int | None = None
) -> Iterator[Batch]:
    """Yields the records of a shard, or the first `most`.

    Raises SourceError where the rest of the shard cannot be read: it is cut off, or a length is damaged.
    """
    records = islice(read_records(path), most)
    while True:
        found, size, failure = list[Record | BadRecordError](), 0, None
        try:
            while len(found) < _ROWS and size < _BYTES and (record := next(records, None)):
                found.append(record)
                size += len(_data(record))
        except SourceError as error:
            failure = error
        if found:
            yield _make_batch(found, features, size)
        if report:
            report(len(found), size)
        if failure or not found:
            break
    if failure:
        raise failure


def _data(record: Record | BadRecordError) -> bytes:
    return b"" if isinstance(record, BadRecordError) else record.data


def _make_batch(found: Sequence[Record | BadRecordError], features: Sequence[Feature], size: int) -> Batch:
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds = {feature.name: KINDS[feature.dtype] for feature in features}
    columns, faults = decode(list(map(_data, found)), kinds)
    faults |= {row: each.reason for row, each in enumerate(found) if isinstance(each, BadRecordError)}
    for feature in features:
        name, expected = feature.name, width(feature)
        lengths = pc.list_value_length(columns[name]).fill_null(-1).to_numpy()
        for row in np.flatnonzero(lengths != expected).tolist():
            has = f"feature {name!r} has {lengths[row]} values, not {expected}"
            faults.setdefault(row, has if lengths[row] >= 0 else f"has no feature {name!r}")
    for name in sorted(columns.keys() - kinds):
        for row in np.flatnonzero(columns.pop(name).is_valid()).tolist():
            faults.setdefault(row, f"has a feature {name!r} that the manifest does not name")
    rows = [row for row in range(len(found)) if row not in faults]
    sound = pa.array(rows, pa.int64())
    return Batch({name: column.take(sound) for name, column in columns.items()}, rows, faults, size)


def read_sample(
    directory: Path, manifest: Manifest, shards: Sequence[Shard], *, whole: bool = False
) -> Iterator[Columns]:
    """Yields the first records of up to 16 shards, about 2,000 in all, of large ones fewer; or the whole.

    They are a random sample, as shards are written in the order of hashes. Raises DatasetError if a shard
    cannot be read.
    """
    report, most = Meter("read", manifest.records, topic="dataset").advance if whole else None, None
    if not whole:
        shards = shards[:: -(-len(shards) // 16)]  # remote ones cost some requests each
        most = -(-_SAMPLE // len(shards))
    for shard in shards:
        size = 0
        try:
            for batch in read_batches(directory / shard.file, manifest.features, report, most):
                for fault in batch.faults.values():
                    raise SourceError(f"a record {fault}")
                yield batch.columns
                size += batch.bytes
                if not whole and size >= _SAMPLE_BYTES // len(shards):
                    break
        except (SourceError, OSError) as error:
            raise DatasetError(
                f"cannot read {shard.file}: {error}; 'shardline dataset verify {directory}' lists all damage"
            ) from None


def width(feature: Feature) -> int:
    """Returns how many values a feature has in a record."""
    return 1 if feature.encoding else math.prod(side or 1 for side in feature.shape)


def text(value: bytes | float) -> str:
    """Returns a value of a feature as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else f"{value:g}"
