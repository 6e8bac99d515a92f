"""Inspection of a user's data for a new project: the kind of model, and the parameters of its runs."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from shardline.components.preprocess.images.structure import read_header
from shardline.components.preprocess.schema import labels
from shardline.components.preprocess.settings import SMALLEST, PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.components.preprocess.sources.columns import TypedColumns, open_table
from shardline.components.preprocess.sources.example import Example, Span
from shardline.components.preprocess.sources.table import TableRows
from shardline.components.preprocess.time_split import parse_time
from shardline.pipelines.project.plain_csv import PlainCsv
from shardline.trainer.base.errors import SettingsError, SourceError, printable
from shardline.trainer.data.features import CLASS, COLUMN_TYPES, LABEL, REGRESSION, Label

#: Fewest examples for three splits; up to so many, a fifth and not a tenth are for the test; a class with
#: fewer has its share of each split.
_LEAST, _SMALL, _RARE = 10, 2_000, 100

# Rows and images that are looked at more closely.
_ROWS, _SAMPLE = 200_000, 300

# Rows and pixels on which a laptop trains in a minute or two, and the fewest and the most epochs.
_ROWS_TRAINED, _PIXELS_TRAINED, _EPOCHS = 300_000, 250_000_000, (5, 60)

_IMAGES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".avif", ".heic", ".heif")
_TEXTS = (".txt", ".md")

# Largest side of images, up to so many of them.
_SIDES = ((1_000, 128), (4_000, 96), (math.inf, 64))

# Names of columns that are to be predicted, that are keys, and that repeat for each patient or shop.
_TARGET = re.compile(
    r"label|target|class|y|outcome|category|species|kind|type|price|rating|score|sentiment|quality", re.I
)
_KEY = re.compile(r"(.*[ _-])?(key|id|uuid|guid|index|no|nr|number)|.*[a-z]I[Dd]", re.I)
_GROUP = re.compile(r"(.*[ _-])?(id|uuid|guid)|patient|user|customer|subject", re.I)
_FEWEST_GROUPS = 20

# Settings that decide the split, by what their column is used as, and what that means.
_SPLITS = {"group": "group", "split_by_time": "time"}
_WHY = {
    "key": ": names each row",
    "group": ": all rows of one are in one split",
    "time": ": the oldest rows train, the newest test",
}


@dataclass(frozen=True)
class Data:
    """What a project reads: its path, the kind of the project, and that of the label.

    Attributes:
        parameters: Parameters of a run, the source first.
        texts: Columns of text in a table.
        found: What was found, in lines for the user.
    """

    path: str
    kind: str
    label_kind: str
    parameters: Mapping[str, Any]
    texts: Sequence[str]
    found: Sequence[str]


@dataclass
class _Column:
    """Values of a column: how many are missing, and how often there are others in the first rows."""

    type: str
    missing: int = 0
    counts: Counter[Any] = field(default_factory=Counter)

    @property
    def kept(self) -> int:
        """Rows whose values are counted."""
        return self.counts.total()

    @property
    def looks_like_codes(self) -> bool:
        """Whether most texts are words with a digit in them, such as AB-117."""
        texts = list(islice(self.counts, 1_000))
        return 2 * sum(" " not in text and bool(re.search(r"\d", text)) for text in texts) > len(texts)


def inspect(path: str, label: str, kind: str) -> Data:
    """Inspects a table, or a directory with a folder of images or texts for each class.

    Args:
        path: Path of the table or directory.
        label: What to predict in a table, as in the setting `label`; empty for a column of that name.
        kind: Kind of the project; empty to choose it.

    Raises:
        SourceError: The data cannot be read, or no model can be trained on them.
        SettingsError: Label or kind do not suit them.
    """
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise SourceError(f"cannot read {path!r}: it is not there")
    data = _inspect_table(path, label, kind) if os.path.isfile(path) else _inspect_folders(path, label)
    if kind not in ("", data.kind):
        raise SettingsError(f"{path} is data of the kind {data.kind}, not {kind}; leave --kind out")
    return data


def _inspect_folders(path: str, label: str) -> Data:
    if label:
        raise SettingsError(f"{path} is a directory, whose folders are the classes; leave --label out")
    files = [
        item for item in open_source(PreprocessSettings(source=f"images:{path}")) if type(item) is Example
    ]
    counts = Counter(file.key.partition("/")[0] for file in files)
    if len(counts) < 2:
        raise SourceError(
            f"{path} has only the folder {[*counts]}; two classes or more are needed, a folder each"
        )
    are_texts = files[0].key.lower().endswith(_TEXTS)
    what, suffixes = ("texts", _TEXTS) if are_texts else ("images", _IMAGES)
    if other := [file.key for file in files if not file.key.lower().endswith(suffixes)]:
        raise SourceError(f"{path} has {other[0]!r} among {what}; move it out, and others like it")
    _check_number(path, len(files))
    found = {what: f"{len(files):,}", "classes": f"{len(counts)}: {_listed(counts)}"}
    if are_texts:
        parameters = {"source": f"text:{path}"} | _training(len(files), _ROWS_TRAINED, counts)
        return Data(path, "text", CLASS, parameters, ("text",), _lines(found))
    sizes = [size for file in files[:: -(-len(files) // _SAMPLE)] if (size := _shorter_side(file))]
    largest = next(side for count, side in _SIDES if len(files) <= count)
    middle = int(statistics.median(sizes)) if sizes else largest
    side = max(SMALLEST, min(middle, largest) // 4 * 4)
    why = f"their shorter side has {middle:,} pixels (median)" if sizes else "no JPEG or PNG tells their size"
    found["image_size"] = f"{side}: {why}; up to {largest} trains in minutes"
    parameters = {"source": f"images:{path}", "image_size": side}
    parameters |= _training(len(files), _PIXELS_TRAINED // side**2, counts)
    return Data(path, "images", CLASS, parameters, (), _lines(found))


def _shorter_side(example: Example) -> int:
    """Returns the shorter side of a JPEG or PNG in pixels, 0 for anything else."""
    assert isinstance(example.image, Span)
    with open(example.image.file, "rb") as file:
        header = read_header(file.read(1 << 20))
    return min(header.height, header.width) if header else 0


def _check_number(path: str, examples: int) -> None:
    if examples < _LEAST:
        raise SourceError(
            f"{path!r} has {examples} examples with a label; {_LEAST} or more are needed to train and judge"
        )


def _training(examples: int, trained: int, counts: Mapping[Any, int]) -> dict[str, Any]:
    """Returns epochs and split, which is stratified where one of the classes is rare."""
    parameters: dict[str, Any] = {"epochs": min(max(trained // examples, _EPOCHS[0]), _EPOCHS[1])}
    if counts and min(counts.values()) < _RARE:
        parameters["stratify"] = True
    if examples <= _SMALL:
        parameters["split"] = {"train": 0.7, "validation": 0.1, "test": 0.2}
    return parameters


def _inspect_table(path: str, label: str, kind: str) -> Data:
    is_csv = path.lower().endswith((".csv", ".tsv"))
    table = open_table(path)[0] if importlib.util.find_spec("pyarrow") or not is_csv else PlainCsv(path)
    targets = _targets(path, label, table.types)
    rows, columns, mixed = _read(table)
    _check_number(path, rows - max(columns[name].missing for name in targets))
    inputs = {name: column for name, column in columns.items() if name not in targets}
    roles, left_out = _roles(inputs, kind)
    parameters: dict[str, Any] = {"source": f"table:{path}", "label": label or LABEL}
    if not roles.keys() & {"numbers", "words", "text", "image"}:
        raise SourceError(f"{path!r} has no column from which to predict {', '.join(targets)}")
    used = {name: name for role, names in roles.items() if role != "time" for name in names}
    for key in roles.get("key", ()):
        used = {"key": used.pop(key), **used}
    parameters["features"] = used if left_out else {"key": used["key"]} if "key" in used else {}
    parameters |= {name: roles[role][0] for name, role in _SPLITS.items() if role in roles}
    parameters |= {} if "key" in used else {"key": "content"}
    parameters["columns"] = dict.fromkeys(mixed & used.keys(), "text")
    label_kind, shown = _label(path, table, columns, targets, parameters)
    missing = max(columns[name].missing for name in targets)
    if missing:
        share = min(1.0, math.ceil(100 * missing / rows + 1) / 100)
        parameters |= {"on_bad_record": "skip", "max_bad_fraction": share}
    counts = (
        columns[targets[0]].counts if label_kind == CLASS and not roles.keys() & {*_SPLITS.values()} else {}
    )
    parameters |= _training(rows - missing, _ROWS_TRAINED, counts)
    gaps = {
        name: column.missing for name, column in inputs.items() if column.missing and name in used.values()
    }
    found = {"rows": f"{rows:,}", "label": shown}
    found |= {role: _listed(names) + _WHY.get(role, "") for role, names in roles.items()}
    found |= {"left out": "; ".join(f"{name}: {why}" for name, why in left_out.items())}
    found |= {"as text": _listed(mixed & used.keys()) + ": mostly numbers, but not all"} if mixed else {}
    found |= {
        "missing": _listed(gaps),
        "no label": f"in {missing:,} rows, which are left out" if missing else "",
    }
    chosen = "images" if "image" in roles else "text" if "text" in roles else "table"
    return Data(path, chosen, label_kind, parameters, roles.get("text", ()), _lines(found))


def _targets(path: str, label: str, types: Mapping[str, str]) -> Sequence[str]:
    """Returns the columns of the only label."""
    named = printable(", ".join(types))[:300]
    if not label and LABEL not in types:
        likely = next(filter(_TARGET.fullmatch, types), [*types][-1])
        raise SourceError(
            f"{path!r} has the columns {named}: name the one to predict, such as --label {likely}"
        )
    first, *more = labels.parse(label or LABEL)
    if more:
        raise SettingsError(
            f"--label {label!r} names several labels, and a new project predicts one; name one"
        )
    for column in first.columns:
        if column not in types:
            raise labels.unknown_column(path, column, types, labelled=True)
    return first.columns


def _read(table: TypedColumns) -> tuple[int, dict[str, _Column], set[str]]:
    """Returns the number of rows, the columns, and those of text with few values that are not numbers."""
    columns, rows = {name: _Column(kind) for name, kind in table.types.items()}, 0
    texts = [name for name, kind in table.types.items() if kind == "string"]
    malformed = labels.MalformedValues(texts if table.guessed else ())
    for batch in table.batches([*table.types]):
        for number, row in enumerate(zip(*(batch[name] for name in texts), strict=True), rows + 1):
            malformed.inspect(number, dict(zip(texts, row, strict=True)))
        for name, column in columns.items():
            known = [
                v
                for v in batch[name]
                if v is not None and (type(v) is not str or v.strip() not in labels.NO_VALUES)
            ]
            column.missing += len(batch[name]) - len(known)
            if rows < _ROWS:
                column.counts.update(
                    known if column.type in (*COLUMN_TYPES.values(), "timestamp") else map(repr, known)
                )
        rows += len(batch[name])
    return rows, columns, {found.column for found in malformed.columns()}


def _roles(columns: Mapping[str, _Column], kind: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Returns the columns that are used by what they are used as, and why others are left out."""
    roles, left_out = dict[str, list[str]](), dict[str, str]()
    for name, column in columns.items():
        role = "image" if name == "image" else _role(name, column)
        if role == "text" and kind == "table":
            role = "words"
        if role in ("key", "time", "group") and role in roles:
            role = f"a further {role}"
        if role in ("key", "time", "group", "numbers", "words", "text", "image"):
            roles.setdefault(role, []).append(name)
        else:
            left_out[name] = role
    if "time" in roles:
        left_out |= dict.fromkeys(roles.pop("group", ()), "repeats, and times decide the split")
    return roles, left_out


