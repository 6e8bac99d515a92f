"""Labels of made-up datasets, in the words of a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardline.trainer.data.features import CLASS, LABEL, Label, Tally


def class_label(names: Iterable[str], name: str = LABEL) -> Label:
    """Returns a label that is one of some classes."""
    return Label(name, CLASS, tuple(names))


def counted(counts: Sequence[int], name: str = LABEL) -> Mapping[str, Tally]:
    """Returns the `labels` of a split with so many examples of each class."""
    return {name: Tally(tuple(counts))}
