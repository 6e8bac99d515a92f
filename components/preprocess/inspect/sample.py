"""Some examples of a finished dataset, to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from PIL import Image

from shardline.components.html.pictures import Picture, draw_picture, make_picture
from shardline.components.preprocess.inspect.records import Values, read_values
from shardline.components.preprocess.inspect.stats import header
from shardline.trainer.data.manifest import Feature, Manifest, Shard
from shardline.trainer.errors import DatasetError, SourceError

_RECORDS = 2048
_BYTES = 64 << 20
_SIDE = 96
_ROWS = 10


@dataclass(frozen=True)
class Sample:
    """Examples from all shards.

    Attributes:
        records: How many were looked at.
        sizes: Images by (height, width).
        pictures: Some images of each class, with their keys, by the name of the class.
        rows: Of a dataset without images, some examples as text: key, class, then the other features.
        columns: Names of what is in `rows`.
    """

    records: int
    sizes: Mapping[tuple[int, int], int]
    pictures: Mapping[str, list[tuple[str, Picture]]]
    rows: list[list[str]]
    columns: list[str]

    @property
    def without_pictures(self) -> list[str]:
        """Names of the classes of which no image was met."""
        return [name for name, pictures in self.pictures.items() if not pictures]


def take_sample(directory: Path, manifest: Manifest, classes: Collection[str]) -> Sample:
    """Looks at the first records of every shard, of a large dataset at about 2,000 in all.

    Args:
        directory: The dataset directory.
        manifest: Its manifest.
        classes: Names of the classes of which images are wanted.

    Raises:
        DatasetError: A shard cannot be read.
    """
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    image = next((feature for feature in manifest.features if feature.name == "image"), None)
    others = [f.name for f in manifest.features if f.name not in ("image", "label", "key")]
    each = 6 if len(classes) <= 10 else 4
    taken, sizes = 0, Counter[tuple[int, int]]()
    rows: list[list[str]] = []
    pictures: dict[str, list[tuple[str, Picture]]] = {name: [] for name in classes}
    for shard in shards:
        for values in _first_records(directory, shard, manifest.compression, len(shards)):
            taken += 1
            key = values["key"][1][0].decode("utf-8", "replace")
            name = manifest.class_names[values["label"][1][0]]
            if image is None:
                if len(rows) < _ROWS:
                    rows.append([key, name, *(_text(values[other][1][0]) for other in others)])
                continue
            encoded = values["image"][1][0]
            sizes[header(encoded, image)[0][:2]] += 1
            if len(pictures.get(name, [None] * each)) < each:
                pictures[name].append((key, _picture(encoded, image)))
    return Sample(taken, sizes, pictures, rows, ["key", "class", *others])


def _first_records(directory: Path, shard: Shard, compression: str, shards: int) -> list[Values]:
    """Returns the beginning of a shard."""
    found: list[Values] = []
    room = max(1, _BYTES // shards)
    try:
        for size, values in islice(read_values(directory / shard.file, compression), -(-_RECORDS // shards)):
            if isinstance(values, str):
                raise SourceError(values)
            found.append(values)
            room -= size
            if room < 0:
                break
    except (SourceError, OSError) as error:
        raise DatasetError(
            f"cannot read {shard.file}: {error}; 'shardline dataset verify' lists all damage"
        ) from None
    return found


def _picture(encoded: bytes, image: Feature) -> Picture:
    if image.encoding != "raw":
        return make_picture(encoded, _SIDE)
    height, width, channels = (side or 0 for side in image.shape)
    return draw_picture(Image.frombytes("L" if channels == 1 else "RGB", (width, height), encoded), _SIDE)


def _text(value: bytes | int | float) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else f"{value:g}"
