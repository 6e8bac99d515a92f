"""Evaluation of an exported model: one pass over a split, every example once, as it is stored.

Images go as files through the signature `serving_default`, rows of a table through `serving_example`.
Examples come straight from the shards that the manifest names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import xxhash

from shardline.components.validate.export.predictions import THRESHOLD, Predictions
from shardline.components.validate.export.signatures import CALLS, REQUESTS, ServedModel, measure_costs
from shardline.components.validate.metrics.classes import ClassOutcomes, MultilabelOutcomes
from shardline.components.validate.metrics.evaluation import MIN_SLICE, Evaluation, Mistake
from shardline.components.validate.metrics.metrics import QUALITY
from shardline.components.validate.metrics.regression import RegressionOutcomes
from shardline.components.validate.metrics.resampling import Outcomes, distinct
from shardline.trainer.base.errors import DatasetError
from shardline.trainer.base.progress import advance
from shardline.trainer.data.decode import encode_stored
from shardline.trainer.data.features import CLASS, MULTILABEL, REGRESSION, Label
from shardline.trainer.data.manifest import Manifest, Split, check_files

#: Wrong predictions that are kept as examples.
MOST_MISTAKES = 24

_SECONDS_BETWEEN_REPORTS = 1.0

# TensorFlow's type of a stored feature, where it is neither text nor an image.
_STORED = {"int64": tf.int64, "float32": tf.float32}

_QUALITY = {metric.name for metric in QUALITY}


@dataclass(frozen=True)
class Batch:
    """Some examples, as they are stored.

    Attributes:
        images: Encoded images, a string tensor of shape [n]; raw pixels become a PNG. None for a table.
        labels: Targets by name of the label, [n] or [n, outputs].
        records: Serialized tf.train.Example, a string tensor of shape [n].
        columns: Every further feature of one value, by name, each [n]; text as str.
    """

    images: tf.Tensor | None
    labels: Mapping[str, npt.NDArray[Any]]
    keys: tuple[str, ...]
    records: tf.Tensor
    columns: Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Examples:
    """The examples of one split of the dataset in `directory`.

    Raises DatasetError when the split is missing or empty, or a shard is missing or has another size than
    the manifest says.
    """

    directory: Path
    manifest: Manifest
    name: str = "test"

    def __post_init__(self) -> None:
        split = self.manifest.splits.get(self.name)
        if split is None or split.records == 0:
            raise DatasetError(
                f"the dataset {self.directory} has no examples in its {self.name} split, there is nothing to "
                f"evaluate on; its splits: {', '.join(self.manifest.splits) or 'none'}"
            )
        check_files(self.directory, split.shards)

    @property
    def split(self) -> Split:
        """The split in the manifest."""
        return self.manifest.splits[self.name]

    def batches(self, size: int) -> Iterator[Batch]:
        """Yields every example once, in the order of the shards.

        Raises DatasetError when a shard is damaged, or a label or the number of examples does not fit the
        manifest.
        """
        paths = [str(self.directory / shard.file) for shard in self.split.shards]
        records = tf.data.TFRecordDataset(paths, compression_type=self.manifest.compression.upper())
        batches = records.batch(size).map(lambda some: (some, _parse(some, self.manifest))).prefetch(2)
        seen = 0
        try:
            for serialized, parsed in batches:
                batch = Batch(
                    images=parsed.pop("image", None),
                    labels={one.name: parsed.pop(one.name).numpy() for one in self.manifest.labels},
                    keys=tuple(_text(parsed.pop("key").numpy()).tolist()),
                    records=serialized,
                    columns={
                        name: _text(column.numpy())
                        for name, column in parsed.items()
                        if name not in self.manifest.apart
                    },
                )
                for label in self.manifest.labels:
                    _check_label(batch, label)
                seen += len(batch.keys)
                yield batch
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
            reason = str(error.message).strip().partition("\n")[0]
            raise DatasetError(
                f"a shard in {self.directory} is damaged after {seen:,} examples: {reason}; "
                "preprocess the data again"
            ) from None
        if seen != self.split.records:
            raise DatasetError(
                f"the shards in {self.directory} hold {seen:,} examples, the manifest says "
                f"{self.split.records:,}; preprocess the data again"
            )


@dataclass(frozen=True)
class Assessment:
    """An evaluation, the single predictions that it is made from, and the smallest slice that is judged."""

    evaluation: Evaluation
    outcomes: Mapping[str, Outcomes]
    min_slice: int = MIN_SLICE

    def only(self, chosen: npt.NDArray[np.bool_]) -> Assessment:
        """Returns the same of some of the examples; what the model costs was measured on all."""
        whole = self.evaluation
        outcomes = {name: one.only(chosen) for name, one in self.outcomes.items()}
        costs = {name: v for name, v in whole.metrics.items() if name.rpartition(".")[2] not in _QUALITY}
        parts = tuple(
            replace(part, mistakes=(), baseline=None, **outcomes[part.label].summarize(self.min_slice))
            for part in whole.each
        )
        return Assessment(replace(join(parts, costs), notes=whole.notes), outcomes, self.min_slice).counted()

    def with_metrics(self, notes: Mapping[str, str] | None = None, /, **measured: float) -> Assessment:
        """Returns this with more metrics, and with `notes` on them by their names."""
        metrics_of_all = {**self.evaluation.metrics, **measured}
        notes = {**self.evaluation.notes, **(notes or {})}
        return replace(self, evaluation=replace(self.evaluation, metrics=metrics_of_all, notes=notes))

    def counted(self) -> Assessment:
        """Returns this with what is counted of the examples as metrics; copies of one are one example."""
        total = self.evaluation.examples
        examples = len(distinct(next(iter(self.outcomes.values())).copies, total)[0])
        return self.with_metrics(
            {"examples": f"{total:,} with their copies" if examples < total else ""},
            examples=examples,
            non_finite=self.evaluation.non_finite,
            never_predicted=len(self.evaluation.blind_to),
        )


def join(parts: tuple[Evaluation, ...], costs: Mapping[str, float]) -> Evaluation:
    """Returns the evaluation of one or several labels, with the `costs` of serving the model."""
    first = parts[0]
    if len(parts) == 1:
        return replace(first, metrics={**first.metrics, **costs})

    def named(values: str) -> dict[str, Any]:
        return {f"{one.label}.{name}": value for one in parts for name, value in getattr(one, values).items()}

    return Evaluation(
        fingerprint=first.fingerprint,
        split=first.split,
        examples=first.examples,
        non_finite=max(part.non_finite for part in parts),
        label="",
        kind="",
        metrics={**named("metrics"), **costs},
        intervals=named("intervals"),
        parts=parts,
    )


def measure(
    saved_model: Path,
    examples: Examples,
    *,
    batch_size: int = 64,
    min_slice: int = MIN_SLICE,
    loaded: Any = None,
    calls: int = CALLS,
    settle: Callable[[], object] = lambda: None,
) -> Assessment:
    """Evaluates an exported model on a split of a dataset.

    What `tf.saved_model.load` has returned of it may be given as `loaded`. A slice is judged by `min_slice`
    examples or more; of each kind at most as many `calls` are timed, before which `settle` waits for what
    else keeps this machine busy. Raises ModelError when the SavedModel is missing or lacks a signature that
    Shardline exports, DatasetError when an example cannot be read or served.
    """
    manifest = examples.manifest
    model = ServedModel(saved_model, manifest, loaded)
    outcomes, mistakes = gather(model, examples, batch_size)
    first = next(examples.batches(REQUESTS))
    settle()
    costs = measure_costs(model, first.images, first.records, calls)
    train = manifest.splits.get("train")
    parts = tuple(
        Evaluation(
            fingerprint=manifest.fingerprint,
            split=examples.name,
            label=label.name,
            kind=label.kind,
            outputs=label.outputs,
            mistakes=mistakes[label.name],
            baseline=outcomes[label.name].baseline(train.labels[label.name] if train else None),
            **outcomes[label.name].summarize(min_slice),
        )
        for label in manifest.labels
    )
    return Assessment(join(parts, costs), outcomes, min_slice).counted()


def gather(
    model: ServedModel, examples: Examples, batch_size: int
) -> tuple[dict[str, Outcomes], dict[str, tuple[Mistake, ...]]]:
    """Returns by label a model's answers to all examples, and its worst ones."""
    labels = examples.manifest.labels
    batches: list[Batch] = []
    answers, seen, known, groups = [], 0, dict[bytes, int](), list[int]()
    ranked: dict[str, list[tuple[float, int, Mistake]]] = {label.name: [] for label in labels}
    reported, total = time.monotonic(), examples.split.records
    for batch in examples.batches(batch_size):
        answer = _predict(model, batch)
        for label in labels:
            worst = ranked[label.name]
            found = find_mistakes(label, batch.labels[label.name], answer, batch.keys, batch.images)
            worst += [(wrong, -(seen + place), mistake) for wrong, place, mistake in found]
            worst[:] = sorted(worst, reverse=True)[:MOST_MISTAKES]
        seen += len(batch.keys)
        groups += [known.setdefault(one, len(known)) for one in _identities(batch, examples.manifest)]
        # The images themselves would not fit in memory.
        batches.append(replace(batch, images=None, records=None))
        answers.append(answer)
        if time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS or seen == total:
            advance("validate", seen, total, "examples")
            reported = time.monotonic()
    columns = {name: np.concatenate([b.columns[name] for b in batches]) for name in batches[0].columns}
    joined, copies = Predictions.join(answers), np.array(groups) if len(known) < seen else None
    outcomes: dict[str, Outcomes] = {}
    for label in labels:
        name, said = label.name, joined.said[label.name]
        true = np.concatenate([b.labels[name] for b in batches])
        if label.kind != REGRESSION:
            kind = ClassOutcomes if label.kind == CLASS else MultilabelOutcomes
            outcomes[name] = kind(label, true, said, columns, copies, predicted=joined.classes[name])
        else:
            numbers = true.reshape(len(true), -1).astype(np.float64), said.astype(np.float64)
            shares = model.quantiles.get(name, ())
            quantiles = joined.quantiles[name].astype(np.float64) if shares else None
            outcomes[name] = RegressionOutcomes(label, *numbers, columns, copies, quantiles, shares)
    mistakes = {name: tuple(mistake for *_, mistake in found) for name, found in ranked.items()}
    return outcomes, mistakes


