"""Damage: what is wrong with a dataset, and what its splits hold against what its manifest says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shardline.components.preprocess.digests import Strata, allot, points_of_known
from shardline.components.preprocess.sources.moments import gap_of, moment_text, parse_gap
from shardline.trainer.data.features import Label, Spread, Tally
from shardline.trainer.data.manifest import MANIFEST_FILE, SPLITS, Manifest, Split
from shardline.trainer.errors import printable

#: Damaged records of one shard, groups and classes that are listed one by one.
MOST_LISTED = 10

#: What a shard holds, as JSON: the sound `records`, the `bytes` of the file, what their `labels` are, all
#: `damages`, the `groups`, the first and the last of `moments` with the keys of their examples, where the
#: split is by time, and the `classes` of the examples, where splits are stratified by content.
Check = Mapping[str, Any]


@dataclass(frozen=True)
class Damage:
    """One contradiction between a dataset and its manifest, in a file or one record of it, from 0."""

    file: str
    record: int | None
    what: str

    def __str__(self) -> str:
        where = "" if self.record is None else f", record {self.record:,}"
        return printable(f"{self.file}{where}: {self.what}")


def says(what: str) -> Damage:
    """Returns what the manifest says and the shards do not."""
    return Damage(MANIFEST_FILE, None, f"says {what}")


def check_labels(manifest: Manifest, checks: Mapping[str, Check]) -> Iterator[Damage]:
    """Yields the first class or number that is not as the manifest says, in splits of sound shards."""
    for name, split in manifest.splits.items():
        mine = [checks[shard.file] for shard in split.shards]
        if not any(check["damages"] for check in mine):
            yield from islice(
                chain.from_iterable(_check_label(name, split, mine, one) for one in manifest.labels), 1
            )


def _check_label(name: str, split: Split, checks: Sequence[Check], label: Label) -> Iterator[Damage]:
    said = split.labels[label.name]
    found = Tally.merge([(check["records"], _tally(check["labels"][label.name])) for check in checks])
    for output, there, expected in zip(label.class_names, found.counts, said.counts, strict=False):
        if there != expected:
            yield says(f"class {output!r} has {expected:,} records in {name}, the shards hold {there:,}")
    for output, values, spread in zip(label.outputs, found.spreads, said.spreads, strict=False):
        if not np.allclose(astuple(values), astuple(spread), rtol=1e-9, atol=1e-12):
            yield says(
                f"{output!r} is {spread.least:g} to {spread.largest:g} in {name}, mean {spread.mean:g}, the "
                f"shards hold {values.least:g} to {values.largest:g}, mean {values.mean:g}"
            )


def _tally(found: Mapping[str, Any]) -> Tally:
    return Tally(tuple(found["counts"]), tuple(Spread(**spread) for spread in found["spreads"]))


def check_groups(manifest: Manifest, checks: Mapping[str, Check]) -> Iterator[Damage]:
    """Yields the groups that lie in more than one split, where examples are grouped."""
    splits: dict[str, list[str]] = {}
    for name, split in manifest.splits.items():
        for group in {group for shard in split.shards for group in checks[shard.file]["groups"]}:
            splits.setdefault(group, []).append(name)
    if leaks := sorted(group for group, names in splits.items() if len(names) > 1):
        named = ", ".join(
            f"{group!r} in {' and '.join(sorted(splits[group]))}" for group in leaks[:MOST_LISTED]
        )
        more = f" and {len(leaks) - MOST_LISTED:,} more" if len(leaks) > MOST_LISTED else ""
        what = f"groups by {manifest.group!r}, and groups are in several splits: {named}{more}"
        yield Damage(MANIFEST_FILE, None, what)


def check_moments(manifest: Manifest, checks: Mapping[str, Check]) -> Iterator[Damage]:
    """Yields the last example of a split that is not, or not by the gap, before the first of the next one."""
    feature, column = manifest.moment, str(manifest.settings.get("split_by_time"))
    gap = str(manifest.settings.get("split_gap") or "")
    if not feature:
        return
    splits = [
        (name, [time for shard in manifest.splits[name].shards for time in checks[shard.file]["moments"]])
        for name in SPLITS
        if name in manifest.splits
    ]
    for (before, earlier), (name, later) in pairwise((name, times) for name, times in splits if times):
        (last, key), (first, key_of_first) = max(earlier), min(later)
        if last >= first - gap_of(parse_gap(gap), feature):
            what = (
                f"splits by {column!r}, and {key!r} in {before}, {moment_text(last, feature)}, is not "
                f"{f'{gap} ' if gap else ''}before {key_of_first!r} in {name}, {moment_text(first, feature)}"
            )
            yield Damage(MANIFEST_FILE, None, what)


def check_strata(directory: Path, manifest: Manifest, checks: Mapping[str, Check]) -> Iterator[Damage]:
    """Yields the classes that have not their share of each split, where a sound dataset is stratified."""
    settings, names = manifest.settings, manifest.class_names
    if not settings.get("stratify") or not manifest.is_classes:
        return
    counts = {name: split.class_counts for name, split in manifest.splits.items()}
    found = np.array([counts.get(split, [0] * len(names)) for split in SPLITS]).T
    try:
        shares = {str(name): float(share) for name, share in settings["split"].items()}
        if settings["key"] == "content" and manifest.keys:
            known = (directory / manifest.keys.file).read_bytes()
            points = points_of_known(known, settings["split_salt"])
            labels = np.concatenate([checks[shard.file]["classes"] for shard in manifest.shards]).astype(int)
            wanted = np.zeros_like(found)
            np.add.at(wanted, (labels, Strata(points, labels, shares).codes(points)), 1)
        else:
            splits = (allot(np.ones(count, int), shares) for count in found.sum(1))
            wanted = np.array([np.bincount(each, minlength=len(SPLITS)) for each in splits])
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        yield says("the splits are stratified, and not by which shares and salt")
        return
    wrong = np.flatnonzero((found != wanted).any(1)).tolist()
    for place in wrong[:MOST_LISTED]:
        there, right = (" / ".join(f"{count:,}" for count in of[place]) for of in (found, wanted))
        yield says(
            f"the splits are stratified, and class {names[place]!r} has {there} examples in "
            f"{' / '.join(SPLITS)}, not {right}"
        )
