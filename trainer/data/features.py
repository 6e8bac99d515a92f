"""Features and labels of an example, their statistics, schema anomalies, and the placement of resized images.

Preprocessing (with numbers) and the exported model (with tensors) share `compute_placement`, and so crop and
resize an image alike to the pixel. Loads no TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Column types in settings, and the stored type of each.
COLUMN_TYPES: Mapping[str, str] = {
    "text": "string", "integer": "int64", "number": "float32", "day-first": "time", "month-first": "time"
}  # fmt: skip

#: Kinds of labels: one class; any number of classes; one or several numbers.
CLASS, MULTILABEL, REGRESSION = LABEL_KINDS = ("class", "multilabel", "regression")

#: Name of the only label of a dataset, and of its feature.
LABEL = "label"

#: Features with the value by which a time split ordered the examples -> their units in a second or, for a
#: column of numbers, in 1: microseconds since 1970 in UTC, whole numbers, and millionths.
SPLIT_TIME_FEATURES = {"split_time_us": 1_000_000, "split_number": 1, "split_number_millionths": 1_000_000}

#: Value of a column: int64, float32, or text (stored as UTF-8).
Scalar = int | float | str


@dataclass(frozen=True)
class Feature:
    """One feature of every tf.train.Example.

    Attributes:
        name: Key in the Example: "image", "label", "key".
        dtype: Type of the value after decoding: "uint8", "int64", "string".
        shape: Shape of the value after decoding; (height, width, channels) for an image, () for a scalar. A
            height or width of None differs from example to example.
        encoding: How the bytes are stored: "png" or "jpeg" (both for a mixture: "image"), "raw" (the uint8
            values themselves, row by row), "" for a column.
        resize: How the image was resized to its shape, which serving repeats, always with antialiasing:
            "crop" (shorter side fitted, then centre-cropped), "pad" (longer side fitted, then padded with
            black on both sides), "stretch" (both sides fitted), or "" (stored as the source had it).
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    encoding: str = ""
    resize: str = ""


