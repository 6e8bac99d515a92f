"""JPEG by libjpeg-turbo alone, which loads in a tenth of the time of OpenCV and Pillow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardline.components.preprocess.images.structure import DAMAGED, UnreadableError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def decode_jpeg(
    encoded: bytes, size: tuple[int, int], channels: int, reduction: int
) -> npt.NDArray[np.uint8]:
    """Decodes a plain JPEG of (height, width) pixels; UnreadableError if it is damaged.

    Each side of the result is divided by `reduction` (1, 2, 4 or 8) and rounded up.
    """
    import numpy as np
    import simplejpeg

    # The decoder uses the smallest of its sizes that is at least this one; 0 is the full size.
    height, width = (-(-side // reduction) if reduction > 1 else 0 for side in size)
    space = "RGB" if channels == 3 else "GRAY"
    options: dict[str, Any] = {"colorspace": space, "min_height": height, "min_width": width}
    for strict in (True, False):
        try:
            return np.asarray(simplejpeg.decode_jpeg(encoded, strict=strict, **options), np.uint8)
        except ValueError as failure:
            # Some cameras leave bytes between two segments; every decoder skips them.
            if not strict or "extraneous bytes" not in str(failure):
                raise UnreadableError(DAMAGED) from failure
    raise AssertionError("unreachable")
