"""Evaluation of an exported model: predictions for every stored example of a split, and their metrics.

Images are sent as files to the signature `serving_default`, rows of a table to `serving_example`. Examples
are read from the shards that the manifest names.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import xxhash

from shardline.components.text import enumerate_names
from shardline.components.validate.export import signatures
from shardline.components.validate.export.signatures import THRESHOLD, Predictions, ServedModel
from shardline.components.validate.metrics import QUALITY
from shardline.components.validate.metrics.evaluation import MIN_SLICE, Evaluation, Grouping, Mistake, join
from shardline.components.validate.metrics.intervals import number_groups
from shardline.components.validate.metrics.outcomes import (
    MAX_CATEGORIES,
    ClassOutcomes,
    MultilabelOutcomes,
    Outcomes,
    RegressionOutcomes,
    count_distinct,
)
from shardline.trainer.base.errors import DatasetError
from shardline.trainer.base.progress import advance
from shardline.trainer.data.examples import check_targets, encode_stored, explain_read_error
from shardline.trainer.keras_compat.datasets import no_autograph
from shardline.trainer.manifest import (
    CLASS,
    MULTILABEL,
    REGRESSION,
    Label,
    Manifest,
    Split,
    Spread,
    check_files,
)

#: Wrong predictions that the report shows.
MAX_MISTAKES = 24
# Characters of a text that it shows.
_MAX_TEXT = 400

# TensorFlow's types of stored features that are neither text nor images.
_TF_TYPES = {"int64": tf.int64, "float32": tf.float32}

_QUALITY = {metric.name for metric in QUALITY}


@dataclass(frozen=True)
class ExampleBatch:
    """A batch of stored examples.

    Attributes:
        images: Encoded images, a string tensor of shape [n]; raw pixels become a PNG. None for a table.
        labels: Targets by name of the label, [n] or [n, outputs].
        records: Serialized tf.train.Example, a string tensor of shape [n].
        columns: Further scalar features by name, each [n]; text as str.
        groups: Values of the column that decided the split by group or time, [n]; None without one.
    """

    images: tf.Tensor | None
    labels: Mapping[str, npt.NDArray[Any]]
    keys: tuple[str, ...]
    records: tf.Tensor
    columns: Mapping[str, npt.NDArray[np.generic]]
    groups: npt.NDArray[Any] | None = None

    @property
    def requests(self) -> tf.Tensor:
        """What `ServedModel.predict` takes."""
        return self.records if self.images is None else self.images


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

    def batches(self, size: int) -> Iterator[ExampleBatch]:
        """Yields every example once, in the order of the shards.

        Raises DatasetError when a shard is damaged, or a label or the number of examples does not fit the
        manifest.
        """
        records = tf.data.TFRecordDataset([str(self.directory / shard.file) for shard in self.split.shards])
        parse = no_autograph(lambda some: (some, _parse(some, self.manifest, self.name)))
        seen = 0
        try:
            for serialized, parsed in records.batch(size).map(parse).prefetch(2):
                by = parsed.get(self.manifest.group or self.manifest.time_feature)
                batch = ExampleBatch(
                    images=parsed.pop("image", None),
                    labels={label.name: parsed.pop(label.name).numpy() for label in self.manifest.labels},
                    keys=tuple(_decode_text(parsed.pop("key").numpy()).tolist()),
                    records=serialized,
                    columns={
                        name: _decode_text(column.numpy())
                        for name, column in parsed.items()
                        if name not in self.manifest.split_columns
                    },
                    groups=None if by is None else _decode_text(by.numpy()),
                )
                seen += len(batch.keys)
                yield batch
        except tf.errors.OpError as error:
            tested = replace(self.manifest, splits={self.name: self.split})
            raise explain_read_error(error, self.directory, tested) or error from error
        if seen != self.split.records:
            raise DatasetError(
                f"the shards in {self.directory} hold {seen:,} examples, the manifest says "
                f"{self.split.records:,}; preprocess the data again"
            )


@dataclass(frozen=True)
class Assessment:
    """An evaluation, the outcomes of each label that it was computed from, and the smallest judged slice."""

    evaluation: Evaluation
    outcomes: Mapping[str, Outcomes]
    min_slice: int = MIN_SLICE

    def select(self, mask: npt.NDArray[np.bool_]) -> Assessment:
        """Returns the assessment on the examples in a mask; serving costs stay those measured on all."""
        whole = self.evaluation
        outcomes = {name: outcome.select(mask) for name, outcome in self.outcomes.items()}
        costs = {name: v for name, v in whole.metrics.items() if name.rpartition(".")[2] not in _QUALITY}
        parts = tuple(
            replace(part, mistakes=(), baseline=None, **outcomes[part.label].summarize(self.min_slice))
            for part in whole.each
        )
        selected = replace(join(parts, costs), notes=whole.notes, groups=whole.groups)
        return Assessment(selected, outcomes, self.min_slice).with_counts()

    def with_metrics(self, notes: Mapping[str, str] | None = None, /, **measured: float) -> Assessment:
        """Returns a copy with more metrics, and with `notes` on them by their names."""
        metrics_of_all = {**self.evaluation.metrics, **measured}
        notes = {**self.evaluation.notes, **(notes or {})}
        return replace(self, evaluation=replace(self.evaluation, metrics=metrics_of_all, notes=notes))

    def with_counts(self) -> Assessment:
        """Returns a copy with counts of examples as metrics, and of groups; copies count as one example."""
        total, first = self.evaluation.examples, next(iter(self.outcomes.values()))
        examples = count_distinct(first.copies, total)
        notes = [f"{total:,} with their copies"] * (examples < total)
        if grouping := self.evaluation.groups if first.groups is not None else None:
            grouping = replace(grouping, count=count_distinct(first.groups, total))
            notes.append(f"in {grouping}")
        missed, blind = self.evaluation.never_predicted, self.evaluation.blind_to
        few = [name for it in missed if (name := it.name.partition("=")[2]) not in blind]
        unjudged = f"fewer than {MIN_SLICE} examples, not judged: {enumerate_names(few)}" if few else ""
        counted = replace(self, evaluation=replace(self.evaluation, groups=grouping))
        return counted.with_metrics(
            {"examples": "; ".join(notes), "never_predicted": unjudged},
            examples=examples,
            non_finite=self.evaluation.non_finite,
            never_predicted=len(blind),
        )


def measure_export(
    saved_model: Path,
    examples: Examples,
    *,
    batch_size: int = 64,
    min_slice: int = MIN_SLICE,
    loaded: Any = None,
    calls: int = signatures.CALLS,
    wait_until_idle: Callable[[], object] = lambda: None,
) -> Assessment:
    """Evaluates an exported model on a split of a dataset.

    `loaded` is the result of `tf.saved_model.load`, if the caller has it. Slices are judged from `min_slice`
    examples on. At most `calls` calls of each kind are timed, after `wait_until_idle` has waited for other
    work on this machine. Raises ModelError when the SavedModel is missing or lacks a signature that Shardline
    exports, DatasetError when an example cannot be read or served.
    """
    manifest = examples.manifest
    model = ServedModel(saved_model, manifest, loaded)
    outcomes, mistakes = collect_outcomes(model, examples, batch_size)
    first = next(examples.batches(signatures.REQUESTS))
    wait_until_idle()
    costs = signatures.measure_costs(model, first.requests, calls)
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
    groups = Grouping(manifest.split_column, by_time=not manifest.group)
    return Assessment(replace(join(parts, costs), groups=groups), outcomes, min_slice).with_counts()


def collect_outcomes(
    model: ServedModel, examples: Examples, batch_size: int = 64
) -> tuple[dict[str, Outcomes], dict[str, tuple[Mistake, ...]]]:
    """Returns a model's predictions for all examples, and its worst mistakes, by name of the label."""
    labels = examples.manifest.labels
    batches, categories = list[ExampleBatch](), defaultdict[str, dict[str, str]](dict)
    answers, seen, distinct, copies = [], 0, dict[bytes, int](), list[int]()
    ranked: dict[str, list[tuple[float, int, Mistake]]] = {label.name: [] for label in labels}
    reported, total = time.monotonic(), examples.split.records
    train = examples.manifest.splits.get("train")
    spreads = {name: tally.spreads for name, tally in train.labels.items()} if train else {}
    for batch in examples.batches(batch_size):
        answer = _predict(model, batch)
        for label in labels:
            worst = ranked[label.name]
            mistakes = find_mistakes(label, batch, answer, spreads.get(label.name, ()))
            worst += [(wrong, -(seen + index), mistake) for wrong, index, mistake in mistakes]
            worst[:] = sorted(worst, reverse=True)[:MAX_MISTAKES]
        seen += len(batch.keys)
        if examples.manifest.has_copies:
            hashes = _hash_examples(batch, examples.manifest)
            copies += [distinct.setdefault(digest, len(distinct)) for digest in hashes]
        # The images themselves, and all texts, would not fit in memory.
        sliced = _take_sliced(batch.columns, categories)
        batches.append(replace(batch, images=None, records=None, columns=sliced))
        answers.append(answer)
        if time.monotonic() - reported >= 1.0 or seen == total:
            advance("validate", seen, total, "examples")
            reported = time.monotonic()
    columns = batches[-1].columns  # what is left of them
    by = [b.groups for b in batches if b.groups is not None]
    shared = {
        "columns": {name: np.concatenate([b.columns[name] for b in batches]) for name in columns},
        "copies": np.array(copies) if len(distinct) < len(copies) else None,
        "groups": number_groups(np.concatenate(by), by_time=not examples.manifest.group) if by else None,
    }
    joined, outcomes = Predictions.join(answers), dict[str, Outcomes]()
    for label in labels:
        true = np.concatenate([b.labels[label.name] for b in batches])
        outcomes[label.name] = _make_outcomes(label, true, joined, shared)
    return outcomes, {name: tuple(mistake for *_, mistake in worst) for name, worst in ranked.items()}


