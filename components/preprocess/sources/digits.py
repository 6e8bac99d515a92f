"""The 1,797 handwritten digits that come inside scikit-learn: real data without a download."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np

from shardline.components.preprocess.sources import Example
from shardline.trainer.errors import SourceError

#: Ink per pixel in scikit-learn's data is 0..16.
_FULL_INK = 16.0
_COUNT = 1797


class Digits:
    """Grey images of 8 x 8 pixels in ten classes, without splits of their own."""

    class_names = tuple(str(digit) for digit in range(10))

    def __init__(self) -> None:
        if importlib.util.find_spec("sklearn") is None:
            raise SourceError("source 'digits' needs scikit-learn: pip install 'shardline[preprocess]'")

    def __len__(self) -> int:
        return _COUNT

    def __iter__(self) -> Iterator[Example]:
        # Not above: it takes a second, and a check of the source alone does without.
        from sklearn.datasets import load_digits

        loaded = load_digits()
        images = np.rint(loaded.images * (255.0 / _FULL_INK)).astype(np.uint8)[..., np.newaxis]
        for index, (pixels, label) in enumerate(zip(images, loaded.target, strict=True)):
            yield Example(key=f"digits/{index:04d}", label=int(label), image=pixels)
