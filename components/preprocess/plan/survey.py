"""Survey: the only pass over a source, which checks and records each example, and locates its image.

Checked are the source's declarations, each example that it yields, and the labels of all of them. Examples
that cannot be used end the run or, with on_bad_record="skip", are left out and named in a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from shardline.components.preprocess.plan import records
from shardline.components.preprocess.plan.image_locations import ImageLocation, ImageLocator, ImagePosition
from shardline.components.preprocess.plan.plan import Plan, Survey
from shardline.components.preprocess.plan.records import HEAD, Numbers, Records, SplitCodes, digests
from shardline.components.preprocess.process_pool import Processes, Report
from shardline.components.preprocess.schema import Schema, SchemaCheck, read_schema
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import Scan, TableRows, open_source
from shardline.components.preprocess.sources.example import (
    OWN_FEATURES,
    Batch,
    ExampleColumns,
    Source,
    prefetched,
    without,
)
from shardline.components.preprocess.tfrecord import encode
from shardline.components.preprocess.work_directory import WorkDirectory
from shardline.components.text import enumerate_names
from shardline.trainer.base import deserialize, plugins
from shardline.trainer.base.deserialize import did_you_mean
from shardline.trainer.base.errors import BadRecordError, SourceError, printable
from shardline.trainer.base.progress import Meter, report
from shardline.trainer.manifest import (
    CLASS,
    LABEL,
    MULTILABEL,
    REGRESSION,
    SPLITS,
    Anomaly,
    Feature,
    Label,
    is_class,
)


def check_labels(source: Any) -> tuple[Label, ...]:
    """Returns the labels of a source: those that it declares, else one of its classes."""
    declared = getattr(source, "labels", None)
    labels = tuple(declared) if declared else (Label(LABEL, CLASS, tuple(source.class_names)),)
    for label in labels:
        if not isinstance(label, Label):
            raise SourceError(f"the source's labels hold a {type(label).__name__}; give shardline.Label(...)")
        class_names = label.class_names
        for name in class_names:
            if not isinstance(name, str) or not name.isprintable():
                raise SourceError(f"class name {name!r} is not printable text; rename the class")
        if twice := [name for name, count in Counter(class_names).items() if count > 1]:
            raise SourceError(f"class names are not unique: {enumerate_names(twice)}")
        if label.kind == CLASS and len(class_names) < 2:
            found = f"only {class_names[0]!r}" if class_names else "none"
            raise SourceError(
                f"at least 2 classes are needed, the source has {found}; add examples of another, or name "
                "another label, or the directory in which the classes' folders are"
            )
        if label.fault:
            raise SourceError(f"the source's {label.fault}")
    if len(labels) == 1:
        return (dataclasses.replace(labels[0], name=LABEL),)
    names = [label.name for label in labels]
    for name in names:
        if names.count(name) > 1 or name in OWN_FEATURES or not is_text(name):
            raise SourceError(f"label {name!r} cannot have this name among several labels; rename its column")
    return labels


def check_features(source: Any) -> tuple[Feature, ...]:
    """Returns the features that a source declares."""
    features = tuple(getattr(source, "features", ()))
    for feature in features:
        if not isinstance(feature, Feature):
            raise SourceError(
                f"the source's features hold a {type(feature).__name__}; give shardline.Feature(NAME, TYPE)"
            )
        if not is_text(feature.name):
            raise SourceError(
                f"feature {feature.name!r} has a name that UTF-8 cannot hold; rename its column"
            )
        if feature.name.splitlines() != [feature.name]:
            raise SourceError(f"feature {feature.name!r} needs a name of one line; rename its column")
    return features


def is_text(name: Any) -> bool:
    """Whether it is a text without lone surrogates, which UTF-8 cannot hold."""
    return isinstance(name, str) and not any("\ud800" <= char <= "\udfff" for char in name)


def check_stratified(labels: Sequence[Label], existing: Collection[str | None]) -> None:
    """Refuses what cannot be stratified: labels other than one class, and a source with its own splits."""
    if not is_class(labels):
        kinds = ", ".join(f"{label.name} of kind {label.kind}" for label in labels)
        raise SourceError(
            f"stratify needs one label that is a class, the source has {kinds}; leave stratify out, or "
            "predict one class"
        )
    if own := [split for split in SPLITS if split in existing]:
        raise SourceError(
            f"stratify would undo the splits that the source gives its examples ({', '.join(own)}); leave "
            "stratify out"
        )


def check_anomalies(plan: Plan) -> None:
    """Reports each anomaly in a line; raises SourceError if one blocks, unless on_anomaly is "warn"."""
    for anomaly in plan.anomalies:
        report("preprocess", f"anomaly: {anomaly}")
    blocking = [anomaly for anomaly in plan.anomalies if anomaly.blocks]
    if blocking and plan.settings.on_anomaly == "fail":
        named = enumerate_names([f"{anomaly.column} ({anomaly.problem})" for anomaly in blocking])
        raise SourceError(
            f"the source does not fit the schema {plan.settings.schema}: {named} (see the log); correct "
            "the data or the schema, or continue with on_anomaly=warn"
        )


def check_group(group: str, features: Sequence[Feature]) -> str:
    """Returns the feature whose values are groups, "" for none; SourceError if the source lacks it."""
    names = [feature.name for feature in features]
    if group and group not in names:
        raise SourceError(
            f"the source has no feature {group!r} to group by, it has "
            f"{printable(', '.join(names))[:300] or 'none'}"
            f"{did_you_mean(group, names, after='; ')}"
        )
    return group


def group_name(value: Any) -> str:
    """Returns the group of an example; "" if it has none."""
    if value is None or value != value:  # NaN is not itself
        return ""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


class Targets:
    """Counts the values of labels.

    `counts` has by label the number of examples of each output; of numbers the largest, and of their
    negatives, in two rows.
    """

    def __init__(self, labels: Sequence[Label]) -> None:
        self._labels = labels
        self.counts: dict[str, Numbers] = {
            label.name: np.full((2, len(label.outputs)), -np.inf)
            if label.kind == REGRESSION
            else np.zeros(len(label.outputs), np.int64)
            for label in labels
        }

    def add(self, columns: Mapping[str, Any]) -> None:
        """Counts the labels of some examples, at least one."""
        for label in self._labels:
            width, values = len(label.outputs), columns[label.name]
            flat = values.flatten() if hasattr(values, "flatten") else values
            if label.kind == CLASS:
                found = np.bincount(flat.to_numpy(False), minlength=width)
            elif label.kind == MULTILABEL:
                found = flat.to_numpy(False).reshape(-1, width).sum(axis=0)
            else:
                numbers = flat.to_numpy(False).reshape(-1, width).astype(np.float32)
                found = np.stack([(-numbers).max(axis=0), numbers.max(axis=0)])
            self.merge({label.name: found})

    def merge(self, counts: Mapping[str, Any]) -> None:
        """Adds the counts of other examples."""
        for name, found in counts.items():
            of = np.maximum if self.counts[name].ndim > 1 else np.add
            self.counts[name] = of(self.counts[name], found)

    def check_varied(self, count: int) -> None:
        """Refuses labels that are the same for all `count` examples: a constant cannot be learned."""
        for label in self._labels:
            counts = np.atleast_2d(self.counts[label.name]).T.tolist()
            for output, found in zip(label.outputs, counts, strict=True):
                if label.kind == REGRESSION and -found[0] == found[1]:
                    raise SourceError(
                        f"all {count:,} examples have the value {found[1]:g} of {output!r}; a constant "
                        "cannot be learned; leave it out of label"
                    )
                if label.kind == CLASS and found[0] == count:
                    of = f" of {label.name!r}" if label.name != LABEL else ""
                    raise SourceError(
                        f"all {count:,} examples are of one class{of}, {output!r}; add examples of "
                        "another class"
                    )
                if label.kind == MULTILABEL and found[0] in (0, count):
                    raise SourceError(
                        f"{'all' if found[0] else 'none'} of the {count:,} examples have {output!r}; leave "
                        "it out of label, or add other examples"
                    )


# Examples of a source of one's own that are added together, at most, and bytes of their images, about.
_TOGETHER, _HELD_BYTES = 512, 4 << 20


class Rejected:
    """Bad examples, an error with the policy "fail"; with "skip", `found` has their names and reasons."""

    def __init__(self, policy: str) -> None:
        self._policy, self.found = policy, list[Sequence[str]]()

    @property
    def reasons(self) -> Counter[str]:
        """Number of examples by reason."""
        return Counter(reason for _, reason in self.found)

    def add(self, error: BadRecordError) -> None:
        """Leaves an example out; under the policy "fail", raises its error."""
        if self._policy == "fail":
            skip = "leave such examples out: --on-bad-record skip (on_bad_record in a pipeline)"
            raise BadRecordError(error.name, f"{error.reason}; correct it, or {skip}")
        self.found.append((error.name, error.reason))

    def write(self, path: Path) -> None:
        """Writes the names, sorted: the order of a stream of rows differs from run to run."""
        if self.found:
            lines = (json.dumps({"file": name, "reason": reason}) + "\n" for name, reason in self.found)
            path.write_text("".join(sorted(lines)))

    def check_fraction(self, records_in: int, largest_fraction: float) -> None:
        """Raises SourceError if too many were left out, with the most frequent reason and an example."""
        total = len(self.found)
        if total <= largest_fraction * records_in:
            return
        reason, count = self.reasons.most_common(1)[0]
        name = next(name for name, why in self.found if why == reason)
        raise SourceError(
            f"{total:,} of {records_in:,} examples cannot be used, more than max_bad_fraction "
            f"{largest_fraction:g} allows; {count:,} of them: {reason} ({name!r})"
        )


def survey_source(
    settings: PreprocessSettings, work: WorkDirectory, processes: Processes, rejected: Rejected
) -> Survey:
    """Reads the source once; images that are files, or in files, only position their content is the key.

    Rows of a table without images are read by all processes, batch by batch in turn.

    Raises SourceError for a source without examples or with fewer than two classes, for invalid examples, and
    for those that do not fit the schema.
    """
    surveyed, schema = time.time_ns(), read_schema(settings.schema) if settings.schema else None
    source = open_source(settings, schema)
    with plugins.calling("the source failed", SourceError):
        labels, features = check_labels(source), check_features(source)
        length = operator.length_hint(source, 0)
    if settings.stratify:
        check_stratified(labels, ())
    plan = Plan(settings, labels, features, (ImageLocation("none"),), surveyed, 0)
    plan = replace(plan, schema=schema.digest if schema else "")
    buckets, meter = records.Buckets(work.buckets), Meter("read", length)
    with contextlib.closing(ImageLocator(work.spool)) as images:
        builder = _RecordBuilder(plan, work, buckets, images, rejected, schema, source)
        if isinstance(source, TableRows):
            source.report()
        if isinstance(source, TableRows) and source.batch_count:
            plan.save(work.plan)
            arguments = work.arguments | {"scan": asdict(source.scan)}
            items = list(map(str, range(source.batch_count)))
            for state in processes.run_job(survey_batches, arguments, items, meter.advance).values():
                builder.merge(state)
            builder.check_rows(source.scan.rows)
        else:
            builder.add_all(source, meter)
        builder.check_examples()
        locations = tuple(images.locations)
    counts = builder.counts
    records_in, anomalies = int(counts.sum()) + len(rejected.found), builder.anomalies()
    plan = replace(plan, places=locations, records_in=records_in, anomalies=anomalies)
    check_anomalies(plan)
    return Survey(plan, buckets, counts.tolist(), frozenset(builder.existing), builder.numbers_copies)


def survey_batches(arguments: Mapping[str, Any], items: Iterable[str], report: Report) -> dict[str, Any]:
    """Adds some batches of a table's rows to the buckets: a job of the process pool.

    Returns the state of the builder, by the first of the batches.
    """
    work = WorkDirectory(Path(arguments["out"]), Path(arguments["path"]))
    plan = Plan.load(work.plan)
    schema = read_schema(plan.settings.schema) if plan.settings.schema else None
    scan = deserialize.restore(Scan, arguments["scan"], "the scan", SourceError)
    numbers = iter(items)
    first = next(numbers, None)
    if first is None:
        return {}
    source: Any = open_source(plan.settings, schema, scan)
    source.labels = plan.labels
    buckets, rejected = records.Buckets(work.buckets), Rejected(plan.settings.on_bad_record)
    with contextlib.closing(ImageLocator(work.spool)) as images:
        builder = _RecordBuilder(plan, work, buckets, images, rejected, schema, source)
        for batch in source.batches(map(int, chain([first], numbers))):
            report(builder.add(batch), 0)
        buckets.flush()
        return {first: builder.state()}


class _RecordBuilder:
    """Builds records of the examples of a source, and counts them.

    Attributes:
        rows: Number of examples, with those that cannot be used.
        existing: Splits that the source assigns, None among them for examples without one.
        counts: Number of examples by split code.
        numbers_copies: As `plan.Survey.numbers_copies`.
    """

    def __init__(
        self,
        plan: Plan,
        work: WorkDirectory,
        buckets: records.Buckets,
        images: ImageLocator,
        rejected: Rejected,
        schema: Schema | None,
        source: Any,
    ) -> None:
        self._settings, self._labels, self._features = plan.settings, plan.labels, plan.features
        self._buckets, self._images, self._rejected = buckets, images, rejected
        self._by_content = plan.settings.key == "content"
        self._has_keys = self._by_content or getattr(source, "has_keys", True)  # a position may be another's
        self._group = check_group(self._settings.group, self._features)
        self._targets, self._is_class = Targets(self._labels), is_class(self._labels)
        self._class_label = next((label.name for label in self._labels if label.kind == CLASS), "")
        self.numbers_copies = bool(getattr(source, "numbers_copies", False))
        # Equal keys are not found by digests of the content.
        self._keys = work.keys if self._by_content and not self.numbers_copies else None
        self._schema = None
        if schema:
            texts = getattr(source, "integer_texts", ())
            column = self._settings.label_column
            self._schema = SchemaCheck(schema, self._features, self._labels, column, texts)
        self._groups = set[str]()  # up to two of them, or a few more
        self._rounded = set[str]()
        self._codes = SplitCodes(self._settings.split)
        self.counts = np.zeros(self._codes.count, np.int64)
        self.existing = set[str | None]()
        self.rows = 0

    def add_all(self, source: Any, meter: Meter) -> None:
        """Adds all examples of a source."""
        with plugins.calling("the source failed", SourceError):
            batches = source.batches() if hasattr(source, "batches") else self._batches(source)
            if self._by_content or self._settings.on_bad_record == "skip":  # images are needed twice
                batches = prefetched(batches)
            for batch in batches:
                meter.advance(self.add(batch))

    def _batches(self, source: Source) -> Iterator[Batch]:
        """Yields the examples of a source of Examples in batches."""
        rows = ExampleColumns(self._labels, self._features)
        for found in source:
            try:
                rows.add(found)
            except BadRecordError as error:
                self._rejected.add(error)
            if len(rows) >= _TOGETHER or rows.held > _HELD_BYTES:
                yield rows.flush()
        yield rows.flush()

    def add(self, batch: Batch) -> int:
        """Adds the records of some examples, and returns the number of examples."""
        count = len(batch.keys) + len(batch.bad)
        self.rows += count + batch.left_out
        for bad in batch.bad:
            self._rejected.add(BadRecordError(bad.name, bad.reason))
        batch, positions, contents = self._located(self._with_group(batch))
        if not batch.keys:
            return count
        groups = self._groups_of(batch)
        if len(self._groups) < 2:
            self._groups.update(groups)
        heads, keys = np.zeros(len(batch.keys), HEAD), _key_bytes(batch.keys)
        identities, entries, paths = keys, (), list[bytes]()
        columns = batch.columns
        if self._is_class:
            columns = {name: values for name, values in columns.items() if name != LABEL}
        if columns:
            entries = encode(columns)
        if self._class_label:
            heads["label"] = batch.columns[self._class_label].to_numpy(False)
        if self._by_content:
            identities = entries.to_pylist() if entries else contents
            identities = list(map(operator.add, contents, identities)) if contents and entries else identities
        self._set_digests(heads, identities, groups, batch.splits)
        if self._keys:
            with self._keys.open("ab", buffering=0) as file:
                file.write(digests(keys, 0)[1].tobytes())
        if positions:
            for name, values in zip(
                ("location", "offset", "length"), zip(*positions, strict=True), strict=False
            ):
                heads[name] = values
            heads["checksum"] = [position[4] for position in positions]
            paths = [position[3] for position in positions]
        self._count(batch, heads)
        self._buckets.append(Records.make(heads, keys, paths, entries))
        return count

    def _set_digests(
        self, heads: Any, identities: Sequence[bytes], groups: Sequence[str], splits: Sequence[str | None]
    ) -> None:
        seed, salt = self._settings.seed, self._settings.split_salt
        found = {number: digests(identities, number) for number in {0, seed, salt}}
        heads["order"], heads["order_low"] = found[seed]
        points = digests(_key_bytes(groups), salt)[1] if self._group else found[salt][1]
        heads["code"] = self._codes.codes(points, splits or (None,))
        heads["key_hash"] = found[0][1] if self._has_keys else 0

    def _count(self, batch: Batch, heads: Any) -> None:
        self._targets.add(batch.columns)
        self._rounded.update(batch.rounded)
        self.existing.update(batch.splits or (None,))
        self.counts += np.bincount(heads["code"], minlength=len(self.counts))
        if self._schema:
            self._schema.add(batch.keys, batch.columns)

    def _located(self, batch: Batch) -> tuple[Batch, list[ImagePosition], list[bytes]]:
        """Returns the examples whose image is found, its positions, and its content if that is the key."""
        if not self._by_content:
            return batch, list(map(self._images.locate, batch.images, batch.keys)), []
        positions, contents, bad = list[ImagePosition](), list[bytes](), set[int]()
        for number, image in enumerate(batch.images):
            name = batch.keys[number]
            try:
                position = self._images.locate(image, name)
                contents.append(self._images.content(position, *_key_bytes([name])))
                positions.append(position)
            except BadRecordError as error:
                self._rejected.add(error)
                bad.add(number)
        return without(batch, bad), positions, contents

    def _with_group(self, batch: Batch) -> Batch:
        """Returns the examples that have a group."""
        bad = {number for number, group in enumerate(self._groups_of(batch)) if not group}
        why = f"has no value of {self._group!r}, by which examples are grouped"
        for number in sorted(bad):
            self._rejected.add(BadRecordError(batch.keys[number], why))
        return without(batch, bad)

    def _groups_of(self, batch: Batch) -> list[str]:
        return list(map(group_name, batch.columns[self._group].to_pylist())) if self._group else []

    def state(self) -> dict[str, Any]:
        """Returns what was counted, as JSON."""
        return {
            "rows": self.rows,
            "counts": self.counts.tolist(),
            "targets": {name: counts.tolist() for name, counts in self._targets.counts.items()},
            "existing": sorted(self.existing, key=str),
            "groups": sorted(self._groups)[:2],
            "rounded": sorted(self._rounded),
            "rejected": self._rejected.found,
            "schema": self._schema.found() if self._schema else [],
        }

    def merge(self, state: Mapping[str, Any]) -> None:
        """Adds what another builder has counted."""
        self.rows += state["rows"]
        self.counts += np.array(state["counts"], np.int64)
        self._targets.merge(state["targets"])
        self.existing.update(state["existing"])
        self._groups.update(state["groups"])
        self._rounded.update(state["rounded"])
        self._rejected.found += state["rejected"]
        if self._schema:
            self._schema.merge(state["schema"])

    def anomalies(self) -> tuple[Anomaly, ...]:
        """Returns what does not fit the schema."""
        return self._schema.anomalies() if self._schema else ()

    def check_rows(self, expected: int) -> None:
        """Raises SourceError if not as many rows were read as when the columns were scanned."""
        if self.rows != expected:
            raise SourceError(
                f"the source has {self.rows:,} rows now, and had {expected:,} before; run again when nothing "
                "writes to it"
            )

    def check_examples(self) -> None:
        """Refuses examples that together make no dataset."""
        count = int(self.counts.sum())
        if not count + len(self._rejected.found):
            raise SourceError("the source is empty: it has no example")
        if len(self._groups) == 1:
            raise SourceError(
                f"all {count:,} examples are of one group of {self._group!r}: no split can be made of it"
            )
        self._targets.check_varied(count)
        if self._settings.stratify:
            check_stratified(self._labels, self.existing)
        if self._rounded:
            report(
                "preprocess",
                "numbers are stored in 32 bits, in which different values become equal: "
                f"{enumerate_names(sorted(self._rounded))}; --column NAME=text (columns in a pipeline) keeps "
                "them",
            )


def _key_bytes(names: Sequence[str]) -> list[bytes]:
    try:
        return [name.encode("utf-8", "surrogateescape") for name in names]
    except UnicodeEncodeError as error:
        raise SourceError(f"key {error.object!r} of an example cannot be encoded as UTF-8") from None