def _make_outcomes(label: Label, true: npt.NDArray[Any], joined: Predictions, shared: Any) -> Outcomes:
    outputs = joined.outputs[label.name]
    if label.kind != REGRESSION:
        kind = ClassOutcomes if label.kind == CLASS else MultilabelOutcomes
        return kind(label, true, outputs, predicted=joined.classes[label.name], **shared)
    numbers = true.reshape(len(true), -1).astype(np.float64), outputs.astype(np.float64)
    return RegressionOutcomes(label, *numbers, **shared)


def _hash_examples(batch: ExampleBatch, manifest: Manifest) -> Iterator[bytes]:
    names = [name for name in manifest.inputs if name in batch.columns]
    if batch.images is not None:
        inputs = [batch.images.numpy()]
    elif len(names) == len(manifest.inputs):
        inputs = [batch.columns[name] for name in names]
    else:  # columns of vectors are not read: compare whole records
        inputs = [batch.records.numpy()]
    columns = [*inputs, *batch.labels.values()]
    texts = [column.tolist() for column in columns if column.dtype.kind in "OU"]
    arrays = [column for column in columns if column.dtype.kind not in "OU"]
    numbers = [array.reshape(len(array), -1).view(np.uint8) for array in arrays]
    for row, *strings in zip(np.concatenate(numbers, axis=1), *texts, strict=True):
        parts = (text if isinstance(text, bytes) else text.encode() for text in strings)
        yield xxhash.xxh3_128_digest(b"\0".join([row.tobytes(), *parts]))


