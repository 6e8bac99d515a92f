"""Preprocessing from end to end: a source string becomes a dataset directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.preprocess import directory, image, plan
from components.preprocess.example import serialize
from components.preprocess.meter import Meter
from components.preprocess.sources import open_source
from components.preprocess.spool import Spool
from components.preprocess.survey import Record, Survey, survey
from components.preprocess.writer import write_shard
from trainer import progress
from trainer.data import manifest as manifests
from trainer.data.manifest import Feature, Manifest, Split
from trainer.errors import SettingsError

if TYPE_CHECKING:
    from kfp import dsl

_TOPIC = "preprocess"


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """How a source becomes shards.

    Attributes:
        source: The source string (see `open_source`).
        data_dir: Directory with prepared TensorFlow Datasets; "" for their default directory.
        image_size: Side of the stored square images in pixels, 4..4096; 0 stores images as they are.
        readers: Input workers that will read the dataset; shards per split are a multiple of it.
        shards: About how many shards the training split gets; smaller splits get fewer.
        seed: Salt of the hashes that choose the split and the order of the examples.

    Raises:
        SettingsError: A value is of the wrong type or out of range.
    """

    source: str
    data_dir: str = ""
    image_size: int = 0
    readers: int = 1
    shards: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("source", "data_dir"):
            if not isinstance(getattr(self, name), str):
                raise SettingsError(f"{name} must be text, not {getattr(self, name)!r}")
        for name in ("image_size", "readers", "shards", "seed"):
            if type(getattr(self, name)) is not int:
                raise SettingsError(f"{name} must be a whole number, not {getattr(self, name)!r}")
        for name in ("readers", "shards"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.image_size and not image.SMALLEST <= self.image_size <= image.LARGEST:
            raise SettingsError(
                f"image_size must be {image.SMALLEST}..{image.LARGEST} pixels, or 0 to keep the images as "
                f"they are, not {self.image_size}"
            )


def preprocess(settings: PreprocessSettings, out: Path) -> Manifest:
    """Writes a source as a dataset directory: balanced TFRecord shards, then their manifest.

    The same source and settings give the same bytes. On any failure `out` stays as it was.

    Args:
        settings: What to read, and how it becomes shards.
        out: A directory that is missing, empty, or holds a Shardline dataset, which is then replaced.

    Raises:
        SettingsError: `out` cannot be used.
        SourceError: The source, or one of its examples, cannot be used.
        RunError: Writing failed.
    """
    directory.check(out)
    with Spool() as spool:
        found = survey(open_source(settings.source, data_dir=settings.data_dir), spool)
        image_feature = image.choose_feature(found.headers, settings.image_size)
        planned = plan.make_plan(
            [record.key for record in found.records],
            [record.split for record in found.records],
            readers=settings.readers,
            shards=settings.shards,
            seed=settings.seed,
        )
        with directory.staging(out) as staging:
            splits = _write(planned, found, image_feature, spool, staging)
            manifest = _describe(settings, found, image_feature, splits)
            manifests.save(manifest, staging)
    _report(manifest)
    return manifest


def preprocess_artifact(
    dataset: dsl.Dataset,
    metrics: dsl.Metrics,
    *,
    source: str,
    data_dir: str,
    image_size: int,
    readers: int,
    seed: int,
) -> None:
    """Writes a source into a Kubeflow Dataset artifact and records what is in it.

    The artifact's metadata gets `fingerprint`, `classes` and the records of each split
    (`train_records`, ...); the metrics get the records.

    Raises:
        SystemExit: With the error's exit code, after its one line was reported.
    """
    with progress.errors_end_the_process(_TOPIC):
        settings = PreprocessSettings(
            source=source, data_dir=data_dir, image_size=image_size, readers=readers, seed=seed
        )
        manifest = preprocess(settings, Path(dataset.path))
    records = {f"{name}_records": split.records for name, split in manifest.splits.items()}
    dataset.metadata.update(fingerprint=manifest.fingerprint, classes=len(manifest.class_names), **records)
    for name, value in records.items():
        metrics.log_metric(name, value)


def _write(
    planned: Mapping[str, Sequence[plan.PlannedShard]],
    found: Survey,
    image_feature: Feature,
    spool: Spool,
    into: Path,
) -> dict[str, Split]:
    """Writes all shards and returns the splits for the manifest."""
    meter = Meter("written", len(found.records))

    def serialized(members: Sequence[int]) -> Iterator[bytes]:
        for index in members:
            yield _serialize(found.records[index], image_feature, spool)
            meter.tick()

    return {
        name: Split(
            shards=tuple(write_shard(into / shard.file, serialized(shard.members)) for shard in shards),
            class_counts=_count_classes(shards, found),
        )
        for name, shards in planned.items()
    }


def _serialize(record: Record, image_feature: Feature, spool: Spool) -> bytes:
    encoded = record.image if isinstance(record.image, Path) else spool.read(record.image)
    return serialize(
        {
            "image": image.stored_bytes(encoded, image_feature, record.key),
            "key": record.key.encode("utf-8", "surrogateescape"),
            "label": record.label,
        }
    )


def _count_classes(shards: Sequence[plan.PlannedShard], found: Survey) -> tuple[int, ...]:
    counts = [0] * len(found.class_names)
    for shard in shards:
        for index in shard.members:
            counts[found.records[index].label] += 1
    return tuple(counts)


def _describe(
    settings: PreprocessSettings, found: Survey, image_feature: Feature, splits: Mapping[str, Split]
) -> Manifest:
    features = (image_feature, Feature("label", "int64"), Feature("key", "string"))
    recorded = {
        "image_size": settings.image_size,
        "readers": settings.readers,
        "shards": settings.shards,
        "split": dict(plan.SHARES),
        "seed": settings.seed,
    }
    return Manifest(
        fingerprint=_fingerprint(found.class_names, features, splits),
        source=settings.source,
        settings=recorded,
        class_names=found.class_names,
        features=features,
        splits=splits,
    )


def _fingerprint(class_names: Sequence[str], features: Sequence[Feature], splits: Mapping[str, Split]) -> str:
    """Returns the identity of a dataset: its bytes and what they mean.

    Settings are in it by their effect on the bytes; where the source lies, when and by whom it was read
    are not. Checksum, size and number of records stand for the bytes of a shard.
    """
    content = {
        "class_names": class_names,
        "features": [asdict(feature) for feature in features],
        "shards": [asdict(shard) for split in splits.values() for shard in split.shards],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _report(manifest: Manifest) -> None:
    splits = manifest.splits
    total = sum(split.records for split in splits.values())
    first, *rest = (f"{name} {split.records:,} in {len(split.shards)}" for name, split in splits.items())
    shards = ", ".join([f"{first} shards", *rest])
    progress.say(_TOPIC, f"{total:,} records of {len(manifest.class_names)} classes: {shards}")
    progress.fact("dataset", manifest.fingerprint)
    progress.fact("records", total, " / ".join(f"{name} {split.records:,}" for name, split in splits.items()))
