"""Examples that cannot be used: the first ends the run, or they are left out, named and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.components.preprocess.run import plan_dataset, write_shards
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer.base.errors import BadRecordError, SettingsError, SourceError
from tests.helpers.preprocessing import SOURCE, contents, read_all, run, write_images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A hundred images, of which two are none."""
    images = write_images(tmp_path / "images", each=50)
    (images / "cat" / "010.png").write_bytes(b"")
    (images / "dog" / "020.png").write_text("a text")
    return images


@pytest.mark.parametrize("processes", [1, 2])
def test_fail_names_the_first(tmp_path: Path, images: Path, processes: int) -> None:
    with pytest.raises(BadRecordError, match=r"'(cat/010|dog/020)\.png': (empty|not an image)"):
        run(f"images:{images}", tmp_path / "out", processes=processes)


def test_skip_leaves_them_out(tmp_path: Path, images: Path) -> None:
    manifest = run(f"images:{images}", tmp_path / "out", on_bad_record="skip", max_bad_fraction=0.02)
    empty, no_image = sorted(manifest.rejected)
    assert empty.startswith("empty")
    assert no_image.startswith("not an image")
    assert manifest.rejected == {empty: 1, no_image: 1}
    assert manifest.records_in == 100
    keys = {example["key"].decode() for example in read_all(tmp_path / "out")}
    assert len(keys) == 98
    assert not keys & {"cat/010.png", "dog/020.png"}
    rejected = map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
    assert sorted(map(list, (each.values() for each in rejected))) == [
        ["cat/010.png", empty],
        ["dog/020.png", no_image],
    ]
    for split in manifest.splits.values():
        sizes = [shard.records for shard in split.shards]
        assert sizes[0] - sizes[-1] <= 1


def test_skip_gives_the_bytes_of_a_source_without_them(tmp_path: Path, images: Path) -> None:
    one = run(f"images:{images}", tmp_path / "one", on_bad_record="skip", max_bad_fraction=0.02)
    two = run(f"images:{images}", tmp_path / "two", on_bad_record="skip", max_bad_fraction=0.02, processes=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    (images / "cat" / "010.png").unlink()
    (images / "dog" / "020.png").unlink()
    without = run(f"images:{images}", tmp_path / "without")
    assert one.fingerprint == two.fingerprint == without.fingerprint


def test_too_many_are_refused(tmp_path: Path, images: Path) -> None:
    (images / "dog" / "021.png").write_text("a text")
    message = r"3 of 100 examples cannot be used, more than max_bad_fraction 0\.01 allows; 2 of them: not an"
    with pytest.raises(SourceError, match=rf"{message} image.* \('dog/02.\.png'\)"):
        run(f"images:{images}", tmp_path / "out", on_bad_record="skip")
    assert not (tmp_path / "out").exists()


def test_examples_that_the_source_itself_cannot_give(source_module: Path) -> None:
    source_module.write_text(SOURCE.replace("{last}", "yield BadExample('row 60', 'is torn')"))
    out = source_module.with_name("out")
    manifest = run("mine:Source", out, on_bad_record="skip", max_bad_fraction=0.05)
    assert (manifest.records_in, manifest.rejected) == (61, {"is torn": 1})


def test_an_image_that_becomes_bad_after_it_was_checked(tmp_path: Path, images: Path) -> None:
    settings = PreprocessSettings(source=f"images:{images}", on_bad_record="skip", max_bad_fraction=0.02)
    plan_dataset(settings, tmp_path / "out")
    (images / "cat" / "030.png").unlink()
    with pytest.raises(SourceError, match=r"'cat/030\.png' became unusable \(there is no such file"):
        write_shards(tmp_path / "out", 0, 1)


def test_raw_images_of_different_sizes_are_refused(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    write_images(tmp_path / "more", classes=["cat"], each=1, size=9)
    (tmp_path / "more" / "cat" / "000.png").rename(images / "cat" / "large.png")
    with pytest.raises((SourceError, SettingsError), match="raw"):
        run(f"images:{images}", tmp_path / "out", encoding="raw")
