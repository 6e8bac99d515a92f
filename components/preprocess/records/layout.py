"""Finding features in many examples of one kind.

Examples that one program wrote differ in their values, and hardly in what is around them. So a record as
long as an earlier one, and equal to it outside of the values, is not taken apart again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardline.components.preprocess.records.example import Place, locate, only_span

_LAYOUTS_KEPT = 1024


class Layout(NamedTuple):
    """Where the features of an example are.

    Attributes:
        places: Of the lists of values, by name.
        start: Of the image's value.
        length: Of the image's value.
    """

    places: Mapping[bytes, Place]
    start: int
    length: int


class Layouts:
    """Remembers the layouts of earlier records.

    Args:
        image: Name of the feature that holds the image.
    """

    def __init__(self, image: bytes) -> None:
        self._image = image
        self._known: dict[int, tuple[list[tuple[int, int]], list[bytes], Layout]] = {}

    def of(self, data: bytes) -> Layout:
        """Returns the layout of one serialized tf.train.Example.

        Raises:
            ValueError: It is not one, or has not one image.
        """
        known = self._known.get(len(data))
        if known is not None:
            around, frame, layout = known
            if [data[start:end] for start, end in around] == frame:
                return layout
        places = locate(data)
        layout = Layout(places, *only_span(data, places, self._image))
        self._remember(data, layout)
        return layout

    def _remember(self, data: bytes, layout: Layout) -> None:
        if len(self._known) >= _LAYOUTS_KEPT:
            self._known.clear()
        values = {name: (place.start, place.end) for name, place in layout.places.items()}
        # Of the other features the whole list may differ: `places` says no more of them.
        values[self._image] = layout.start, layout.start + layout.length
        around, last = [], 0
        for start, end in sorted(values.values()):
            around.append((last, start))
            last = end
        around.append((last, len(data)))
        self._known[len(data)] = around, [data[start:end] for start, end in around], layout