def _identities(batch: Batch, manifest: Manifest) -> Iterator[bytes]:
    """Yields a hash of each example's inputs and labels, by which its copies are known."""
    names = [name for name in manifest.inputs if name in batch.columns]
    if batch.images is not None:
        inputs = [batch.images.numpy()]
    elif len(names) == len(manifest.inputs):
        inputs = [batch.columns[name] for name in names]
    else:  # a column of vectors is not read: no two records are the same
        inputs = [batch.records.numpy()]
    columns = [*inputs, *batch.labels.values()]
    texts = [one.tolist() for one in columns if one.dtype.kind in "OU"]
    numbers = [one.reshape(len(one), -1).view(np.uint8) for one in columns if one.dtype.kind not in "OU"]
    for row, *words in zip(np.concatenate(numbers, axis=1), *texts, strict=True):
        parts = (word if isinstance(word, bytes) else word.encode() for word in words)
        yield xxhash.xxh3_128_digest(b"\0".join([row.tobytes(), *parts]))


def _predict(model: ServedModel, batch: Batch) -> Predictions:
    try:
        if batch.images is None:
            return model.predict_examples(batch.records)
        return model.predict(batch.images)
    except tf.errors.InvalidArgumentError as error:
        # The cause stands above the name of the node; before it, only where the node was built.
        reason = str(error.message).partition("[[")[0].strip().rpartition("\n")[2]
        raise DatasetError(
            f"an example between {batch.keys[0]!r} and {batch.keys[-1]!r} cannot be served: {reason}; "
            "preprocess the data again"
        ) from None


