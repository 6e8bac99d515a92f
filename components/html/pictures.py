"""Pictures of examples, small enough to stand inside a page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from PIL import Image

# Up to this size an image is shown pixel by pixel and without loss.
_LARGEST_PIXELATED_SIDE = 64


@dataclass(frozen=True)
class Picture:
    """An image as a data URI.

    Attributes:
        uri: The image itself.
        width: In pixels.
        height: In pixels.
        large: Whether it is a photograph rather than a thing of a few pixels.
    """

    uri: str
    width: int
    height: int
    large: bool


def make_picture(encoded: bytes, largest_side: int = 192) -> Picture:
    """Shrinks an encoded image that a person shall look at, whatever its size and format."""
    with Image.open(io.BytesIO(encoded)) as image:
        return draw_picture(image, largest_side)


def draw_picture(image: Image.Image, largest_side: int = 192) -> Picture:
    """Shrinks an image so that neither side is above `largest_side` pixels."""
    picture = image.convert("L" if image.mode in ("1", "L", "I;16") else "RGB")
    picture.thumbnail((largest_side, largest_side))
    large = max(picture.size) > _LARGEST_PIXELATED_SIDE
    buffer = io.BytesIO()
    if large:
        picture.save(buffer, "JPEG", quality=85)
    else:
        picture.save(buffer, "PNG", optimize=True)
    content = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Picture(f"data:image/{'jpeg' if large else 'png'};base64,{content}", *picture.size, large)
