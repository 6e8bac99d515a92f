"""Labelled images: image files of a directory, and a table that lists them with what is to be predicted."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import xxhash

from shardline.components.preprocess import labels, storage
from shardline.components.preprocess.sources import WHOLE_FILE, BadExample, Example, Seen, Source, Span
from shardline.components.preprocess.sources.columns import NOTHING_SAID, Columns, Types
from shardline.components.preprocess.sources.images import is_outside
from shardline.components.preprocess.sources.table import Rows
from shardline.trainer.data.features import CLASS, LABEL
from shardline.trainer.errors import SourceError, printable

# Letters of what is in the place of a line of columns.
_SHOWN = 300

# The column of the images' paths, relative to their directory.
_PATH = "path"


def open_labelled(
    directory: str, table: str, label: str, group: str = "", said: Types = NOTHING_SAID
) -> Source:
    """Returns the images that a table lists, of a local directory or of one at a URL.

    Without `label`, the table is a CSV file with the columns path and label, the name of a class; else it is
    any table, and `label` says which columns are to be predicted, as `labels.parse` reads it. A column
    `group` is a feature, by which examples are kept together; `said` are types of columns.

    Raises:
        SourceError: The directory is missing, or the table cannot be used.
    """
    root, path = storage.resolve(directory), storage.resolve(table)
    if not storage.is_remote(root) and not os.path.isdir(root):
        raise SourceError(f"cannot read the directory {root!r}: it is not there")
    if label or group:
        return ImageRows(root, path, label or f"{CLASS}:{LABEL}", group, said)
    return LabelledImages(root, path)


class ImageRows(Rows):
    """Images that the column path of a table lists, with labels of any kind; the key is the path."""

    def __init__(
        self, root: str, table: str, label: str, group: str = "", said: Types = NOTHING_SAID
    ) -> None:
        self._root, self._far = root, storage.is_far(root)
        self._seen = Seen()
        chosen = _Chosen(table, label, group, {_PATH: "text?", **said})
        super().__init__(table, chosen, {"image": _PATH}, images=("string",), label=label, said=said)

    def __iter__(self) -> Iterator[Example | BadExample]:
        self._seen = Seen()
        return super().__iter__()

    def _row_name(self, place: str, values: Mapping[str, Any]) -> str:
        return os.path.normpath(values["image"]) if values["image"] else place

    def _image_fault(self, value: str) -> str:
        return _fault(self._root, os.path.normpath(value), self._seen, ask=not self._far)

    def _image(self, value: str) -> Span:
        return Span(os.path.join(self._root, os.path.normpath(value)), 0, WHOLE_FILE)


class _Chosen:
    """Columns of a table: the path, the group, and what is to be predicted; others are not read."""

    def __init__(self, table: str, label: str, group: str, said: Types) -> None:
        columns = Columns(table, said)
        wanted = {column for one in labels.parse(label) for column in one.columns}
        if _PATH not in columns.types:
            there = printable(", ".join(columns.types))[:_SHOWN]
            raise SourceError(f"{table!r} has the columns {there}; one called path is needed")
        for column in wanted - columns.types.keys():
            raise labels.unknown_column(table, column, columns.types, labelled=True)
        names = {_PATH, group, *wanted}
        self.types: Types = {name: kind for name, kind in columns.types.items() if name in names}
        self.gaps, self.wide, self.codes = columns.gaps, columns.wide, columns.codes
        self.guessed, self.batches = columns.guessed, columns.batches


class LabelledImages:
    """Images that a CSV file lists in its columns path (relative to the directory) and label (a class name).

    The key is the path. Classes are sorted by name. Files that the CSV file does not list are not used.
    """

    def __init__(self, root: str, table: str) -> None:
        self._root, self._far = root, storage.is_far(root)
        self._labels = table
        found = Counter(label for _, _, label, _ in self._rows() if label)
        labels.check_number(LABEL, len(found), found.total())
        self.class_names = tuple(sorted(found))

    def __iter__(self) -> Iterator[Example | BadExample]:
        index = {name: label for label, name in enumerate(self.class_names)}
        root, seen = self._root, Seen()
        for line, listed, name, fits in self._rows():
            key = os.path.normpath(listed)
            if not listed or not name:
                fault = f"has no {'label' if listed else 'path'}"
            elif not fits:
                fault = "has not as many cells as the first line"
            else:
                fault = _fault(root, key, seen, ask=not self._far)
            if fault:
                yield BadExample(f"{self._labels} line {line}: {listed}", fault)
            else:
                yield Example(key, index[name], Span(os.path.join(root, key), 0, WHOLE_FILE))

    def _rows(self) -> Iterator[tuple[int, str, str, bool]]:
        """Yields line number, path and label of each row of the CSV file, and whether it has all cells."""
        with storage.one_line(self._labels), storage.open_text(self._labels) as text:
            rows = csv.DictReader(storage.lines(text, self._labels), strict=True)
            try:
                columns = [name.strip() for name in rows.fieldnames or ()]
                if _PATH in columns and LABEL not in columns:
                    raise labels.unknown_column(self._labels, LABEL, columns, labelled=False)
                if _PATH not in columns:
                    there = f"the columns {printable(', '.join(columns))[:_SHOWN]}" if columns else "no line"
                    raise SourceError(
                        f"{self._labels!r} has {there}; a first line with path and label is needed"
                    )
                rows.fieldnames = columns
                for row in rows:
                    fits = None not in row and None not in row.values()
                    yield rows.line_num, row["path"] or "", (row["label"] or "").strip(), fits
            except (csv.Error, OSError) as error:
                raise SourceError(
                    f"cannot read {self._labels!r} after line {rows.line_num}: {error}"
                ) from None


def _fault(root: str, key: str, seen: Seen, *, ask: bool) -> str:
    """Returns what is wrong with a path that a table lists; `ask` if the file is looked for."""
    if is_outside(key):
        return "lies outside the directory of images"
    if not seen.add(xxhash.xxh3_64_intdigest(os.fsencode(key))):
        return "is listed before"
    if ask and not os.path.isfile(os.path.join(root, key)):
        return "there is no such file"
    return ""
