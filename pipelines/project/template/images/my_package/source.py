"""The data: circles, squares and triangles, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw
from shardline import Example

SIZE = 24


class Source:
    """600 RGB images of 24 x 24 pixels: one bright shape somewhere on a dark ground.

    For files, yield Example(key=path.name, label=..., image=path): a path is read when it is written.
    """

    class_names = ("circle", "square", "triangle")

    def __iter__(self) -> Iterator[Example]:
        """Yields every example once, each with a key that stays the same when the data grows."""
        rng = np.random.default_rng(seed=0)
        for index in range(200):
            for label, name in enumerate(self.class_names):
                yield Example(key=f"{name}/{index:03d}", label=label, image=draw(name, rng))

    def fingerprint(self) -> str:
        """Returns another text when the data is another: scheduled runs train on changed data only."""
        return "drawn from seed 0"


def draw(name: str, rng: np.random.Generator) -> np.ndarray:
    """Returns one shape as a uint8 array of shape (24, 24, 3)."""
    radius = int(rng.integers(5, 10))
    x, y = rng.integers(radius, SIZE - radius, size=2).tolist()
    image = Image.new("RGB", (SIZE, SIZE), tuple(rng.integers(0, 80, size=3).tolist()))
    pen, bright = ImageDraw.Draw(image), tuple(rng.integers(120, 256, size=3).tolist())
    if name == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=bright)
    else:
        pen.regular_polygon((x, y, radius), {"square": 4, "triangle": 3}[name], fill=bright)
    return np.asarray(image)
