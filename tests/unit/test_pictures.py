"""Pictures as people have them: each kind is stored and served as the same pixels, or refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from shardline.trainer.data.decode import decode_image
from shardline.trainer.data.features import Feature
from tests.helpers import pictures
from tests.helpers.images import opened

PAGE = Path(__file__).parents[2] / "docs" / "images.md"
PICTURES = pictures.pictures()
UNREAD = ("AVIF", "HEIC")


def test_the_table_of_the_docs_says_what_happens() -> None:
    assert pictures.table() in PAGE.read_text()


@pytest.mark.parametrize("name", PICTURES)
def test_a_resized_picture_is_the_same_in_training_and_in_serving_or_refused_in_both(name: str) -> None:
    found = pictures.stored(PICTURES[name], 32)
    if isinstance(found, str):
        assert found == pictures.stored(PICTURES[name])
        return
    trained = tf.io.decode_image(found.data, channels=found.channels, expand_animations=False).numpy()
    try:
        served = pictures.served(PICTURES[name], trained.shape)
    except tf.errors.OpError:
        assert name.startswith(UNREAD) or name in ("WebP, animated", "BMP, black and white")
        return
    # The two filters differ most in noise.
    limit = 25 if name in ("PNG, 16-bit colour", "PNG, black and white") else 4
    assert np.abs(served.astype(int) - trained).mean() < limit


@pytest.mark.parametrize(("name", "turned"), [("HEIC with orientation", True), ("HEIC", False)])
def test_heic_is_read_upright(name: str, turned: bool) -> None:
    found = pictures.stored(PICTURES[name])
    assert not isinstance(found, str)
    assert (found.height, found.width) == ((60, 40) if turned else (40, 60))
    pixels = np.asarray(opened(found.data)).astype(int)
    # The bright quarter of the scene, which is at the upper left before it is turned.
    bright = pixels[:15, -10:] if turned else pixels[:10, :15]
    assert bright.mean() > pixels.mean() + 20


def test_heic_names_the_package_that_reads_it_where_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert "pip install pillow-heif" in str(pictures.stored(PICTURES["HEIC"]))


@pytest.mark.parametrize("name", ["BMP, grey", "GIF", "WebP, alpha channel", "PNG", "JPEG"])
def test_a_model_of_grey_pictures_takes_all_that_others_take(name: str) -> None:
    grey = decode_image(PICTURES[name], Feature("image", "uint8", (40, 60, 1), "png", "crop")).numpy()
    expected = np.asarray(opened(PICTURES[name]).convert("RGB").convert("L"))
    assert np.abs(grey[..., 0].astype(int) - expected).mean() < 2


def test_a_bmp_that_is_compressed_is_refused_by_the_exported_model() -> None:
    packed = bytearray(PICTURES["BMP, palette"])
    packed[30] = 1
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="cannot read a BMP that is compressed; send a PNG"
    ):
        pictures.served(bytes(packed), (40, 60, 3))
