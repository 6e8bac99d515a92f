"""Sources: where labelled examples come from. A source string names one (`open_source`).

A source is a small Protocol that a user's own class fulfils too, named by an import string.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from shardline.trainer import plugins
from shardline.trainer.data.features import LABEL, REGRESSION, Scalar
from shardline.trainer.errors import SettingsError, SourceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardline.components.preprocess.schema import Schema
    from shardline.components.preprocess.settings import PreprocessSettings
    from shardline.components.preprocess.sources.moments import ByTime

#: The forms of a source string; the last one is a class or function without arguments of the user's own.
KNOWN_FORMS = (
    "digits", "tfds:NAME[:CONFIG]", "images:DIR", "text:DIR", "tfrecord:GLOB", "table:PATH",
    "bigquery:TABLE|QUERY", "pkg.module:Source",
)  # fmt: skip

#: What stands before the colon of the forms that are none of the user's own, and a form that is.
_FORMS = tuple(form.partition(":")[0] for form in KNOWN_FORMS[1:-1])
_PLUGIN = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
_TABLES = (".csv", ".jsonl", ".ndjson", ".parquet")

#: Length of a span that is a whole file, of whatever size.
WHOLE_FILE = -1


class Span(NamedTuple):
    """Bytes inside a local file, which a writer reads for itself when their turn comes.

    With the length `WHOLE_FILE`, or a lower one, it is the same as the file's path, and faster than a Path is
    made. Then the length is ~size, where a listing gave the size, and the offset the generation of an object,
    0 where there is none: what is read must be that.
    """

    file: str
    offset: int
    length: int


class Example(NamedTuple):
    """One labelled example of a source.

    Attributes:
        key: Name that is unique in the source and stays the same when the source grows: the split and
            the order of the examples follow from it.
        label: Index into the source's `class_names`. Where the source declares `labels`: for a "class" its
            index, for "multilabel" the names that it has, or 0 or 1 for each, for "regression" a number or a
            list of them; of several labels a dict by their names.
        image: An encoded image as bytes, the path of an image file, a span of a file that holds an encoded
            image, or pixels as a uint8 array of shape (height, width, channels) with 1 or 3 channels, values
            0..255. None where the source has no images (a table). Paths and spans are read only when they
            are written: prefer them.
        split: "train", "validation" or "test" where the source has splits of its own, else None.
        features: Further values by name, as the source's `features` declare them: of a shape (n,) a list.
    """

    key: str
    label: Any
    image: bytes | Path | Span | npt.NDArray[np.uint8] | None = None
    split: str | None = None
    features: Mapping[str, Scalar | Sequence[Scalar]] = MappingProxyType({})


class BadExample(NamedTuple):
    """An example that cannot be used. A generator cannot go on after an error, so it yields one of these.

    Attributes:
        name: The example's key, or file and row.
        reason: Why, without the name: the same words for the same kind of fault.
    """

    name: str
    reason: str


class Source(Protocol):
    """Labelled examples, to be read once from the first to the last.

    It has `class_names`, the name of each class, at least two, into which a label is an index. In place of
    that it may have `labels`, a sequence of `trainer.data.features.Label`, for other kinds of labels.

    A source may also have `__len__` (progress then shows how much is left), `features`, a sequence of
    `trainer.data.features.Feature` that declares what is in every `Example.features`, and `fingerprint()`,
    which returns a text that is another one whenever the examples are (a version, a time of change):
    without it, a scheduled run cannot know that nothing has changed.
    One whose keys are positions, which other examples may have tomorrow, says `has_keys = False`; one whose
    keys follow from the content, so that copies have the same, `numbers_copies = True`: the second one of the
    key k then gets k#2.
    """

    def __iter__(self) -> Iterator[Example | BadExample]:
        """Yields every example once, in any order; of those that cannot be used, their name and why."""


class Seen:
    """A set of 64-bit hashes in 16 to 32 bytes each, where a set would take a hundred.

    Two of a million different keys are confused once in 30 million runs.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 << 16))
        self._free = len(self._slots) // 2

    def add(self, value: int) -> bool:
        """Adds a hash and returns whether it is new."""
        value = value or 1  # 0 is an empty slot
        slots = self._slots
        slot = value % len(slots)
        while found := slots[slot]:
            if found == value:
                return False
            slot = (slot + 1) % len(slots)
        slots[slot] = value
        self._free -= 1
        if not self._free:
            old, self._slots = slots, array("Q", bytes(16 * len(slots)))
            self._free = len(self._slots) // 2
            for value in filter(None, old):
                self.add(value)
        return True


def open_source(settings: PreprocessSettings, schema: Schema | None = None) -> Source:
    """Returns the source that the settings name, in one of `KNOWN_FORMS`.

    A schema says the types of columns where only the values would.

    Raises:
        SourceError: The source is unknown or cannot be opened.
        SettingsError: A setting is given to a source that has no use for it.
    """
    form, _, rest = settings.source.partition(":")
    _check_used(settings, form)
    if settings.source == "digits":
        from shardline.components.preprocess.sources.digits import Digits

        return Digits()
    check_form(settings.source)
    if form == "tfds":
        from shardline.components.preprocess.sources.tfds import Tfds

        return Tfds(rest, data_dir=settings.data_dir)
    if form == "images":
        from shardline.components.preprocess.sources import images, labelled

        if settings.labels:
            return labelled.open_labelled(
                rest, settings.labels, settings.label, settings.group, settings.columns
            )
        return images.open_images(rest)
    if form == "text":
        from shardline.components.preprocess.sources.texts import Texts

        return Texts(rest, settings.labels, settings.label, settings.columns)
    if form == "tfrecord":
        from shardline.components.preprocess.sources.tfrecord import open_tfrecords

        return open_tfrecords(rest, settings.features, settings.label, _by_time(settings), settings.columns)
    if form == "table":
        from shardline.components.preprocess.sources.table import Table

        said = {**_expected(settings, schema), **settings.columns}
        return Table(rest, settings.features, settings.label, _by_time(settings), said)
    if form == "bigquery":
        from shardline.components.preprocess.sources.bigquery import BigQuery

        return BigQuery(
            settings.source, settings.features, settings.label, _by_time(settings), settings.columns
        )
    return _open_plugin(settings.source)


