"""Features and labels of an example: how each value is stored, what is to be predicted, what does not fit.

Preprocessing (numbers) and the exported model (tensors) share `place`, so that they cut and place an image in
the same way to the pixel. Loads no TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Types of features that there are, with their encodings and ways of resizing.
_FEATURES = {(dtype, "", "") for dtype in ("uint8", "int64", "float32", "string")} | {
    ("uint8", encoding, resize)
    for encoding in ("png", "jpeg", "image", "raw")
    for resize in ("", "crop", "pad", "stretch")
}

#: Types that a person says of a column, and as what each is stored.
COLUMN_TYPES: Mapping[str, str] = {"text": "string", "integer": "int64", "number": "float32"}

#: Kinds of labels: one of some classes; any number of some classes, or none; one or several numbers.
CLASS, MULTILABEL, REGRESSION = LABEL_KINDS = ("class", "multilabel", "regression")

#: Name of the feature, and of the label, where a dataset has only one.
LABEL = "label"

#: Features that hold the time by which an example was split, by what they count, and how many of it are one
#: second or, where the column holds numbers, one of these: microseconds since 1970 in UTC, whole numbers as
#: the column has them, and millionths of numbers with fractions.
MOMENTS = {"split_time_us": 1_000_000, "split_number": 1, "split_number_millionths": 1_000_000}

#: The value of a feature beside image, label and key: int64, float32, or text (stored as UTF-8).
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
            values themselves, row by row), "" for what is no image.
        resize: How the stored image came to its shape, and serving must repeat, always with antialiasing:
            "crop" (shorter side fitted, then centre-cropped), "pad" (longer side fitted, then padded with
            black on both sides), "stretch" (both sides fitted), or "" (stored as the source had it).
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    encoding: str = ""
    resize: str = ""

    @property
    def is_possible(self) -> bool:
        """Whether there are features of this type, shape, encoding and way of resizing."""
        is_image = len(self.shape) == 3 and self.shape[2] in (1, 3) and self.dtype == "uint8"
        return (
            (self.dtype, self.encoding, self.resize) in _FEATURES
            and all(side is None or side >= 1 for side in self.shape)
            and (not self.encoding or is_image)
        )


@dataclass(frozen=True)
class Label:
    """What is to be predicted of every example.

    Attributes:
        name: Name of the feature that holds it: "label" where it is the only one. Where there are several,
            the model has an output of this name for each.
        kind: "class", one of `outputs`, stored as its index, int64 (); "multilabel", any of `outputs`, stored
            as 0 or 1 for each, int64 (outputs,); "regression", a number for each of `outputs`, stored as
            float32 (), of several (outputs,).
        outputs: Names of the classes, or of the numbers.
        units: Unit of each number, "" where it is not known; () for classes.
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
        """How it is stored."""
        single = self.kind == CLASS or (self.kind == REGRESSION and len(self.outputs) == 1)
        dtype = "float32" if self.kind == REGRESSION else "int64"
        return Feature(self.name, dtype, () if single else (len(self.outputs),))

    @property
    def fault(self) -> str:
        """What cannot be true of any label; "" if nothing is wrong."""
        count = len(self.outputs)
        if self.kind not in LABEL_KINDS:
            return f"label {self.name!r} is of the unknown kind {self.kind!r}"
        if count < (2 if self.kind == CLASS else 1) or len(set(self.outputs)) != count:
            return f"label {self.name!r} has too few classes or numbers, or two of one name"
        if len(self.units) not in (0, len(self.outputs)) or (self.units and self.kind != REGRESSION):
            return f"label {self.name!r} has {len(self.units)} units"
        return ""


def is_class(labels: Sequence[Label]) -> bool:
    """Returns whether there is one label, and it is one class of several."""
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
    """What a label is in the examples of a split.

    Attributes:
        counts: Examples of each class, or that have each of several labels; () for numbers.
        spreads: Values of each number; () for classes.
    """

    counts: tuple[int, ...] = ()
    spreads: tuple[Spread, ...] = ()

    def faults(self, label: Label) -> Iterator[str]:
        """Yields what cannot be true of a label in any split."""
        counted, measured = len(label.class_names), len(label.outputs) - len(label.class_names)
        if (len(self.counts), len(self.spreads)) != (counted, measured):
            yield f"it counts {len(self.counts):,} classes of label {label.name!r}, which has {counted:,}"
        if min(self.counts, default=0) < 0:
            yield f"it has a negative number, {min(self.counts):,}"

    @classmethod
    def merge(cls, parts: Sequence[tuple[int, Tally]]) -> Tally:
        """Returns what a label is in several parts of a dataset, each with its number of examples, from 1."""
        numbers = zip(*(tally.spreads for _, tally in parts), strict=True)
        records = [count for count, _ in parts]
        return cls(
            tuple(map(sum, zip(*(tally.counts for _, tally in parts), strict=True))),
            tuple(_pooled(list(zip(records, spreads, strict=True))) for spreads in numbers),
        )


def _pooled(parts: Sequence[tuple[int, Spread]]) -> Spread:
    total = sum(count for count, _ in parts)
    mean = math.fsum(count * one.mean for count, one in parts) / total
    squares = math.fsum(count * (one.deviation**2 + (one.mean - mean) ** 2) for count, one in parts)
    least, largest = min(one.least for _, one in parts), max(one.largest for _, one in parts)
    return Spread(least, largest, mean, math.sqrt(squares / total))


def find_constant(
    labels: Sequence[Label], tallies: Mapping[str, Tally], trained: Mapping[str, Tally], records: int
) -> Iterator[str]:
    """Yields why a split of so many examples cannot judge a model, for each label that does not vary in it.

    A model that always gives one answer is right there on all that can be learnt: fewer than two of the
    classes that training has occur, or all examples have the same labels or numbers.
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
    """What in a source does not fit the schema that it was checked against.

    Attributes:
        column: Name of a feature or label.
        problem: "type", "required", "missing values", "missing column", "new column", or the constraint that
            is not fulfilled, in the word of Table Schema.
        expected: What was expected, in words.
        examples: Number of examples that have something else; 0 where it is not about examples.
        of: Number of examples that were checked.
        key: The first of them.
        value: Its value, as Python writes it, or the beginning of it; "" where it has none.
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
        """Whether it ends a run that anomalies shall end; a new column does not."""
        return self.problem != "new column"

    def __str__(self) -> str:
        """Returns a line about it."""
        if not self.examples:
            return f"column {self.column!r}: {self.expected}"
        verb = "has" if self.examples == 1 else "have"
        found, value = ("something else", f" with {self.value}") if self.value else ("none", "")
        return (
            f"column {self.column!r}: expected {self.expected}; {self.examples:,} of {self.of:,} examples "
            f"{verb} {found}, first {self.key!r}{value}"
        )


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
    lets a JPEG be shrunk while it is decoded. The mode is "crop" (the target is covered), "pad" (the whole
    image fits into it) or "stretch"; `minimum` and `maximum` compare two such numbers.
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
