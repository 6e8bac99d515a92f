"""Sources without columns: files of a directory, here or in a bucket, and the datasets of TFDS."""

from __future__ import annotations

import importlib.util
import itertools
import operator
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardline.components.preprocess.lazy import np, pa
from shardline.components.preprocess.schema import unknown_label
from shardline.components.preprocess.sources.columns import Columns, ColumnUse, Rows
from shardline.components.preprocess.sources.example import (
    BadExample,
    Batch,
    Example,
    Source,
    Span,
    read_remote,
)
from shardline.components.preprocess.sources.table import TableRows, inside
from shardline.components.storage import File, Storage, as_source_error, open_read, ordered_map, resolve
from shardline.components.text import reason
from shardline.trainer.base import files, progress
from shardline.trainer.base.deserialize import nearest
from shardline.trainer.base.errors import BadRecordError, SourceError, printable
from shardline.trainer.manifest import CLASS, LABEL, SPLITS, Feature, Label

#: Bytes of the largest text: about a novel's; every example is in memory many times.
LARGEST_BYTES = 1 << 20

# Files that are listed at a time.
_FILES = 512

# Name of the column of paths relative to the directory.
_PATH = "path"

# Splits by their names alone, and what may be one, as "seg_train", or a class, as "test tube".
_SPLIT_WORD = r"(?:train(?:ing)?|val(?:id(?:ation)?)?|dev|eval(?:uation)?|test(?:ing)?)(?:[ _-]?set)?"
_SPLIT, _MAYBE_SPLIT = (
    re.compile(form, re.I) for form in (_SPLIT_WORD, rf"(.*[^a-z])?{_SPLIT_WORD}([^a-z].*)?")
)


def open_directory(directory: str, table: str, use: ColumnUse) -> Source:
    """Returns the files of a directory as images.

    Without a table, "", the class is the folder directly under the directory, the key the path relative to
    it; names that start with a dot are ignored. A table lists the files in its column path, and has the
    columns to predict; the group is a feature.
    """
    root = resolve(directory)
    if not table:
        return ClassFolders(root)
    if not files.bucket_uri(root) and not os.path.isdir(root):
        raise SourceError(f"cannot read the directory {root!r}: it is not there")
    if not use.label:
        types = {LABEL: "text", **use.types}  # names of classes, even if they are numbers
        use = replace(use, label=LABEL, types=types)
    return ListedFiles(root, resolve(table), use)


class ClassFolders:
    """Files in a folder per class."""

    def __init__(self, root: str) -> None:
        self._root = root
        folders = []
        for name in _names(root):
            if not name.endswith("/"):
                raise SourceError(
                    f"{root} has {name!r} next to the class folders; put every file into the folder of its "
                    "class, or give a CSV file of labels"
                )
            folders.append(name[:-1])
        self.class_names = tuple(sorted(folders))
        splits = list(filter(_MAYBE_SPLIT.fullmatch, self.class_names))
        if (folders and all(map(_SPLIT.fullmatch, folders))) or (
            len(splits) > 1 and _have_same_folders(root, splits)
        ):
            inner = max(splits, key=lambda name: "train" in name.lower())
            raise SourceError(
                f"{root} has the folders {', '.join(splits)}, which are splits, not classes; name "
                f"the directory of the classes' folders, such as {root}/{inner}, or give a CSV file of labels"
            )

    def __iter__(self) -> Iterator[Example | BadExample]:
        for file, label in self._labelled():
            yield Example(file.name, label, _span(file))

    def batches(self) -> Iterator[Batch]:
        """Yields all examples, many at a time."""
        found = self._labelled()
        while some := list(itertools.islice(found, _FILES)):
            listed, classes = zip(*some, strict=True)
            yield Batch([file.name for file in listed], {LABEL: pa.array(classes)}, list(map(_span, listed)))

    def _labelled(self) -> Iterator[tuple[File, int]]:
        """Yields the files, with the numbers of their classes."""
        labels = {name: label for label, name in enumerate(self.class_names)}
        seen = bytearray(len(labels))
        with as_source_error(self._root, "the directory "):
            for file in Storage(self._root).files(sizes=False):
                label = labels.get(file.name.partition("/")[0])
                if label is None:
                    why = "appeared while the source was read; run again when nothing writes to it"
                    raise SourceError(f"{file.path!r} {why}")
                seen[label] = 1
                yield file, label
        for folder in itertools.compress(self.class_names, map(operator.not_, seen)):
            raise SourceError(f"class folder {folder!r} of {self._root} is empty; remove it or fill it")


def _span(file: File) -> Span:
    return Span(file.path, int(file.version) if file.is_generation else 0, ~max(file.size, 0))