@dataclass(frozen=True)
class Label:
    """What is to be predicted of every example.

    Attributes:
        name: Name of its feature: "label" if it is the only one, else also the name of the model's output.
        kind: "class", one of `outputs`, stored as its index, int64 (); "multilabel", any of `outputs`, stored
            as 0 or 1 for each, int64 (outputs,); "regression", a number for each of `outputs`, stored as
            float32 () for one, (outputs,) for several.
        outputs: Names of the classes, or of the numbers.
        units: Unit of each number, "" if unknown; () for classes.
    """

    name: str
    kind: str
    outputs: tuple[str, ...]
    units: tuple[str, ...] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; () for numbers."""
        return () if self.kind == REGRESSION else self.outputs

    @property
    def feature(self) -> Feature:
        """Feature in which it is stored."""
        single = self.kind == CLASS or (self.kind == REGRESSION and len(self.outputs) == 1)
        dtype = "float32" if self.kind == REGRESSION else "int64"
        return Feature(self.name, dtype, () if single else (len(self.outputs),))

    @property
    def fault(self) -> str:
        """What is invalid about it; "" if nothing is."""
        count = len(self.outputs)
        if self.kind not in LABEL_KINDS:
            return f"label {self.name!r} is of the unknown kind {self.kind!r}"
        if count < (2 if self.kind == CLASS else 1) or len(set(self.outputs)) != count:
            return f"label {self.name!r} has too few classes or numbers, or two of one name"
        if len(self.units) not in (0, len(self.outputs)) or (self.units and self.kind != REGRESSION):
            return f"label {self.name!r} has {len(self.units)} units"
        return ""


def is_class(labels: Sequence[Label]) -> bool:
    """Returns whether there is one label, of kind class."""
    return [label.kind for label in labels] == [CLASS]


@dataclass(frozen=True)
class Spread:
    """Values of a number over some examples: smallest, largest, mean, and standard deviation of all."""

    least: float
    largest: float
    mean: float
    deviation: float


@dataclass(frozen=True)
class Tally:
    """Statistics of a label over the examples of a split.

    Attributes:
        counts: Examples of each class, or with each output of a multilabel; () for numbers.
        spreads: Values of each number; () for classes.
    """

    counts: tuple[int, ...] = ()
    spreads: tuple[Spread, ...] = ()

    @classmethod
    def merge(cls, parts: Sequence[tuple[int, Tally]]) -> Tally:
        """Returns the statistics over parts of a dataset, each with its number of examples, from 1."""
        numbers = zip(*(tally.spreads for _, tally in parts), strict=True)
        records = [count for count, _ in parts]
        return cls(
            tuple(map(sum, zip(*(tally.counts for _, tally in parts), strict=True))),
            tuple(_merge_spreads(list(zip(records, spreads, strict=True))) for spreads in numbers),
        )


def _merge_spreads(parts: Sequence[tuple[int, Spread]]) -> Spread:
    total = sum(count for count, _ in parts)
    mean = math.fsum(count * part.mean for count, part in parts) / total
    squares = math.fsum(count * (part.deviation**2 + (part.mean - mean) ** 2) for count, part in parts)
    least, largest = min(part.least for _, part in parts), max(part.largest for _, part in parts)
    return Spread(least, largest, mean, math.sqrt(squares / total))


def find_constant(
    labels: Sequence[Label], tallies: Mapping[str, Tally], trained: Mapping[str, Tally], records: int
) -> Iterator[str]:
    """Yields why a split of `records` examples cannot evaluate a model, for each label that does not vary.

    Fewer than two of the classes of training occur in it, or all examples have the same labels or numbers: a
    model with a constant prediction would be right on all of them.
    """
    for label in labels:
        tally, before = tallies[label.name], trained[label.name]
        of = f" of label {label.name!r}" if len(labels) > 1 else ""
        counts = zip(label.class_names, tally.counts, before.counts, strict=True)
        known = [name for name, now, then in counts if now and then] if label.kind == CLASS else []
        same = all(spread.least == spread.largest for spread in tally.spreads)
        if label.kind == CLASS and len(known) < 2:
            yield f"has no class{of}{f' but {known[0]!r}' if known else ''} that training has"
        elif label.kind != CLASS and same and set(tally.counts) <= {0, records}:
            yield f"has the same {'numbers' if tally.spreads else 'labels'}{of} in all examples"


@dataclass(frozen=True)
class Anomaly:
    """Mismatch of a source and its schema.

    Attributes:
        column: Name of a feature or label.
        problem: "type", "required", "missing values", "missing column", "new column", or the violated
            constraint by its name in Table Schema.
        expected: Description of what was expected.
        examples: Number of examples that have something else; 0 for a column as a whole.
        of: Number of examples that were checked.
        key: Key of the first such example.
        value: Beginning of its value, as Python writes it; "" if it has none.
    """

    column: str
    problem: str
    expected: str
    examples: int = 0
    of: int = 0
    key: str = ""
    value: str = ""

    @property
    def blocks(self) -> bool:
        """Whether it ends a run with `on_anomaly` "fail"; a new column does not."""
        return self.problem != "new column"

    def __str__(self) -> str:
        """Returns it as one line."""
        if not self.examples:
            return f"column {self.column!r}: {self.expected}"
        verb = "has" if self.examples == 1 else "have"
        found, value = ("something else", f" with {self.value}") if self.value else ("none", "")
        return (
            f"column {self.column!r}: expected {self.expected}; {self.examples:,} of {self.of:,} examples "
            f"{verb} {found}, first {self.key!r}{value}"
        )


#: Factors by which JPEG decoders can shrink an image while they decode it.
REDUCTIONS = (2, 4, 8)


class Placement(NamedTuple):
    """Used part of an image and its position in the target, in pixels: ints, or int32 tensors.

    Attributes:
        top, left, height, width: Used part of the image: multiples of `reduction`.
        reduction: Factor, 1, 2, 4 or 8, by which the part may be shrunk before it is resized.
        fitted_height, fitted_width: Size to which the part is resized.
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


def compute_placement(
    height: Any,
    width: Any,
    target: tuple[int, int],
    mode: str,
    *,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> Placement:
    """Computes how an image is fitted into a target.

    The used part is centred. Its sides and corner are rounded down to multiples of the reduction, so that a
    JPEG can be shrunk while it is decoded. Modes are "crop" (the target is covered), "pad" (the whole image
    fits into it) and "stretch". Height and width of the image are ints, or scalar int32 tensors, with the
    `minimum` and `maximum` of two such numbers.
    """
    used, fitted = [height, width], list(target)
    if mode == "crop":
        used[0] = minimum(height, maximum(1, width * target[0] // target[1]))
        used[1] = minimum(width, maximum(1, height * target[1] // target[0]))
    elif mode == "pad":  # rounded to the nearest
        fitted[0] = minimum(target[0], maximum(1, (2 * height * target[1] + width) // (2 * width)))
        fitted[1] = minimum(target[1], maximum(1, (2 * width * target[0] + height) // (2 * height)))
    # At least 1.5 times the target is left, enough for the reduction not to be visible.
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