def _role(name: str, column: _Column) -> str:
    """Returns what a column is used as, or why it is left out."""
    different, kept, is_text = len(column.counts), column.kept, column.type == "string"
    if column.type == "timestamp" or (
        is_text and kept and all(parse_time(value) is not None for value in islice(column.counts, 1_000))
    ):
        return "time"
    if column.type not in COLUMN_TYPES.values():
        return f"is {column.type}"
    if different < 2:
        return "never varies"
    is_unique = different == kept and not column.missing and column.type != "float32"
    if is_unique and (_KEY.fullmatch(name) or (is_text and column.looks_like_codes)):
        return "key"
    if is_unique and not is_text and max(column.counts) - min(column.counts) == kept - 1:
        return "counts the rows"
    if _GROUP.fullmatch(name) and _FEWEST_GROUPS <= different < kept and column.type != "float32":
        return "group"
    if not is_text:
        return "numbers"
    return "text" if 2 * different > kept and not column.looks_like_codes else "words"


def _label(
    path: str,
    table: TypedColumns,
    columns: Mapping[str, _Column],
    targets: Sequence[str],
    parameters: dict[str, Any],
) -> tuple[str, str]:
    """Returns the kind of the label, and a description; sets it where whole numbers could be classes."""
    counts, named = columns[targets[0]].counts, ", ".join(targets)
    if len(counts) < 2:
        raise SourceError(
            f"column {targets[0]!r} of {path!r} has {len(counts)} values; a label needs two or more"
        )

    def find() -> Label:
        return TableRows(path, table, PreprocessSettings(**parameters), ("string",)).labels[0]

    try:
        label = find()
    except SourceError:
        if table.types[targets[0]] != "int64" or parameters["label"] != targets[0]:
            raise
        parameters["label"] = f"{REGRESSION}:{targets[0]}"  # so many whole numbers are hardly classes
        label = find()
    if label.kind == REGRESSION:
        return label.kind, f"{named}: regression, {min(counts):,.7g} to {max(counts):,.7g}"
    names = _listed(counts if label.kind == CLASS else label.class_names)
    return label.kind, f"{named}: {label.kind}, {len(counts)}: {names}"


def _listed(items: Iterable[Any]) -> str:
    """Returns the first items, of a mapping each with its number."""
    shown = [f"{item} {items[item]:,}" if isinstance(items, Mapping) else str(item) for item in items]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8:,} more" if shown[8:] else "")


def _lines(found: Mapping[str, str]) -> list[str]:
    """Returns what was found in lines of 80 characters."""
    texts = {name: printable(text)[:600] for name, text in found.items() if text}
    wrapped = {name: textwrap.wrap(text, 66) for name, text in texts.items()}
    return [
        f"{'' if i else name:<12}{line}" for name, lines in wrapped.items() for i, line in enumerate(lines)
    ]
