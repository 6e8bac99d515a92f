"""Whether a dataset directory is what its manifest says: every file, every record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardline.components.preprocess.inspect.check import Damage, Expected, ShardCheck, check_shard
from shardline.components.preprocess.inspect.pool import each_shard
from shardline.components.preprocess.inspect.text import size
from shardline.components.preprocess.work_directory import REJECTED_FILE
from shardline.trainer.data import manifest as manifests
from shardline.trainer.data.manifest import MANIFEST_FILE, Manifest, Split


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
