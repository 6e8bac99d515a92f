"""Many files as one table: those that a pattern matches, with the partitions in their paths as columns."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence, Set
from itertools import count
from urllib.parse import unquote

from shardline.components.preprocess import storage
from shardline.components.preprocess.listing import find_files
from shardline.components.preprocess.sources.columns import (
    NOTHING_SAID,
    Batch,
    Columns,
    Found,
    TypedColumns,
    Types,
)
from shardline.trainer.errors import SourceError, printable

#: Names the rows in place of a column: the file, and the row's number in it from 1 on.
ROW = "\0row"

#: In place of a column too, where columns say so: the split that a row is in, and why it cannot be used.
SPLIT, FAULT = "\0split", "\0fault"

_PATTERN = re.compile(r"[*?\[]|\{[^{}]*,")
# Of a path such as year=2026/month=11/part-0.parquet.
_PARTITION = re.compile(r"([^/=]+)=([^/]*)")


def open_table(path: str, said: Types = NOTHING_SAID) -> tuple[TypedColumns, str]:
    """Returns the columns of a table, a file or a pattern of files, and the directory that it is in.

    `said` are types of columns, as `Columns` takes them.

    Raises:
        SourceError: No file matches, one cannot be read, or they have not the same columns.
    """
    path = storage.resolve(path)
    if not is_pattern(path):
        return Columns(path, said), os.path.dirname(path)
    root = path[: _PATTERN.search(path).start()].rpartition("/")[0]  # type: ignore[union-attr]
    return ManyFiles(root, find_files(path), said), root


def is_pattern(path: str) -> bool:
    """Returns whether a path stands for all files that match it."""
    return bool(_PATTERN.search(path))


class ManyFiles:
    """Columns of several files, which are read one after the other in the order of their paths.

    Attributes are those of `TypedColumns`, types the narrowest that fit all files, of a partition int64, else
    string; and `about`, what `batches` says of rows beside the columns.
    """

    about = (ROW,)

    def __init__(self, root: str, paths: Sequence[str], said: Types) -> None:
        self._root, self._paths = root, paths
        found = [self._found(path, said) for path in paths]
        first = dict(found[0].types)
        for path, (types, *_) in zip(paths[1:], found[1:], strict=True):
            for column in sorted(first.keys() ^ types.keys()):
                has, lacks = (paths[0], path) if column in first else (path, paths[0])
                raise SourceError(
                    f"{lacks!r} has no column {column!r}, which {has!r} has; make the files' columns the same"
                )
            first = {name: self._joined(name, first[name], types[name], path) for name in first}
        self.types: Types = first
        self.gaps: Set[str] = frozenset().union(*(one.gaps for one in found))
        self.wide: Set[str] = frozenset().union(*(one.wide for one in found))
        self.codes: Types = {name: code for one in reversed(found) for name, code in one.codes.items()}
        self.guessed = any(".csv" in os.path.basename(path).lower() for path in paths)

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yields the values of some columns, `ROW` among them if wanted, row by row and file by file."""
        for path in self._paths:
            partitions = self._partitions(path)
            stored = [name for name in names if name not in partitions and name != ROW]
            # Where only partitions are wanted, some column says how many rows there are.
            stored = stored or [next(name for name in self.types if name not in partitions)]
            place, numbers = os.path.relpath(path, self._root or "."), count(1)
            for batch in Columns(path, known=Found(self.types)).batches(stored):
                rows = len(batch[stored[0]])
                yield {
                    name: [f"{place} row {next(numbers)}" for _ in range(rows)]
                    if name == ROW
                    else [partitions[name]] * rows
                    if name in partitions
                    else batch[name]
                    for name in names
                }

    def _found(self, path: str, said: Types) -> Found:
        columns, partitions = Columns(path, said), self._partitions(path, typed=False)
        for name in partitions:
            if name in columns.types:
                raise SourceError(f"{path!r} has a column {name!r} in it and in its path; rename one")
        kinds = {name: "int64" if _is_whole(str(value)) else "string" for name, value in partitions.items()}
        kinds |= {name: "string" for name in kinds if said.get(name) == "text"}
        return columns.found._replace(types={**columns.types, **kinds})

    def _partitions(self, path: str, *, typed: bool = True) -> dict[str, str | int]:
        found: dict[str, str | int] = {
            unquote(name): unquote(value) for name, value in _PARTITION.findall(os.path.dirname(path))
        }
        if typed:
            found = {
                name: int(value) if self.types[name] == "int64" else value for name, value in found.items()
            }
        return found

    def _joined(self, column: str, one: str, other: str, path: str) -> str:
        kinds = {one, other}
        if len(kinds) == 1:
            return one
        if kinds == {"int64", "float32"}:
            return "float32"
        if kinds <= {"int64", "float32", "string"} and not path.endswith(".parquet"):
            return "string"  # of text files only the values say the type
        raise SourceError(
            f"column {printable(column)!r} is {other} in {path!r}, and {one} in {self._paths[0]!r}; make the "
            "files' columns the same"
        )


def _is_whole(text: str) -> bool:
    return bool(re.fullmatch(r"-?(0|[1-9]\d*)", text)) and abs(int(text)) < 1 << 63