def _names(directory: str) -> list[str]:
    """Returns the names in a directory, of folders with a slash; a bucket has no directory that is empty."""
    with as_source_error(directory, "the directory "):
        names = [each.name for each in Storage(directory).entries() if each.name[0] not in "/."]
    if not names and files.bucket_uri(directory):
        raise SourceError(f"cannot read the directory {directory!r}: there is no file in it")
    return names


def _have_same_folders(root: str, names: Sequence[str]) -> bool:
    """Returns whether each of a directory's folders has the folder of a class that all of them have."""
    shared: set[str] | None = None
    for name in names:
        found, folder = [f"{name}/"], root
        while len(found) == 1 and found[0].endswith("/"):  # also seg_train/seg_train/CLASS
            folder = f"{folder}/{found[0][:-1]}"
            found = _names(folder)
        inner = {each for each in found if each.endswith("/")}
        shared = inner if shared is None else shared & inner
        if not shared:
            return False
    return True


class ListedFiles(TableRows):
    """Files listed in the column path of a table, with labels of any kind; the key is the path."""

    def __init__(self, root: str, table: str, use: ColumnUse) -> None:
        self._root, self._is_remote = root, bool(files.bucket_uri(root))
        columns = Columns(table, overrides={_PATH: "text?", **use.types})
        if _PATH not in columns.types:
            names = printable(", ".join(columns.types))[:300]
            raise SourceError(f"{table!r} has the columns {names}; one called path is needed")
        wanted = {*use.target_columns, *filter(None, [use.group])}
        for column in wanted - columns.types.keys():
            raise unknown_label(table, column, columns.types, labelled=column != LABEL)
        types = {name: kind for name, kind in columns.types.items() if name in {_PATH, *wanted}}
        columns.scan = replace(columns.scan, types=types)
        super().__init__(table, columns, replace(use, features={"image": _PATH}), ("string",))

    def _keys(self, rows: Rows, columns: Mapping[str, Any]) -> Sequence[str]:
        return [self._row_name(rows, index, ()) for index in range(rows.size)]

    def _row_name(self, rows: Rows, index: int, keys: Sequence[str]) -> str:
        path = rows.columns[_PATH][index].as_py()
        return os.path.normpath(path) if path else rows.name(index)

    def _image(self, value: str, rows: Rows) -> Span:
        span = inside(self._root, value, "is outside the directory of images")
        if not self._is_remote and not Path(span.file).is_file():  # os.path takes any failure for absence
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
        for found in ordered_map(_read_text, self._files, size=_text_size):
            if isinstance(found, Exception):
                raise found
            yield found


def _text_size(found: Example | BadExample) -> int:
    return len(found.features["text"]) if isinstance(found, Example) else 0  # type: ignore[arg-type]


def _read_text(example: Example | BadExample) -> Example | BadExample:
    if isinstance(example, BadExample):
        return example
    image: Any = example.image
    try:
        if files.bucket_uri(image.file):
            data = read_remote(image.file, example.key, ~image.length, image.offset)
        else:
            with open_read(image.file) as file:
                data = file.read(LARGEST_BYTES + 1)
        if len(data) > LARGEST_BYTES:
            return BadExample(example.key, "has more than 1 MiB")
        text = data.decode("utf-8-sig")
    except BadRecordError as error:
        return BadExample(error.name, error.reason)
    except SourceError as error:  # also a pipe, which would block
        return BadExample(example.key, f"cannot be read: {reason(error)}")
    except UnicodeDecodeError:
        return BadExample(example.key, "is no text in UTF-8")
    if not text.strip():
        return BadExample(example.key, "is empty")
    return example._replace(image=None, features={"text": text})


# Large photos: a whole batch is in memory.
_BATCH = 32


class Digits:
    """The 1,797 handwritten digits inside scikit-learn: grey images of 8 x 8 pixels in ten classes."""

    class_names = tuple(str(digit) for digit in range(10))

    def __init__(self) -> None:
        if importlib.util.find_spec("sklearn") is None:
            raise SourceError("source 'digits' needs scikit-learn: pip install 'shardline[preprocess]'")

    def __len__(self) -> int:
        return 1797

    def __iter__(self) -> Iterator[Example]:
        # Imported late: it takes a second, and a check of the source does not need it.
        from sklearn.datasets import load_digits

        loaded = load_digits()
        # Ink per pixel is 0..16.
        images = np.rint(loaded.images * (255.0 / 16.0)).astype(np.uint8)[..., np.newaxis]
        for index, (pixels, label) in enumerate(zip(images, loaded.target, strict=True)):
            yield Example(key=f"digits/{index:04d}", label=int(label), image=pixels)


