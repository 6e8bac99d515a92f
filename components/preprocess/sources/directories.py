"""Files of a directory, local or in a bucket: images or texts in a folder per class, or listed in a table."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardline.components.preprocess.schema import labels
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.columns import Columns
from shardline.components.preprocess.sources.example import BadExample, Example, Source, Span, prefetched
from shardline.components.preprocess.sources.table import TableRows, inside
from shardline.components.storage import listing, remote_files
from shardline.trainer.base.errors import SourceError, printable
from shardline.trainer.data.features import CLASS, LABEL, Feature, Label

#: Bytes of the largest text: about a novel's; every example is in memory many times.
LARGEST_BYTES = 1 << 20

# Name of the column of paths relative to the directory.
_PATH = "path"

_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}


def open_directory(directory: str, settings: PreprocessSettings) -> Source:
    """Returns the files of a directory as images.

    Without a table, the class is the folder directly under the directory, the key the path relative to it;
    names that start with a dot are ignored. With the setting `labels`, that table lists the files in its
    column path; `label` names the columns to predict, and `group` is a feature.

    Raises:
        SourceError: The directory is missing or holds something else, or the table cannot be used.
    """
    root = remote_files.resolve(directory)
    if not settings.labels:
        return ClassFolders(root)
    if not remote_files.is_remote(root) and not os.path.isdir(root):
        raise SourceError(f"cannot read the directory {root!r}: it is not there")
    if not settings.label:
        columns = {LABEL: "text", **settings.columns}  # names of classes, even if they are numbers
        settings = replace(settings, label=LABEL, columns=columns)
    return ListedFiles(root, settings)


class ClassFolders:
    """Files in a folder per class."""

    def __init__(self, root: str) -> None:
        self._root, self._listing = root, listing.open_listing(root)
        folders = []
        for name in self._listing.top():
            if not name.endswith("/"):
                raise SourceError(
                    f"{root} has {name!r} next to the class folders; put every file into the folder of its "
                    "class, or give a CSV file of labels"
                )
            folders.append(name[:-1])
        self.class_names = tuple(sorted(folders))
        if folders and _SPLIT_NAMES.issuperset(map(str.lower, folders)):
            inner = max(self.class_names, key=lambda name: name.lower().startswith("train"))
            raise SourceError(
                f"{root} has the folders {', '.join(self.class_names)}, which are splits, not classes; name "
                f"the directory of the classes' folders, such as {root}/{inner}, or give a CSV file of labels"
            )

    def __iter__(self) -> Iterator[Example | BadExample]:
        labels = {name: label for label, name in enumerate(self.class_names)}
        seen = bytearray(len(labels))
        for file in self._listing.files():
            label = labels.get(file.name.partition("/")[0])
            if label is None:
                raise SourceError(
                    f"{file.path!r} appeared while the source was read; run again when nothing writes to it"
                )
            seen[label] = 1
            generation = int(file.version) if file.is_generation else 0
            yield Example(file.name, label, Span(file.path, generation, ~max(file.size, 0)))
        for folder in itertools.compress(self.class_names, map(operator.not_, seen)):
            raise SourceError(f"class folder {folder!r} of {self._root} is empty; remove it or fill it")


class ListedFiles(TableRows):
    """Files listed in the column path of a table, with labels of any kind; the key is the path."""

    def __init__(self, root: str, settings: PreprocessSettings) -> None:
        self._root, self._is_remote = root, remote_files.is_remote(root)
        table = remote_files.resolve(settings.labels)
        columns = Columns(table, overrides={_PATH: "text?", **settings.columns})
        if _PATH not in columns.types:
            names = printable(", ".join(columns.types))[:300]
            raise SourceError(f"{table!r} has the columns {names}; one called path is needed")
        wanted = {column for label in labels.parse(settings.label) for column in label.columns}
        wanted |= {settings.group} if settings.group else set()
        for column in wanted - columns.types.keys():
            raise labels.unknown_column(table, column, columns.types, labelled=column != LABEL)
        columns.types = {name: kind for name, kind in columns.types.items() if name in {_PATH, *wanted}}
        super().__init__(table, columns, replace(settings, features={"image": _PATH}), images=("string",))

    def _row_name(self, position: str, values: Mapping[str, Any]) -> str:
        return os.path.normpath(values["image"]) if values["image"] else position

    def _image(self, value: str) -> Span:
        span = inside(self._root, value, "is outside the directory of images")
        if not self._is_remote and not os.path.isfile(span.file):
            raise ValueError("there is no such file")
        return span


class Texts:
    """Text files of a directory, from `open_directory`, in UTF-8, as features; the key is the path."""

    features = (Feature("text", "string"),)

    def __init__(self, files: Source) -> None:
        self._files = files

    @property
    def labels(self) -> Sequence[Label]:
        """The labels to predict."""
        declared: Sequence[Label] = getattr(self._files, "labels", ())
        return declared or (Label(LABEL, CLASS, tuple(self._files.class_names)),)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Example | BadExample]:
        for example in prefetched(self._files):
            yield example if isinstance(example, BadExample) else _read(example)


def _read(example: Example) -> Example | BadExample:
    data = example.image
    try:
        if isinstance(data, Span):
            with remote_files.open_read(data.file) as file:
                data = file.read(LARGEST_BYTES + 1)
        assert isinstance(data, bytes)
        if len(data) > LARGEST_BYTES:
            return BadExample(example.key, "has more than 1 MiB")
        text = data.decode("utf-8-sig")
    except (OSError, SourceError) as error:  # also a pipe, which would block
        return BadExample(example.key, f"cannot be read: {remote_files.reason(error)}")
    except UnicodeDecodeError:
        return BadExample(example.key, "is no text in UTF-8")
    if not text.strip():
        return BadExample(example.key, "is empty")
    return example._replace(image=None, features={"text": text})
