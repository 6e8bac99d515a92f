"""Sources of labelled examples, each named by a source string: a new form is added in `open_source`.

A source is a small Protocol, `example.Source`, that a user's own class, named by an import string, may
implement too. `example` and `bigquery` are imported by their names; all others of the face, which is below.

It may import `schema`, `tfrecord`, `images` and `storage`, and nothing else of `preprocess`.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, cast

from shardline.components.preprocess.sources.columns import (
    ColumnUse,
    Scan,
    TypedColumns,
    is_pattern,
    open_table,
)
from shardline.components.preprocess.sources.table import Table, TableRows
from shardline.components.preprocess.sources.text_formats import TIME_PARTS
from shardline.trainer.base import plugins
from shardline.trainer.base.deserialize import nearest
from shardline.trainer.base.errors import SettingsError, SourceError

if TYPE_CHECKING:
    from shardline.components.preprocess.schema import Schema
    from shardline.components.preprocess.settings import PreprocessSettings
    from shardline.components.preprocess.sources.example import Source

__all__ = [
    "KNOWN_FORMS", "TIME_PARTS", "ColumnUse", "Scan", "TableRows", "TypedColumns", "check_form",
    "is_pattern", "is_plugin", "open_source", "open_table",
]  # fmt: skip

#: The forms of a source string; the last is a user's own class or function without arguments.
KNOWN_FORMS = (
    "digits", "tfds:NAME[:CONFIG]", "images:DIR", "text:DIR", "tfrecord:GLOB", "table:PATH",
    "bigquery:TABLE|QUERY", "pkg.module:Source",
)  # fmt: skip

#: The built-in forms before their colon, and the pattern of a user's own.
_FORMS = tuple(form.partition(":")[0] for form in KNOWN_FORMS[1:-1])
_TABLE = re.compile(r"\.(csv|tsv|jsonl|ndjson|parquet)(\.gz|\.zst)?$")
_PLUGIN = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def open_source(
    settings: PreprocessSettings, schema: Schema | None = None, scan: Scan | None = None
) -> Source:
    """Returns the source that the settings name, in one of `KNOWN_FORMS`.

    A schema sets the types of columns that would otherwise be inferred from their values; a scan of the same
    table has found them.

    Raises:
        SourceError: The source is unknown, cannot be read, or has not the columns or classes that it needs.
        PlatformError: BigQuery is not reached, or refuses the credentials.
        SettingsError: A setting does not apply to the source.
    """
    source, (form, _, rest) = settings.source, settings.source.partition(":")
    check_form(source)
    _check_used(settings, form)
    use = ColumnUse.of(settings)
    if source == "digits" or form in ("tfds", "images", "text"):
        from shardline.components.preprocess.sources.directories import Digits, Texts, Tfds, open_directory

        if form in ("images", "text"):
            files = open_directory(rest, settings.labels, use)
            return Texts(files) if form == "text" else files
        return Tfds(rest, data_dir=settings.data_dir) if form == "tfds" else Digits()
    if form == "tfrecord":
        from shardline.components.preprocess.sources.tfrecord import open_tfrecords

        return open_tfrecords(rest, use, scan)
    if form == "table":
        return Table(rest, use.expecting(schema) if schema else use, scan)
    if form == "bigquery":
        from shardline.components.preprocess.sources.bigquery import BigQuery

        return BigQuery(source, use)
    return _load_plugin(source)


def _check_used(settings: PreprocessSettings, form: str) -> None:
    """Raises SettingsError for a setting that does not apply to the source."""
    files, rows = ("images", "text"), ("table", "bigquery", "tfrecord")
    listed, forms = files if settings.labels else (), "tfrecord:GLOB, table:PATH and bigquery:TABLE"
    for name, of, known in (
        ("labels", files, "images:DIR and text:DIR"),
        ("features", rows, forms),
        ("label", (*rows, *listed), f"{forms}, and images:DIR or text:DIR with labels"),
        ("columns", (*rows, *(listed if settings.label else ())), f"{forms}, and labels with label"),
        ("split_by_time", rows, forms),
    ):
        if getattr(settings, name) and form not in of:
            raise SettingsError(f"{name} is for {known}, the source is {settings.source!r}; leave it out")


def _load_plugin(reference: str) -> Source:
    """Returns the source that a user's own class or function makes."""
    make = plugins.load(reference, "source", SourceError, known=KNOWN_FORMS)
    what = f"source {reference!r}"
    if not callable(make):
        raise SourceError(f"{what} is a {type(make).__name__}, not a class or function")
    with plugins.calling(f"{what} cannot be made", SourceError):
        source = make()
        for member in ("class_names", "__iter__"):
            if not hasattr(source, member) and not (member == "class_names" and hasattr(source, "labels")):
                raise SourceError(
                    f"{what} gives a {type(source).__name__} without {member}; a source has class_names, or "
                    "labels, and yields Examples when iterated"
                )
    return cast("Source", source)


def is_plugin(source: str) -> bool:
    """Whether a source is a user's own class or function, even one in a module named digits."""
    form, colon, _ = source.partition(":")
    return bool(colon) and form not in _FORMS


def check_form(source: str) -> None:
    """Refuses a source string of an unknown form, and one that is probably a mistyped form.

    A user's own class may have any name if its module can be imported here; if only the run has it, its name
    must not resemble that of a form. Raises SourceError.
    """
    form, _, rest = source.partition(":")
    if form == "bigquery" and rest:
        from shardline.components.preprocess.sources.bigquery import parse

        parse(source)
        return
    if source == KNOWN_FORMS[0] or (rest and form in _FORMS):
        return
    close = nearest(form.lower(), (*_FORMS, KNOWN_FORMS[0]), 1, 0.75)
    near, path = f"{close}:{rest}" if close and rest else close, rest or form
    if not near and (_TABLE.search(path) or os.path.isdir(path)):
        near = f"{'table' if _TABLE.search(path) else 'images'}:{path}"
    if _PLUGIN.fullmatch(source):
        if not near:
            return
        with contextlib.suppress(SourceError):
            plugins.check_reference(source, "source", SourceError)
            return
    hint = f"; did you mean {near}?" if near else ""
    raise SourceError(f"unknown source {source!r}; known: {', '.join(KNOWN_FORMS)}{hint}")