class Tfds:
    """One prepared dataset: encoded images unchanged, its own splits, and its own ids as keys.

    Args:
        name: NAME or NAME:CONFIG, such as "mnist" or "cifar10_corrupted:fog_1".
        data_dir: Directory of prepared datasets; nothing is downloaded to it. Empty for TFDS's default
            directory, to which a missing dataset is downloaded.
    """

    def __init__(self, name: str, *, data_dir: str = "") -> None:
        try:
            from shardline.trainer.keras_compat import tensorflow_internals  # loads numpy

            tensorflow_internals.import_tensorflow()
            import tensorflow_datasets as tfds
        except ImportError:
            raise SourceError(f"source 'tfds:{name}' needs: pip install 'shardline[local]'") from None
        self._tfds = tfds
        self._builder = _prepared_builder(tfds, name, data_dir)
        self._image, self._label = _image_and_label(tfds, name, self._builder.info)
        self.class_names = tuple(self._builder.info.features[self._label].names)
        splits = self._builder.info.splits
        self._splits = [split for split in SPLITS if split in splits]
        if others := [f"{split} ({splits[split].num_examples:,})" for split in splits if split not in SPLITS]:
            text = f"tfds:{name}: only {', '.join(SPLITS)} are read, not {', '.join(others)}"
            progress.report("preprocess", text)

    def __len__(self) -> int:
        return sum(self._builder.info.splits[split].num_examples for split in self._splits)

    def __iter__(self) -> Iterator[Example]:
        decode = self._tfds.decode
        decoders = decode.PartialDecoding(
            {self._image: True, self._label: True}, decoders={self._image: decode.SkipDecoding()}
        )
        config = self._tfds.ReadConfig(add_tfds_id=True, try_autocache=False)
        for split in self._splits:
            found = self._builder.as_dataset(
                split=split, shuffle_files=False, decoders=decoders, read_config=config
            )
            # One by one, passing records from TensorFlow to Python takes twice as long.
            for batch in found.batch(_BATCH).prefetch(1).as_numpy_iterator():
                rows = zip(batch["tfds_id"], batch[self._label], batch[self._image], strict=True)
                for key, label, image in rows:
                    yield Example(key=key.decode(), label=int(label), image=image, split=split)


def _prepared_builder(tfds: Any, name: str, data_dir: str) -> Any:
    """Returns the builder of a dataset, which is downloaded if the user names no directory of datasets."""
    try:
        builder = tfds.builder(name.replace(":", "/", 1), data_dir=data_dir or None)
    except tfds.core.DatasetNotFoundError:
        similar = nearest(name, tfds.list_builders(with_community_datasets=False), 3, 0.6)
        hint = f"; similar: {similar}" if similar else ""
        raise SourceError(f"TensorFlow Datasets has no {name!r}{hint}") from None
    except Exception as failure:  # a wrong name, config or version: ValueError, AssertionError and more
        raise SourceError(f"cannot open 'tfds:{name}': {_summary(failure)}") from failure
    if builder.is_prepared():
        return builder
    if data_dir:
        raise SourceError(
            f"'tfds:{name}' is not prepared in {data_dir}; prepare it with 'tfds build {builder.name} "
            f"--data_dir {data_dir}', or leave data_dir empty to download it"
        )
    progress.report("preprocess", f"downloading tfds:{name} to {builder.data_dir}")
    try:
        builder.download_and_prepare()
    except Exception as failure:  # of the network, the disk, or the dataset's own code
        raise SourceError(
            f"cannot download 'tfds:{name}': {_summary(failure)}; give a data_dir in which it is prepared"
        ) from failure
    return builder


def _image_and_label(tfds: Any, name: str, info: Any) -> tuple[str, str]:
    kinds = tfds.features
    features = dict(info.features) if isinstance(info.features, kinds.FeaturesDict) else {}
    images = [
        key
        for key, value in features.items()  # a LabeledImage is an Image too: a segmentation mask
        if isinstance(value, kinds.Image) and not isinstance(value, kinds.LabeledImage)
    ]
    labels = [key for key, value in features.items() if isinstance(value, kinds.ClassLabel)]
    if info.supervised_keys in itertools.product(images, labels):
        images, labels = ([key] for key in info.supervised_keys)
    if len(images) == len(labels) == 1:
        return images[0], labels[0]
    found = [f"{key} ({type(value).__name__})" for key, value in features.items()]
    raise SourceError(
        f"'tfds:{name}' is not an image classification dataset: it has {', '.join(found) or info.features}; "
        "one Image and one ClassLabel are needed"
    )


def _summary(failure: Exception) -> str:
    return textwrap.shorten(str(failure) or type(failure).__name__, 300, placeholder=" ...")