def _parse(records: tf.Tensor, manifest: Manifest) -> Any:
    labels = {label.name for label in manifest.labels}
    read = {
        item.name: tf.io.FixedLenFeature(
            item.shape if item.name in labels else [], _STORED.get(item.dtype, tf.string)
        )
        for item in manifest.features
        if item.name == "image" or item.name in labels or not item.shape
    }
    parsed = tf.io.parse_example(records, read)
    if "image" in parsed and manifest.image.encoding == "raw":  # the model is served files
        parsed["image"] = tf.map_fn(
            lambda stored: encode_stored(stored, manifest.image),
            parsed["image"],
            fn_output_signature=tf.string,
        )
    return parsed


def _text(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns a column with text in place of bytes."""
    if column.dtype != object:
        return column
    return np.array([value.decode("utf-8", "replace") for value in column], dtype=np.str_)


def _check_label(batch: Batch, label: Label) -> None:
    values, classes = batch.labels[label.name], len(label.outputs) if label.kind == CLASS else 2
    if label.kind == REGRESSION:
        wrong = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
        there = "finite numbers"
    else:
        wrong = np.flatnonzero(((values < 0) | (values >= classes)).reshape(len(values), -1).any(axis=1))
        there = f"classes 0..{classes - 1}"
    if wrong.size:
        first = int(wrong[0])
        raise DatasetError(
            f"example {batch.keys[first]!r} has label {values[first]}, the dataset has {there}; preprocess "
            "the data again"
        )


def find_mistakes(
    label: Label, true: npt.NDArray[Any], answer: Predictions, keys: Sequence[str], images: Any
) -> Iterator[tuple[float, int, Mistake]]:
    """Yields the most wrong answers to some examples: how wrong each is, the example's place, and the answer.

    Wrong classes rank by the probability that they were given, several labels by the number that is wrong,
    numbers by their error.

    `true` is as it is stored; `images` are encoded, a string tensor [n], None for a table.
    """
    said = answer.said[label.name]
    if label.kind == CLASS:
        classes = answer.classes[label.name]
        given = np.where(np.isfinite(said).all(axis=1), said[np.arange(len(said)), classes], np.inf)
        wrong = np.where(classes != true, given, -np.inf)
    elif label.kind == MULTILABEL:
        missed = ((np.nan_to_num(said, nan=0.0) >= THRESHOLD) != (true == 1)).sum(axis=1)
        wrong = np.where(missed > 0, missed, -np.inf)
    else:
        true = true.reshape(len(true), -1)
        errors = np.abs(said - true) / np.maximum(np.abs(true).mean(axis=0), 1e-9)
        missed = np.nan_to_num(errors.sum(axis=1), nan=np.inf)
        wrong = np.where(missed > 0, missed, -np.inf)
    first = np.argsort(-wrong, kind="stable")[:MOST_MISTAKES]
    for index in map(int, first[wrong[first] != -np.inf]):
        probability = None
        if label.kind == CLASS:
            texts = [label.outputs[true[index]], label.outputs[classes[index]]]
            probability = float(given[index]) if np.isfinite(given[index]) else None
        else:
            texts = [_said(label, values) for values in (true[index], said[index])]
        image = b"" if images is None else bytes(images[index].numpy())
        yield float(wrong[index]), index, Mistake(keys[index], texts[0], texts[1], probability, image)


def _said(label: Label, values: npt.NDArray[Any]) -> str:
    if label.kind == MULTILABEL:
        chosen = [name for name, value in zip(label.outputs, values, strict=True) if value >= THRESHOLD]
        return ", ".join(chosen) or "none"
    return ", ".join(f"{value:.4g}" for value in values)