def _predict(model: ServedModel, batch: ExampleBatch) -> Predictions:
    try:
        return model.predict(batch.requests)
    except tf.errors.InvalidArgumentError as error:
        # The cause is on the line above the name of the node; before it is where the node was built.
        reason = str(error.message).partition("[[")[0].strip().rpartition("\n")[2]
        raise DatasetError(
            f"an example between {batch.keys[0]!r} and {batch.keys[-1]!r} cannot be served: {reason}; "
            "preprocess the data again"
        ) from None


def _parse(records: tf.Tensor, manifest: Manifest, split: str) -> Any:
    labels = {label.name for label in manifest.labels}
    read = {
        item.name: tf.io.FixedLenFeature(
            item.shape if item.name in labels else [], _TF_TYPES.get(item.dtype, tf.string)
        )
        for item in manifest.features
        if item.name == "image" or item.name in labels or not item.shape
    }
    parsed = tf.io.parse_example(records, read)
    parsed |= {item.name: check_targets(parsed[item.name], [item], split) for item in manifest.labels}
    if "image" in parsed and manifest.image.encoding == "raw":  # the model takes encoded files
        parsed["image"] = encode_stored(parsed["image"], manifest.image)
    return parsed


def _decode_text(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if column.dtype != object:
        return column
    return np.array([value.decode("utf-8", "replace") for value in column], dtype=object)


def _take_sliced(
    columns: Mapping[str, npt.NDArray[Any]], categories: Mapping[str, dict[str, str]]
) -> dict[str, npt.NDArray[Any]]:
    """Returns the columns of a batch without texts of too many values, which are not sliced: `categories`."""
    taken = {}
    for name, column in columns.items():
        if column.dtype == object and len(known := categories[name]) <= MAX_CATEGORIES:
            column = np.array([known.setdefault(text, text) for text in column], object)
        if column.dtype != object or len(known) <= MAX_CATEGORIES:
            taken[name] = column
    return taken


def find_mistakes(
    label: Label, batch: ExampleBatch, answer: Predictions, trained: Sequence[Spread] = ()
) -> Iterator[tuple[float, int, Mistake]]:
    """Yields the worst predictions of a batch: how wrong each is, the example's index, and the mistake.

    Wrong classes rank by their probability, multilabel predictions by the number of wrong labels, numbers by
    their error, in standard deviations of the numbers it was `trained` on.
    """
    true = batch.labels[label.name]
    outputs = answer.outputs[label.name]
    if label.kind == CLASS:
        classes = answer.classes[label.name]
        finite = np.isfinite(outputs).all(axis=1)
        confidence = np.where(finite, outputs[np.arange(len(outputs)), classes], np.inf)
        wrong = np.where(classes != true, confidence, -np.inf)
    elif label.kind == MULTILABEL:
        missed = ((np.nan_to_num(outputs, nan=0.0) >= THRESHOLD) != (true == 1)).sum(axis=1)
        wrong = np.where(missed > 0, missed, -np.inf)
    else:
        true = true.reshape(len(true), -1)
        errors = np.abs(outputs - true) / ([spread.deviation or 1.0 for spread in trained] or 1.0)
        missed = np.nan_to_num(errors.sum(axis=1), nan=np.inf)
        wrong = np.where(missed > 0, missed, -np.inf)
    first = np.argsort(-wrong, kind="stable")[:MAX_MISTAKES]
    for index in map(int, first[wrong[first] != -np.inf]):
        probability = None
        if label.kind == CLASS:
            texts = [label.outputs[true[index]], label.outputs[classes[index]]]
            probability = float(confidence[index]) if np.isfinite(confidence[index]) else None
        else:
            texts = [_format_target(label, values) for values in (true[index], outputs[index])]
        one = label.kind == REGRESSION and len(label.outputs) == 1 and np.isfinite(errors[index, 0])
        error = float(outputs[index, 0] - true[index, 0]) if one else None
        image = b"" if batch.images is None else bytes(batch.images[index].numpy())
        columns = {} if image else batch.columns
        row = {name: _format_value(column[index]) for name, column in columns.items()}
        mistake = Mistake(batch.keys[index], texts[0], texts[1], probability, image, error, row)
        yield float(wrong[index]), index, mistake


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else f"{value[: _MAX_TEXT - 1]}…"
    return "missing" if value != value else f"{value:.7g}" if isinstance(value, np.floating) else str(value)


def _format_target(label: Label, values: npt.NDArray[Any]) -> str:
    if label.kind == MULTILABEL:
        chosen = [name for name, value in zip(label.outputs, values, strict=True) if value >= THRESHOLD]
        return enumerate_names(chosen) or "none"
    return enumerate_names([f"{value:.4g}" for value in values])
