"""Labels of made-up datasets, in the words of a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shardline.trainer.manifest import CLASS, LABEL, MULTILABEL, REGRESSION, Label, Spread, Tally

#: Labels of every kind, by a name for a test's parameters, as `tests.helpers.datasets.write_labelled` takes
#: them: classes, several labels, one number, two numbers, and a class beside a number.
LABELLED = {
    "class": (Label(LABEL, CLASS, ("top", "middle", "bottom")),),
    "multilabel": (Label(LABEL, MULTILABEL, ("upper", "large", "central", "small")),),
    "regression": (Label(LABEL, REGRESSION, ("price",), ("EUR",)),),
    "numbers": (Label(LABEL, REGRESSION, ("price", "area"), ("EUR", "")),),
    "two": (
        Label("kind", CLASS, ("top", "middle", "bottom")),
        Label("price", REGRESSION, ("price",), ("EUR",)),
    ),
}


def class_label(names: Iterable[str], name: str = LABEL) -> Label:
    """Returns a label that is one of some classes."""
    return Label(name, CLASS, tuple(names))


def counted(counts: Sequence[int], name: str = LABEL) -> Mapping[str, Tally]:
    """Returns the `labels` of a split with so many examples of each class."""
    return {name: Tally(tuple(counts))}


def label_values(label: Label, kinds: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns what a made-up label is in each example, (examples, numbers or labels), or (examples,).

    Args:
        label: Of any kind.
        kinds: A number 0..2 of each example, of which a class is made.
        sizes: A number in 0..1 of each example, of which numbers are made.
    """
    if label.kind == CLASS:
        return kinds % len(label.outputs)
    if label.kind == MULTILABEL:
        facts = [kinds == 0, sizes > 0.5, kinds == 1, sizes < 0.2]
        return np.stack([facts[n % 4] for n in range(len(label.outputs))], axis=1).astype(np.int64)
    numbers = [20 + 10 * kinds + 100 * (n + 1) * sizes for n in range(len(label.outputs))]
    return np.stack(numbers, axis=1).astype(np.float32)


def tally(label: Label, values: np.ndarray) -> Tally:
    """Returns what a manifest says of a label's values in a split, as `label_values` gives them."""
    if label.kind == CLASS:
        return Tally(tuple(np.bincount(values, minlength=len(label.outputs)).tolist()))
    if label.kind == MULTILABEL:
        return Tally(tuple(values.sum(axis=0).tolist()))
    columns = values.astype(np.float64).T
    return Tally(spreads=tuple(Spread(*map(float, (c.min(), c.max(), c.mean(), c.std()))) for c in columns))
