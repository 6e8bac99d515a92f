"""Exact duplicates: found while writing, named where they straddle splits, kept together by content."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.components.preprocess.plan import records
from shardline.trainer.manifest import SPLITS
from tests.helpers.preprocessing import read, read_all, run, write_images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A hundred images, of which twenty are there twice more."""
    images = write_images(tmp_path / "images", each=50)
    for index in range(20):
        original = (images / "cat" / f"{index:03d}.png").read_bytes()
        (images / "cat" / f"copy{index:03d}.png").write_bytes(original)
        (images / "dog" / f"copy{index:03d}.png").write_bytes(original)
    return images


@pytest.mark.parametrize("together", [65_536, 20])
def test_duplicates_are_named(
    tmp_path: Path, images: Path, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_HASHES_IN_MEMORY", together)
    manifest = run(f"images:{images}", tmp_path / "out")
    splits: dict[bytes, set[str]] = {}
    keys: dict[bytes, list[str]] = {}
    for split in SPLITS:
        for example in read(tmp_path / "out", split):
            splits.setdefault(example["image"], set()).add(split)
            keys.setdefault(example["image"], []).append(f"{split}: {example['key'].decode()}")
    groups = [sorted(names) for names in keys.values() if len(names) > 1]
    assert len(groups) == 20
    straddling = sum(len(where) > 1 for where in splits.values())
    assert straddling > 3
    assert manifest.duplicates.examples == 40
    assert manifest.duplicates.straddling == straddling
    assert sorted(sorted(group) for group in manifest.duplicates.named) == sorted(groups)
    for group in manifest.duplicates.named[:straddling]:
        assert len({name.split(":")[0] for name in group}) > 1


def test_the_content_as_key_keeps_them_together(tmp_path: Path, images: Path) -> None:
    manifest = run(f"images:{images}", tmp_path / "out", key="content")
    assert manifest.duplicates.examples == 40
    assert manifest.duplicates.straddling == 0
    assert len({example["key"] for example in read_all(tmp_path / "out")}) == 140


def test_the_split_by_content_does_not_depend_on_names(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    run(f"images:{images}", tmp_path / "before", key="content")
    for path in list(images.glob("*/*.png")):
        path.rename(path.with_name(f"renamed {path.name}"))
    run(f"images:{images}", tmp_path / "after", key="content")
    before, after = (
        [example["image"] for example in read_all(tmp_path / name)] for name in ("before", "after")
    )
    assert before == after


TABLES = {
    "coarse": lambda number: (number % 3, "pq"[number % 2]),
    "one of many values": lambda number: (number % 3, number / 7),
    "a text": lambda number: (number % 3, f"the words of {number}"),
}


@pytest.mark.parametrize("key", ["path", "content"])
@pytest.mark.parametrize("kind", TABLES)
def test_equal_rows_are_copies_unless_chance_makes_them_equal(tmp_path: Path, kind: str, key: str) -> None:
    rows = [",".join(map(str, (*TABLES[kind](index // 2), "ab"[index % 4 // 2]))) for index in range(400)]
    (tmp_path / "rows.csv").write_text("\n".join(["first,second,label", *rows]))

    manifest = run(f"table:{tmp_path}/rows.csv", tmp_path / "out", key=key)

    found = manifest.duplicates
    assert (found.by_chance, manifest.has_copies) == (kind == "coarse", kind != "coarse" or key == "content")
    assert found.examples >= 200
    assert bool(found.straddling) == (kind != "coarse" and key == "path")
