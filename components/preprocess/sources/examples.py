"""Features of tf.train.Examples as columns of a table: files of TFX, Beam, and whoever stores no images."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, cast

import xxhash

from shardline.components.preprocess import labels
from shardline.components.preprocess.example import Kind, Place, Value, locate, only_span, parse, values
from shardline.components.preprocess.images.structure import JPEG_START, PNG_START
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.columns import FAULT, ROW, SPLIT, TypedColumns
from shardline.components.preprocess.sources.csv_text import Batch, Found, is_wide
from shardline.components.preprocess.sources.example import Span
from shardline.components.preprocess.sources.table import Rows
from shardline.components.preprocess.tfrecord import Record, read_records
from shardline.trainer.data.features import COLUMN_TYPES, LABEL
from shardline.trainer.errors import BadRecordError, SourceError, printable
from shardline.trainer.progress import say

_DTYPES: Mapping[Kind, str] = {"bytes": "string", "float": "float32", "int64": "int64"}
_ROWS = 1024

# A list of numbers that is an image, with its height, width and channels.
_SIZED = re.compile(r"(.+?)\s*\[(\d+x\d+(?:x[13])?)\]")

# What the pixels of images that are lists of numbers lie between: the first range that holds them all.
_RANGES = ((0.0, 1.0), (0.0, 255.0), (-0.5, 0.5), (-1.0, 1.0))


class File(NamedTuple):
    """A TFRecord file: its path, "gzip" or "", and the split that its folder says."""

    path: str
    compression: str
    split: str | None


def to_text(value: Value, name: str) -> str:
    """Returns the text of a feature; ValueError if it is none, or a key that cannot be shown."""
    with contextlib.suppress(UnicodeDecodeError):
        text = value.decode() if isinstance(value, bytes) else str(value)
        if name != "key" or text.isprintable():
            return text
    raise ValueError(f"feature {printable(name)!r} is {value!r:.60}, no printable text in UTF-8")


class ExampleRows(Rows):
    """Examples of TFRecord files as rows: each feature a column, of one value or of a list of fixed length.

    The key is a hash of the whole record unless a feature is it. An image is an encoded one, or a list of
    numbers, square or with its size behind the name: image=pixels[32x32x3]. Beside an image only the columns
    that are named are read.

    Raises:
        SourceError: A file cannot be read, or the features are not these.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[File],
        settings: PreprocessSettings,
    ) -> None:
        features, size, said = dict(settings.features), "", settings.columns
        if sized := _SIZED.fullmatch(features.get("image", "")):
            features["image"], size = sized[1], sized[2]
        image = features.get("image", "image")
        targets = {column for one in labels.parse(settings.label) for column in one.columns}
        targets = targets or {features.get(LABEL, LABEL)}
        found = _survey(files, image)
        if image in found:
            wanted = {"key", image, *features.values(), *targets, settings.split_by_time}
            found = {column: one for column, one in found.items() if column in wanted}
        self.numbers_copies = "key" not in {*features, *found}
        types = {column: one.word(is_target=column in targets) for column, one in found.items()}
        types |= {column: COLUMN_TYPES[kind] for column, kind in said.items() if types.get(column) == "int64"}
        if self.numbers_copies:
            types["key"] = "string"
        pixels = found[image].pixels(image, size) if image in found else _Pixels()
        if image in found:
            types[image] = "bytes"
        self._shape = pixels.shape
        gaps = {column for column, one in found.items() if one.lengths[0]}
        wide = {column for column, one in found.items() if one.is_wide}
        columns = _Columns(files, Found(types, gaps, wide), image, pixels)
        super().__init__(name, columns, replace(settings, features=features), ("bytes",))

    def _image_fault(self, value: Any) -> str:
        return ""

    def _image(self, value: Any) -> Any:
        import numpy as np  # which a source of files that are images does without

        return np.frombuffer(value, np.uint8).reshape(self._shape) if self._shape else value


class _Pixels(NamedTuple):
    """How a list of numbers is an image: its shape, and the range of its numbers; of a file no shape."""

    shape: tuple[int, ...] = ()
    least: float = 0.0
    most: float = 0.0

    def of(self, numbers: Sequence[Value]) -> bytes:
        """Returns the pixels as bytes."""
        import numpy as np

        given = np.asarray(numbers, np.float64)
        return np.rint((given - self.least) * (255 / (self.most - self.least))).astype(np.uint8).tobytes()


