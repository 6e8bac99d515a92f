"""Geometry of resizing: where an image lands in a target of another size, in pure whole-number arithmetic.

Preprocessing (numbers) and the exported model (tensors) share this one function, so that they cut and
place an image in the same way to the pixel. It loads no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

#: By how much an image can be shrunk while it is decoded: what JPEG decoders do fast.
REDUCTIONS = (2, 4, 8)


class Placement(NamedTuple):
    """Part of an image, and its place in the target, in pixels: int or int32 tensors, as `place` was given.

    Attributes:
        top, left, height, width: The part of the image that is used: multiples of `reduction`.
        reduction: 1, 2, 4 or 8: by how much that part may first be shrunk, with enough left for `fitted`.
        fitted_height, fitted_width: Size to which that part is resized.
        pad_top, pad_left: Rows and columns of black before it in the target.
    """

    top: Any
    left: Any
    height: Any
    width: Any
    reduction: Any
    fitted_height: Any
    fitted_width: Any
    pad_top: Any
    pad_left: Any


def place(
    height: Any,
    width: Any,
    target: tuple[int, int],
    mode: str,
    *,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> Placement:
    """Places an image of height x width pixels, ints or scalar int32 tensors, in a target (height, width).

    The used part is centred. Its sides and corner are rounded down to multiples of the reduction, which
    moves nothing by as much as a pixel of the target, and lets a JPEG be shrunk while it is decoded. The mode
    is "crop" (the target is covered), "pad" (the whole image fits into it) or "stretch"; `minimum` and
    `maximum` compare two such numbers, as `min` or `tf.minimum` does.
    """
    used, fitted = [height, width], list(target)
    if mode == "crop":
        used[0] = minimum(height, maximum(1, width * target[0] // target[1]))
        used[1] = minimum(width, maximum(1, height * target[1] // target[0]))
    elif mode == "pad":  # rounded to the nearest
        fitted[0] = minimum(target[0], maximum(1, (2 * height * target[1] + width) // (2 * width)))
        fitted[1] = minimum(target[1], maximum(1, (2 * width * target[0] + height) // (2 * height)))
    # At least 1.5 times the target is left, from which the rest of the way does not show.
    ratio = minimum(2 * used[0] // (3 * fitted[0]), 2 * used[1] // (3 * fitted[1]))
    reduction = 1
    for step in REDUCTIONS:  # doubled with each of them that the ratio reaches
        reduction += minimum(1, ratio // step) * (step // 2)
    used = [side // reduction * reduction for side in used]
    return Placement(
        top=(height - used[0]) // 2 // reduction * reduction,
        left=(width - used[1]) // 2 // reduction * reduction,
        height=used[0],
        width=used[1],
        reduction=reduction,
        fitted_height=fitted[0],
        fitted_width=fitted[1],
        pad_top=(target[0] - fitted[0]) // 2,
        pad_left=(target[1] - fitted[1]) // 2,
    )