def _check_used(settings: PreprocessSettings, form: str) -> None:
    """Refuses settings that a source of this form has no use for."""
    if settings.labels and form not in ("images", "text"):
        raise SettingsError(
            f"labels is for images:DIR and text:DIR, the source is {settings.source!r}; leave it out"
        )
    if settings.features and form not in ("tfrecord", "table", "bigquery"):
        raise SettingsError(
            "features is for tfrecord:GLOB, table:PATH and bigquery:TABLE, the source is "
            f"{settings.source!r}; leave it out"
        )
    if settings.label and form not in ("table", "bigquery", "tfrecord") and not settings.labels:
        instead = (
            "whose labels are in no table: name one with labels"
            if form in ("images", "text")
            else "which says itself what is to be predicted: leave it out"
        )
        raise SettingsError(
            "label is for table:PATH, bigquery:TABLE, tfrecord:GLOB, and images:DIR or text:DIR with labels; "
            f"the source is {settings.source!r}, {instead}"
        )
    of_table = form in ("table", "bigquery", "tfrecord") or (settings.labels and settings.label)
    if settings.columns and not of_table:
        raise SettingsError(
            "columns is for table:PATH, bigquery:TABLE, tfrecord:GLOB, and images:DIR or text:DIR with "
            f"labels and label; the source is {settings.source!r}, leave it out"
        )
    if settings.split_by_time and form not in ("table", "bigquery", "tfrecord"):
        raise SettingsError(
            "split_by_time is for table:PATH, bigquery:TABLE and tfrecord:GLOB, the source is "
            f"{settings.source!r}; leave it out"
        )


def _expected(settings: PreprocessSettings, schema: Schema | None) -> dict[str, str]:
    """Returns the types that a schema says of features, and the label of numbers, by column."""
    from shardline.components.preprocess import labels
    from shardline.components.preprocess.schema import TYPES

    fields = schema.fields.values() if schema else ()
    expected = {
        settings.features.get(field.name, field.name): f"{TYPES[field.type]}?"
        for field in fields
        if field.type in TYPES and field.name not in ("key", LABEL, settings.label_column)
    }
    for one in labels.parse(settings.label):
        for column in one.columns:
            expected.pop(column, None)
            expected |= {column: "number?"} if one.kind == REGRESSION else {}
    return expected


def _by_time(settings: PreprocessSettings) -> ByTime | None:
    if not settings.split_by_time:
        return None
    from shardline.components.preprocess.sources.moments import ByTime, parse_gap

    gap = settings.split_gap
    return ByTime(settings.split_by_time, settings.split, parse_gap(gap), duration=gap[-1:].isalpha())


def check_form(source: str) -> None:
    """Refuses what has none of `KNOWN_FORMS`, and what was probably meant to have another than it has.

    A class of the user's own is found as long as its module is here, whatever it is called; where only the
    run has it, its name must not be nearly that of a form. Raises SourceError.
    """
    form, _, rest = source.partition(":")
    if form == "bigquery" and rest:
        from shardline.components.preprocess.sources.snapshots import parse

        parse(source)
        return
    if source == KNOWN_FORMS[0] or (rest and form in _FORMS):
        return
    near = _guess(source)
    if _PLUGIN.fullmatch(source):
        if not near:
            return
        with contextlib.suppress(SourceError):
            plugins.look(source, "source", SourceError)
            return
    hint = f"; did you mean {near}?" if near else ""
    raise SourceError(f"unknown source {source!r}; known: {', '.join(KNOWN_FORMS)}{hint}")


def _guess(source: str) -> str:
    """Returns the source that was probably meant by one that has no form, or "" where nothing is near."""
    form, colon, rest = source.partition(":")
    if colon and not rest.startswith("//"):
        near = difflib.get_close_matches(form.lower(), _FORMS, n=1, cutoff=0.75)
        return f"{near[0]}:{rest}" if near and rest else ""
    if source.lower().endswith(_TABLES):
        return f"table:{source}"
    if "tfrecord" in source:
        return f"tfrecord:{source}"
    if colon or source.endswith("/") or os.path.isdir(source):
        return f"images:{source}"
    return next(iter(difflib.get_close_matches(source, [KNOWN_FORMS[0]], n=1)), "")


def _open_plugin(reference: str) -> Source:
    """Returns the source that a user's class or function without arguments gives."""
    make = plugins.load(reference, "source", SourceError, known=KNOWN_FORMS)
    if not callable(make):
        raise SourceError(f"source {reference!r} is a {type(make).__name__}, not a class or function")
    with plugins.calling(f"source {reference!r} cannot be made", SourceError):
        source = make()
        for member in ("class_names", "__iter__"):
            if not hasattr(source, member) and not (member == "class_names" and hasattr(source, "labels")):
                raise SourceError(
                    f"source {reference!r} gives a {type(source).__name__} without {member}; a source has "
                    "class_names, or labels, and yields Examples when iterated"
                )
    return cast(Source, source)
