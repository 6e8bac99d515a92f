"""Real data for tests, and the payload of what a source yields."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardline.components.preprocess.sources.example import WHOLE_FILE, Span
from shardline.components.storage import open_read


def real_data() -> Path:
    """Returns a directory with tfds/ (MNIST) and photos/, or skips the test where there is none."""
    path = os.environ.get("SHARDLINE_TEST_DATA")
    if not path:
        pytest.skip("SHARDLINE_TEST_DATA does not name a directory with tfds/ and photos/")
    return Path(path).resolve()


def payload(image: Any) -> bytes:
    """Returns the bytes of an image, wherever they are."""
    if isinstance(image, Span):
        with open_read(image.file) as file:
            if image.length <= WHOLE_FILE:
                return file.read()
            file.seek(image.offset)
            return file.read(image.length)
    return image.read_bytes() if isinstance(image, Path) else image
