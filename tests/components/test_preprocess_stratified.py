"""Stratified splits: every class has its share, whatever the key, the processes and the interruptions."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from shardline.components.preprocess.inspect import verify
from shardline.components.preprocess.plan import records
from shardline.components.preprocess.run import plan_dataset, preprocess, write_shards
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer import manifest as manifests
from shardline.trainer.manifest import Manifest
from tests.helpers.preprocessing import contents, run, stored, write_images

SIZES = {"often": 700, "seldom": 40, "rare": 3}
SPLITS = {"often": (560, 70, 70), "seldom": (32, 4, 4), "rare": (1, 1, 1)}


def write(path: Path, sizes: dict[str, int] = SIZES) -> str:
    """Writes a table with so many rows of each class, and returns the source."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["key", "x", "label"])
        for name, count in sizes.items():
            writer.writerows([f"{name} {number}", number, name] for number in range(count))
    return f"table:{path}"


def counted(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    columns = zip(*(split.labels["label"].counts for split in manifest.splits.values()), strict=True)
    return dict(zip(manifest.class_names, columns, strict=True))


def split_of(out: Path) -> dict[object, str]:
    return {key: name for name, keys in stored(out, "key").items() for key in keys}


@pytest.mark.parametrize("salt", [0, 1])
def test_every_class_has_its_share_of_each_split(tmp_path: Path, salt: int) -> None:
    source = write(tmp_path / "table.csv")
    manifest = run(source, tmp_path / "out", stratify=True, split_salt=salt)
    assert counted(manifest) == SPLITS
    assert manifest.settings["stratify"] is True
    assert not verify(tmp_path / "out", processes=1).damages
    assert counted(run(source, tmp_path / "plain", split_salt=salt)) != SPLITS


def test_most_examples_keep_their_split_when_others_come_and_with_another_seed(tmp_path: Path) -> None:
    run(write(tmp_path / "before.csv"), tmp_path / "before", stratify=True)
    more = {name: count + count // 10 for name, count in SIZES.items()}
    run(write(tmp_path / "after.csv", more), tmp_path / "after", stratify=True, seed=3)
    before, after = split_of(tmp_path / "before"), split_of(tmp_path / "after")
    assert sum(after[key] == split for key, split in before.items()) > 0.97 * len(before)


@pytest.mark.parametrize("key", ["path", "content"])
def test_the_bytes_follow_from_source_and_settings_alone(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"images:{write_images(tmp_path / 'images', each=60)}"
    settings = PreprocessSettings(source=source, stratify=True, key=key)
    preprocess(settings, tmp_path / "out")
    plan_dataset(dataclasses.replace(settings, processes=2), tmp_path / "again")
    write_shards(tmp_path / "again", 0, 1)
    preprocess(dataclasses.replace(settings, processes=2), tmp_path / "again")
    monkeypatch.setattr(records, "_BYTES_IN_MEMORY", 1000)
    run(source, tmp_path / "files", stratify=True, key=key, on_bad_record="skip")
    assert contents(tmp_path / "out") == contents(tmp_path / "again") == contents(tmp_path / "files")
    assert counted(manifests.load(tmp_path / "out")) == {"cat": (48, 6, 6), "dog": (48, 6, 6)}


def test_what_is_left_out_has_no_share(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", each=60)
    for number in range(0, 40, 2):
        (images / "cat" / f"{number:03d}.png").write_bytes(b"no image")
    manifest = run(
        f"images:{images}", tmp_path / "out", stratify=True, on_bad_record="skip", max_bad_fraction=0.5
    )
    assert counted(manifest) == {"cat": (32, 4, 4), "dog": (48, 6, 6)}


def test_duplicates_stay_together_even_of_two_classes(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", each=60)
    for number in range(30):
        data = (images / "cat" / f"{number:03d}.png").read_bytes()
        (images / "cat" / f"again {number}.png").write_bytes(data)
        if number % 2:
            (images / "dog" / f"cat {number}.png").write_bytes(data)
    manifest = run(f"images:{images}", tmp_path / "out", stratify=True, key="content")
    assert (manifest.duplicates.examples, manifest.duplicates.straddling) == (45, 0)
    assert [sum(counts) for counts in counted(manifest).values()] == [90, 75]
    assert not verify(tmp_path / "out", processes=1).damages
    apart = run(f"images:{images}", tmp_path / "apart", stratify=True)
    assert apart.duplicates.straddling
    assert not verify(tmp_path / "apart", processes=1).damages


COPIES = """
from shardline.components.preprocess.sources.example import Example

class Source:
    class_names = ("no", "yes")
    numbers_copies = True

    def __iter__(self):
        for number in range(300):
            yield Example(str(number // 3), number % 3 // 2)
"""


def test_examples_of_one_key_have_shares_under_the_numbers_that_they_get(source_module: Path) -> None:
    source_module.write_text(COPIES)
    manifest = run("mine:Source", source_module.with_name("out"), stratify=True)
    assert counted(manifest) == {"no": (160, 20, 20), "yes": (80, 10, 10)}
    assert not verify(source_module.with_name("out"), processes=1).damages
