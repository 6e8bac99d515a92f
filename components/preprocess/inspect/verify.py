"""Whether a dataset directory is what its manifest says: every file, every record.

One shard compared with what the manifest says of it.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from shardline.components.preprocess.inspect.pool import Values, each_shard, read_values
from shardline.components.preprocess.work_directory import REJECTED_FILE
from shardline.components.text import printable, size
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import MANIFEST_FILE, Feature, Manifest, Shard, Split
from shardline.trainer.errors import SourceError

_BLOCK = 1 << 20

#: Of one shard, not more damaged records than these are listed one by one.
MOST_LISTED = 10

_KINDS = {"uint8": "bytes", "string": "bytes", "int64": "int64", "float32": "float"}


@dataclass(frozen=True)
class Damage:
    """One thing that is not as the manifest says.

    Attributes:
        file: Name of the file inside the dataset directory.
        record: Number of the record in it, from 0, or None where the file as a whole is meant.
        what: What is wrong with it.
    """

    file: str
    record: int | None
    what: str

    def __str__(self) -> str:
        where = "" if self.record is None else f", record {self.record:,}"
        return printable(f"{self.file}{where}: {self.what}")


@dataclass(frozen=True)
class Expected:
    """What every shard of a dataset must fulfil.

    Attributes:
        features: That every example has, one value each.
        classes: Labels are 0..classes-1.
        compression: "" or "gzip".
        deep: Whether images are decoded.
        names: The manifest's file by size and checksum, to tell an exchanged shard from a damaged one.
    """

    features: tuple[Feature, ...]
    classes: int
    compression: str
    deep: bool
    names: Mapping[tuple[int, str], str]


@dataclass(frozen=True)
class ShardCheck:
    """What was found in a shard.

    Attributes:
        records: Number of sound records.
        bytes: Size of the file.
        class_counts: Sound records by label.
        damages: What is wrong.
    """

    records: int
    bytes: int
    class_counts: tuple[int, ...]
    damages: tuple[Damage, ...]


def check_shard(directory: Path, shard: Shard, expected: Expected) -> ShardCheck:
    """Reads a shard twice, as bytes and as records, and lists all that is wrong with it."""
    counts = [0] * expected.classes
    damages: list[Damage] = []
    path, size = directory / shard.file, 0
    try:
        size = path.stat().st_size
        damages += _check_file(path, size, shard, expected)
        damages += _check_records(path, shard, expected, counts)
    except FileNotFoundError:
        damages.append(Damage(shard.file, None, "is missing"))
    except OSError as error:
        damages.append(Damage(shard.file, None, f"cannot be read: {error.strerror or error}"))
    return ShardCheck(sum(counts), size, tuple(counts), tuple(damages))


def _check_file(path: Path, size: int, shard: Shard, expected: Expected) -> Iterator[Damage]:
    checksum = f"{_checksum(path):08x}"
    if (size, checksum) == (shard.bytes, shard.crc32c):
        return
    other = expected.names.get((size, checksum))
    if other:
        yield Damage(shard.file, None, f"holds the bytes of {other}")
        return
    if size != shard.bytes:
        yield Damage(shard.file, None, f"has {size:,} bytes, the manifest says {shard.bytes:,}")
    if checksum != shard.crc32c:
        yield Damage(shard.file, None, f"has the CRC-32C {checksum}, the manifest says {shard.crc32c}")


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum = google_crc32c.extend(checksum, block)
    return int(checksum)


def _check_records(path: Path, shard: Shard, expected: Expected, counts: list[int]) -> Iterator[Damage]:
    """Yields the damage of single records and counts the labels of the sound ones."""
    number = listed = unlisted = 0
    try:
        for _, values in read_values(path, expected.compression):
            if isinstance(values, str):
                problem = values
            elif not (problem := _problem(values, expected)):
                counts[values["label"][1][0]] += 1
                number += 1
                continue
            if listed < MOST_LISTED:
                listed += 1
                yield Damage(shard.file, number, problem)
            else:
                unlisted += 1
            number += 1
    except SourceError as error:
        # Where a record ends is no longer known: the rest of the shard cannot be read.
        yield Damage(shard.file, number, str(error).rpartition(f"record {number}: ")[2])
        return
    if unlisted:
        yield Damage(shard.file, None, f"has {unlisted:,} more damaged records")
    if number != shard.records:
        yield Damage(shard.file, None, f"holds {number:,} records, the manifest says {shard.records:,}")


def _problem(values: Values, expected: Expected) -> str:
    """Returns what is wrong with an example, or ""."""
    for feature in expected.features:
        kind, found = values.get(feature.name, ("", ()))
        if not kind:
            return f"has no feature {feature.name!r}"
        if kind != _KINDS[feature.dtype] or len(found) != 1:
            return f"feature {feature.name!r} holds {len(found)} values of {kind}, not one of {feature.dtype}"
    extra = values.keys() - {feature.name for feature in expected.features}
    if extra:
        return f"has a feature {min(extra)!r} that the manifest does not name"
    label = values["label"][1][0]
    if not 0 <= label < expected.classes:
        return f"label {label} is no class, they are 0..{expected.classes - 1}"
    if not values["key"][1][0]:
        return "has an empty key"
    for feature in expected.features:
        if feature.encoding and (
            problem := _image_problem(values[feature.name][1][0], feature, expected.deep)
        ):
            return f"{feature.name} {problem}"
    return ""


def _image_problem(encoded: bytes, feature: Feature, deep: bool) -> str:
    if feature.encoding == "raw":
        height, width, channels = feature.shape
        if height and width and channels and len(encoded) != height * width * channels:
            return f"has {len(encoded):,} bytes, not {height} x {width} x {channels}"
        return ""
    return _decoding_problem(encoded, feature) if deep else ""


def _decoding_problem(encoded: bytes, feature: Feature) -> str:
    from PIL import Image

    formats = ("JPEG", "PNG") if feature.encoding == "image" else (feature.encoding.upper(),)
    try:
        with warnings.catch_warnings():
            # Its size was accepted when it was written.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(encoded), formats=formats) as image:
                image.load()
                width, height = image.size
    except Exception as failure:  # Pillow's decoders raise OSError, SyntaxError, ValueError and more
        return f"cannot be decoded as {feature.encoding}: {failure}".replace(repr(encoded), "")
    if feature.shape[0] not in (None, height) or feature.shape[1] not in (None, width):
        return f"has {height} x {width} pixels, the manifest says {feature.shape[0]} x {feature.shape[1]}"
    return ""


@dataclass(frozen=True)
class Verification:
    """What was found.

    Attributes:
        shards: Number of shards that the manifest names.
        records: Number of records that were read and are sound.
        bytes: Size of all shards that are there.
        damages: Everything that is not as the manifest says, by file.
    """

    shards: int
    records: int
    bytes: int
    damages: tuple[Damage, ...]

    @property
    def damaged_files(self) -> tuple[str, ...]:
        """Names of the files with damage, each once."""
        return tuple(dict.fromkeys(damage.file for damage in self.damages))

    def summary(self) -> str:
        """Returns the verdict as one line."""
        read = f"{self.records:,} records in {self.shards:,} shards, {size(self.bytes)}"
        if not self.damages:
            return f"sound: {read}"
        return f"damaged: {', '.join(self.damaged_files)}; {read} are sound"

    def to_json(self) -> dict[str, Any]:
        """Returns the same for a program."""
        return {"sound": not self.damages} | asdict(self)


def verify(directory: Path, *, deep: bool = False, processes: int = 0) -> Verification:
    """Reads every record of every shard and compares all of it with the manifest.

    Checked are the size and CRC-32C of each file, the CRC-32Cs of each record, that it parses as an
    Example with exactly the manifest's features, one value each, that the label is a class, the number
    of records by shard and class, and that no file is missing or left over. Damage does not end it: all
    shards are read.

    Args:
        directory: A dataset directory.
        deep: Whether every image is decoded as well.
        processes: How many processes read; 0 for one per core.

    Raises:
        DatasetError: There is no manifest that can be read.
    """
    manifest = manifests.load(directory)
    expected = Expected(
        features=manifest.features,
        classes=len(manifest.class_names),
        compression=manifest.compression,
        deep=deep,
        names={(s.bytes, s.crc32c): s.file for split in manifest.splits.values() for s in split.shards},
    )
    checks = each_shard(check_shard, directory, manifest, expected, topic="verify", processes=processes)
    damages = list(_check_manifest(manifest))
    for name, split in manifest.splits.items():
        for shard in split.shards:
            damages += checks[shard.file].damages
        damages += _check_classes(name, split, checks, manifest.class_names)
    damages += _check_rejected(directory, manifest)
    damages += _check_extra_files(directory, manifest)
    return Verification(
        shards=len(checks),
        records=sum(check.records for check in checks.values()),
        bytes=sum(check.bytes for check in checks.values()),
        damages=tuple(damages),
    )


def _check_manifest(manifest: Manifest) -> Iterator[Damage]:
    """Yields what contradicts itself in the manifest."""
    written = sum(split.records for split in manifest.splits.values())
    rejected = sum(manifest.rejected.values())
    if manifest.records_in != written + rejected:
        yield Damage(
            MANIFEST_FILE,
            None,
            f"says {manifest.records_in:,} records went in, {written:,} were written, {rejected:,} rejected",
        )
    for name, split in manifest.splits.items():
        sizes = [shard.records for shard in split.shards]
        if sizes and (sizes != sorted(sizes, reverse=True) or sizes[0] - sizes[-1] > 1):
            yield Damage(
                MANIFEST_FILE,
                None,
                f"says the shards of {name} have {max(sizes):,} to {min(sizes):,} records; "
                "they must differ by at most one, the longer ones first",
            )
        if len(split.class_counts) != len(manifest.class_names) or sum(split.class_counts) != split.records:
            yield Damage(
                MANIFEST_FILE,
                None,
                f"says {name} has {split.records:,} records, but {sum(split.class_counts):,} in "
                f"{len(split.class_counts):,} of {len(manifest.class_names):,} classes",
            )


def _check_classes(
    name: str, split: Split, checks: Mapping[str, ShardCheck], class_names: tuple[str, ...]
) -> Iterator[Damage]:
    """Yields the first class whose count is not the manifest's, where all shards of the split are sound."""
    mine = [checks[shard.file] for shard in split.shards]
    if any(check.damages for check in mine):
        return
    counts = [sum(column) for column in zip(*(check.class_counts for check in mine), strict=True)]
    for class_name, found, said in zip(class_names, counts, split.class_counts, strict=False):
        if found != said:
            yield Damage(
                MANIFEST_FILE,
                None,
                f"says class {class_name!r} has {said:,} records in {name}, the shards hold {found:,}",
            )
            return


def _check_rejected(directory: Path, manifest: Manifest) -> Iterator[Damage]:
    said = sum(manifest.rejected.values())
    path = directory / REJECTED_FILE
    if not said and not path.exists():
        return
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        yield Damage(REJECTED_FILE, None, f"is missing; the manifest says {said:,} were rejected")
    except (OSError, ValueError) as error:
        yield Damage(REJECTED_FILE, None, f"cannot be read: {error}")
    else:
        if len(lines) != said:
            yield Damage(
                REJECTED_FILE, None, f"names {len(lines):,}, the manifest says {said:,} were rejected"
            )


def _check_extra_files(directory: Path, manifest: Manifest) -> Iterator[Damage]:
    named = {shard.file for split in manifest.splits.values() for shard in split.shards}
    for path in sorted(directory.iterdir()):
        if path.name not in named | {MANIFEST_FILE, REJECTED_FILE}:
            yield Damage(path.name, None, "is not named in the manifest")
