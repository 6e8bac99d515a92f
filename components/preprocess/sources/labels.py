"""A directory of image files and a CSV file that says of which class each of them is."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from shardline.components.preprocess import storage
from shardline.components.preprocess.sources.remote import fetched
from shardline.components.preprocess.sources.seen import Seen
from shardline.components.preprocess.sources.source import WHOLE_FILE, BadExample, Example, Span
from shardline.trainer.errors import SourceError


class LabelledImages:
    """Images that a CSV file lists in its columns path (relative to the directory) and label (a class name).

    The key is the path. Classes are sorted by name. Files that the CSV file does not list are not used.

    Raises:
        SourceError: The directory or the CSV file cannot be read, or a column is missing.
    """

    def __init__(self, directory: str, labels: str) -> None:
        self._root = storage.resolve(directory)
        self._is_remote = storage.is_remote(self._root)
        self._labels = storage.resolve(labels)
        if not self._is_remote and not os.path.isdir(self._root):
            raise SourceError(f"cannot read the directory {directory!r}: it is not there")
        self.class_names = tuple(sorted({label for _, _, label in self._rows() if label}))

    def __iter__(self) -> Iterator[Example | BadExample]:
        return fetched(self._root, self._examples()) if self._is_remote else self._examples()

    def _examples(self) -> Iterator[Example | BadExample]:
        """Yields the examples; their paths are relative to the directory where that is behind a URL."""
        index = {name: label for label, name in enumerate(self.class_names)}
        root, seen = "" if self._is_remote else self._root, Seen()
        for line, listed, name in self._rows():
            key = os.path.normpath(listed)
            path = os.path.join(root, key)
            fault = ""
            if not listed or not name:
                fault = f"has no {'label' if listed else 'path'}"
            elif is_outside(key):
                fault = "lies outside the directory of images"
            elif not seen.add(xxhash.xxh3_64_intdigest(os.fsencode(key))):
                fault = "is listed before"
            elif not self._is_remote and not os.path.isfile(path):
                fault = "there is no such file"
            if fault:
                yield BadExample(f"{self._labels} line {line}: {listed}", fault)
            else:
                yield Example(key, index[name], Path(path) if self._is_remote else Span(path, 0, WHOLE_FILE))

    def _rows(self) -> Iterator[tuple[int, str, str]]:
        """Yields line number, path and label of each row of the CSV file."""
        with storage.one_line(self._labels), storage.open_text(self._labels) as text:
            rows = csv.DictReader(text)
            try:
                columns = [name.strip() for name in rows.fieldnames or ()]
                if not {"path", "label"} <= set(columns):
                    there = f"the columns {', '.join(columns)}" if columns else "no line"
                    raise SourceError(
                        f"{self._labels!r} has {there}; a first line with path and label is needed"
                    )
                rows.fieldnames = columns
                for row in rows:
                    yield rows.line_num, row["path"] or "", (row["label"] or "").strip()
            except (csv.Error, OSError) as error:
                raise SourceError(
                    f"cannot read {self._labels!r} after line {rows.line_num}: {error}"
                ) from None


def is_outside(path: str) -> bool:
    """Returns whether a normalized path does not stay in the directory that it is relative to."""
    return os.path.isabs(path) or path == ".." or path.startswith("../")
