"""Damaged images in a source: left out, or named before anything is written."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import tensorflow as tf

from shardline.components.preprocess.inspect import verify
from shardline.trainer.base.errors import BadRecordError
from tests.helpers import damage
from tests.helpers.preprocessing import read_all, run


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of 40 sound PNGs and JPEGs, and 80 damaged ones among them."""
    root = tmp_path_factory.mktemp("images")
    png, jpeg = damage.sound_pngs()["RGB"], damage.sound_jpegs()["usual"]
    for name in ("ant", "bee"):
        (root / name).mkdir()
        for number in range(20):
            (root / name / f"sound{number}.png").write_bytes(png)
            (root / name / f"sound{number}.jpg").write_bytes(jpeg)
    for suffix, data in (("png", png), ("jpg", jpeg)):
        for number, (_, spoiled) in enumerate(damage.damaged(data, 40, seed=1)):
            (root / ("ant" if number % 2 else "bee") / f"damaged{number}.{suffix}").write_bytes(spoiled)
    return root


@pytest.mark.parametrize(("check", "processes"), [("structure", 2), ("decode", 1)])
def test_what_is_left_can_be_trained_on(tmp_path: Path, images: Path, check: str, processes: int) -> None:
    skip = {"on_bad_record": "skip", "max_bad_fraction": 1.0, "check_images": check}
    manifest = run(f"images:{images}", tmp_path / "out", processes=processes, **skip)
    keys = {example["key"].decode() for example in read_all(tmp_path / "out")}
    assert sum("sound" in key for key in keys) == 80
    assert not any(key.endswith("png") and "damaged" in key for key in keys)
    assert manifest.records == len(keys)
    for example in read_all(tmp_path / "out"):
        tf.io.decode_image(example["image"], channels=3, expand_animations=False)
    assert not verify(tmp_path / "out", processes=1).damages


def test_fail_names_the_first_before_anything_is_written(tmp_path: Path, images: Path) -> None:
    with pytest.raises(BadRecordError, match=r"(ant|bee)/damaged\d+\.(png|jpg)': (damaged|truncated) image"):
        run(f"images:{images}", tmp_path / "out")


def test_the_header_alone_lets_damage_pass_which_verify_finds(tmp_path: Path, images: Path) -> None:
    settings = {"on_bad_record": "skip", "max_bad_fraction": 1.0, "check_images": "header"}
    manifest = run(f"images:{images}", tmp_path / "out", **settings)
    found = verify(tmp_path / "out", processes=1).damages
    assert manifest.records > 120
    assert len(found) > 20
    assert all(re.search("cannot be decoded as|more damaged records", str(damage)) for damage in found)


def test_a_run_that_checks_more_does_not_take_over_what_another_wrote(tmp_path: Path, images: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(images, source)
    for path in source.rglob("damaged*"):
        path.unlink()
    (source / "ant" / "grey.jpg").write_bytes(damage.miswritten_jpegs()["usual: half a scan and an end"])
    run(f"images:{source}", tmp_path / "out", check_images="structure")
    with pytest.raises(BadRecordError, match=r"'ant/grey\.jpg': damaged image"):
        run(f"images:{source}", tmp_path / "out", check_images="decode", overwrite=True)
