"""Bootstrap: how far a metric, or a lead over the champion, may lie from what was measured.

Metrics that are counted from right and wrong predictions depend on the examples only through the number
in each cell (true class, predicted class). To draw n examples with replacement is then to draw the cells'
numbers from a multinomial distribution, which needs no pass over the examples. The champion's predictions
on the same examples make the cells finer; the two models are always drawn together (paired).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from shardline.components.validate.evaluation import COUNTED, Interval, Lead

RESAMPLES = 1000

_SEED = 20170
_CHUNK = 100
_PERCENTILES = (2.5, 97.5)

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


def intervals(labels: _Ints, predicted: _Ints, class_names: tuple[str, ...]) -> Mapping[str, Interval]:
    """Returns the 95 % interval of every counted metric, and of "recall[class=healthy]" and its like.

    Classes without examples have none. The same arguments give the same intervals.

    Args:
        labels: True classes, [n], n >= 1.
        predicted: Predicted classes, [n].
        class_names: In the order of the labels.
    """
    cells, counts = _cells(labels, predicted)
    values = np.concatenate(
        [_values(drawn, cells[:, 0], cells[:, 1], len(class_names)) for drawn in _draw(counts)]
    )
    return {name: _interval(values[:, place]) for place, name in _measured(labels, class_names)}


def leads(
    labels: _Ints, predicted: _Ints, champion: _Ints, class_names: tuple[str, ...]
) -> Mapping[str, Lead]:
    """Returns the lead over the champion in each of those metrics.

    Args:
        labels: True classes, [n], n >= 1.
        predicted: Predicted classes, [n].
        champion: The champion's predictions for the same examples, [n].
        class_names: In the order of the labels.
    """
    classes = len(class_names)
    cells, counts = _cells(labels, predicted, champion)
    true, ours, theirs = cells.T

    def difference(drawn: _Ints) -> _Floats:
        return _values(drawn, true, ours, classes) - _values(drawn, true, theirs, classes)

    measured = difference(counts[None])[0]
    values = np.concatenate([difference(drawn) for drawn in _draw(counts)])
    return {
        name: Lead(
            difference=float(measured[place]),
            interval=_interval(values[:, place]),
            p=float(((values[:, place] <= 0).sum() + 1) / (RESAMPLES + 1)),
        )
        for place, name in _measured(labels, class_names)
    }


def share_interval(right: int, examples: int) -> Interval:
    """Returns the 95 % interval of a share, 0..1."""
    drawn = np.random.default_rng(_SEED).binomial(examples, right / examples, RESAMPLES)
    return _interval(drawn / examples)


def _cells(*columns: _Ints) -> tuple[_Ints, _Ints]:
    """Returns the distinct combinations, [cells, columns], and how often each of them is there."""
    return np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)


def _draw(counts: _Ints) -> Iterator[_Ints]:
    """Yields all resamples of cells, [chunk, cells] at a time."""
    rng = np.random.default_rng(_SEED)
    total = int(counts.sum())
    for _ in range(RESAMPLES // _CHUNK):
        yield rng.multinomial(total, counts / total, size=_CHUNK)


def _values(drawn: _Ints, true: _Ints, predicted: _Ints, classes: int) -> _Floats:
    """Returns the metrics of each resample, [resamples, metrics], in the order of `_measured`."""
    hit = _sum_by(drawn * (true == predicted), true, classes)
    support, said = _sum_by(drawn, true, classes), _sum_by(drawn, predicted, classes)
    precision, recall, f1 = _divide(hit, said), _divide(hit, support), _divide(2 * hit, said + support)
    present = (said + support) > 0
    averages = [
        hit.sum(axis=1) / support.sum(axis=1),
        *(scores.sum(axis=1) / present.sum(axis=1) for scores in (precision, recall, f1)),
        (f1 * support).sum(axis=1) / support.sum(axis=1),
    ]
    return np.concatenate([np.stack(averages, axis=1), precision, recall, f1], axis=1)


def _measured(labels: _Ints, class_names: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yields place and name of the metrics in `_values`, less those of classes without examples."""
    yield from enumerate(COUNTED)
    present = np.unique(labels)
    for row, metric in enumerate(("precision", "recall", "f1")):
        for label in present:
            place = len(COUNTED) + row * len(class_names) + int(label)
            yield place, f"{metric}[class={class_names[label]}]"


def _sum_by(drawn: _Ints, keys: _Ints, classes: int) -> _Floats:
    return np.stack([np.bincount(keys, weights=row, minlength=classes) for row in drawn])


def _divide(over: _Floats, under: _Floats) -> _Floats:
    return np.divide(over, under, out=np.zeros_like(over), where=under > 0)


def _interval(values: _Floats) -> Interval:
    lower, upper = np.percentile(values, _PERCENTILES)
    return float(lower), float(upper)