class _Found:
    """What a feature is in the records of some files.

    Attributes:
        kind: Kind of its lists, and of the first that is not empty.
        lengths: Number of records by the length of the list in them; 0 where there is none.
        least, most: Smallest and largest number of an image.
        is_wide: Whether 32-bit floats do not hold the whole numbers.
    """

    def __init__(self) -> None:
        self.kind: Kind = "bytes"
        self.lengths = Counter[int]()
        self.least, self.most, self.is_wide = math.inf, -math.inf, False
        self._first = ""
        self._is_image = False

    def add(self, place: str, name: str, kind: Kind, found: Sequence[Value]) -> None:
        """Takes the list of a record."""
        self.lengths[len(found)] += 1
        if kind == "int64" and found and not self.is_wide:
            self.is_wide = is_wide(*cast(list[int], [min(found), max(found)]))
        if not self._first:
            self.kind = kind
            self._first = place if found else ""
            head = found[0] if found else b""
            self._is_image = isinstance(head, bytes) and head.startswith((JPEG_START, PNG_START))
        elif found and kind != self.kind:
            raise SourceError(
                f"feature {printable(name)!r} is {kind} in {place}, and {self.kind} in {self._first}; make "
                "them the same"
            )

    def word(self, *, is_target: bool) -> str:
        """Returns the type as `TypedColumns` has it; of a vector with its length, such as float32[3]."""
        sizes = sorted(self.lengths.keys() - {0}) or [1]
        if self._is_image:
            return "encoded images (take one with image=NAME of features)"
        if self.kind == "bytes" and is_target and sizes[-1] > 1:
            return "strings"
        if len(sizes) > 1:
            return f"lists of {sizes[0]} to {sizes[-1]} values (pad them to one length)"
        if self.kind == "int64" and self.lengths[0] and sizes[0] > 1:
            return "lists of whole numbers that some examples lack (fill them)"
        return _DTYPES[self.kind] + (f"[{sizes[0]}]" if sizes[0] > 1 else "")

    def pixels(self, name: str, size: str) -> _Pixels:
        """Returns how it is an image; `size` is such as 32x32x3, "" for a square one of grey pixels."""
        if self.kind == "bytes":
            return _Pixels()
        many = max(self.lengths)
        side = math.isqrt(many)
        height, width, channels = (*map(int, size.split("x")), 1)[:3] if size else (side, side, 1)
        span = next((one for one in _RANGES if one[0] <= self.least and self.most <= one[1]), None)
        if not span:
            raise SourceError(
                f"feature {printable(name)!r} has numbers of {self.least:g} to {self.most:g}, which are no "
                "pixels; those lie in 0..1, 0..255, -0.5..0.5 or -1..1"
            )
        if self.lengths.keys() - {0} != {height * width * channels}:
            raise SourceError(
                f"feature {printable(name)!r} has {min(self.lengths.keys() - {0})} to {many} numbers, not "
                f"{height} x {width} x {channels}; say the image's size: image={printable(name)}[32x32x3]"
            )
        say(
            "preprocess",
            f"{printable(name)}: images of {height} x {width} x {channels} numbers, of which {span[0]:g} to "
            f"{span[1]:g} are stored as pixels of 0 to 255",
        )
        return _Pixels((height, width, channels), *span)


def _survey(files: Sequence[File], image: str) -> dict[str, _Found]:
    """Reads all records once, and returns what features they have; those that are none are left out."""
    found, count = dict[str, _Found](), 0
    for path, compression, _ in files:
        for record in read_records(path, compression=compression):
            if not isinstance(record, Record):
                continue
            try:
                given = parse(record.data)
            except ValueError:
                continue
            count += 1
            for name, (kind, numbers) in given.items():
                one = found.get(name) or found.setdefault(name, _Found())
                one.add(f"{path} record {record.number}", name, kind, numbers)
                if name == image and kind != "bytes" and numbers:
                    one.least = min(one.least, *map(float, numbers))
                    one.most = max(one.most, *map(float, numbers))
    for one in found.values():
        one.lengths[0] += count - one.lengths.total()
    return found


class _Columns(TypedColumns):
    """Features of the records of some files, as columns by their names."""

    about = (ROW, SPLIT, FAULT)

    def __init__(self, files: Sequence[File], found: Found, image: str, pixels: _Pixels) -> None:
        super().__init__(found)
        self._files, self._image, self._pixels = files, image, pixels
        self._root = os.path.commonpath([path for path, *_ in files])

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, row by row and file by file."""
        for file in self._files:
            records = read_records(file.path, compression=file.compression)
            while some := list(islice(records, _ROWS)):
                rows = (self._row(file, record, names) for record in some)
                yield dict(zip(names, zip(*rows, strict=True), strict=True))

    def _row(self, file: File, record: Record | BadRecordError, names: Sequence[str]) -> list[Any]:
        number = record.number if isinstance(record, Record) else record.name.rpartition(" ")[2]
        told = {ROW: f"record {number}", SPLIT: file.split, FAULT: ""}
        if len(self._files) > 1:
            told[ROW] = f"{os.path.relpath(file.path, self._root)} record {number}"
        try:
            if not isinstance(record, Record):
                raise ValueError(record.reason)
            places = locate(record.data)
            if "key" in names:
                told["key"] = xxhash.xxh3_128_hexdigest(record.data)
            return [
                self._value(file, record, place, name)
                if (place := places.get(name.encode()))
                else told.get(name)
                for name in names
            ]
        except ValueError as fault:
            told[FAULT] = str(fault)
            return [told.get(name) for name in names]

    def _value(self, file: File, record: Record, place: Place, name: str) -> Any:
        if name == self._image and place.kind == "bytes":
            start, length = only_span(record.data, {name.encode(): place}, name.encode())
            here = Span(file.path, record.offset + start, length)
            return record.data[start : start + length] if file.compression else here
        found: Sequence[Any] = values(record.data, place)
        if name == self._image:
            return self._pixels.of(found)
        if place.kind == "bytes":
            found = [to_text(one, name) for one in found]
        if self.types[name] == "strings":
            return found
        if place.kind == "int64" and self.types[name] in ("string", "float32"):
            found = [*map(str if self.types[name] == "string" else float, found)]
        return found[0] if len(found) == 1 else found or None
