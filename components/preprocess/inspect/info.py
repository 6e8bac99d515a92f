"""What the manifest says, without opening a shard."""

from __future__ import annotations

from typing import Any

from shardline.components.preprocess.inspect import text
from shardline.trainer.data.manifest import Feature, Manifest

_MOST_NAMED = 10


def describe(manifest: Manifest) -> dict[str, Any]:
    """Returns the sum of a dataset for a program: no list in it grows with the data but the class names."""
    return {
        "source": manifest.source,
        "fingerprint": manifest.fingerprint,
        "features": {
            feature.name: {
                "dtype": feature.dtype,
                "shape": list(feature.shape),
                "encoding": feature.encoding,
                "resize": feature.resize,
            }
            for feature in manifest.features
        },
        "class_names": list(manifest.class_names),
        "splits": {
            name: {
                "records": split.records,
                "shards": len(split.shards),
                "bytes": sum(shard.bytes for shard in split.shards),
                "class_counts": list(split.class_counts),
            }
            for name, split in manifest.splits.items()
        },
        "compression": manifest.compression,
        "records_in": manifest.records_in,
        "records": sum(split.records for split in manifest.splits.values()),
        "rejected": dict(manifest.rejected),
        "converted": dict(manifest.converted),
        "duplicates": {
            "examples": manifest.duplicates.examples,
            "straddling": manifest.duplicates.straddling,
        },
        "settings": dict(manifest.settings),
    }


def render(manifest: Manifest) -> str:
    """Returns the same for a person."""
    rows = [
        ("source", text.printable(manifest.source)),
        ("fingerprint", manifest.fingerprint),
        ("features", ", ".join(describe_feature(feature) for feature in manifest.features)),
        ("classes", _classes(manifest)),
        ("records", _records(manifest)),
        ("converted", counted(manifest.converted)),
        ("duplicates", duplicates(manifest)),
        ("settings", text.printable(", ".join(f"{k} {_short(v)}" for k, v in manifest.settings.items()))),
    ]
    splits = [
        (
            name,
            f"{split.records:,}",
            f"{len(split.shards)}",
            text.size(sum(shard.bytes for shard in split.shards)),
        )
        for name, split in manifest.splits.items()
    ]
    return f"{text.facts(rows)}\n\n{text.table(('split', 'records', 'shards', 'size'), splits)}"


def describe_feature(feature: Feature) -> str:
    """Returns a feature in a few words: "image 224 x 224 x 3 jpeg (crop)"."""
    words = [text.printable(feature.name)]
    if feature.shape:
        words.append(" x ".join("any" if side is None else str(side) for side in feature.shape))
    words.append(feature.encoding or feature.dtype)
    return " ".join(words) + (f" ({feature.resize})" if feature.resize else "")


def counted(amounts: Any) -> str:
    """Returns amounts by what they are of: "3 cmyk, 1 alpha", or "none"."""
    return text.printable(", ".join(f"{count:,} {what}" for what, count in amounts.items())) or "none"


def duplicates(manifest: Manifest) -> str:
    """Returns in a few words how many examples repeat others, and how many cross the splits."""
    found = manifest.duplicates
    if not found.examples:
        return "none"
    groups = f"{found.straddling:,} group{'s' if found.straddling != 1 else ''} in more than one split"
    return (
        f"{found.examples:,} repeat another example, {groups if found.straddling else 'none across splits'}"
    )


def _classes(manifest: Manifest) -> str:
    names = [text.printable(name) for name in manifest.class_names[:_MOST_NAMED]]
    more = ", ..." if len(manifest.class_names) > _MOST_NAMED else ""
    return f"{len(manifest.class_names):,}: {', '.join(names)}{more}"


def _records(manifest: Manifest) -> str:
    records = sum(split.records for split in manifest.splits.values())
    rejected = f", {counted(manifest.rejected)} rejected" if manifest.rejected else ""
    return f"{records:,} of {manifest.records_in:,} in the source{rejected}"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(f"{key}={item}" for key, item in value.items()) or "none"
    return str(value) if value != "" else "none"
