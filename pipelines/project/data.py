"""Inspection of a user's data for a new project: the kind of model, and the parameters of its runs."""

from __future__ import annotations

import math
import os
import re
import shlex
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shardline.components.preprocess.images import read_header
from shardline.components.preprocess.schema import NO_VALUES, LabelSetting, parse_labels, unknown_label
from shardline.components.preprocess.settings import SMALLEST, PreprocessSettings
from shardline.components.preprocess.sources import (
    TIME_PARTS,
    ColumnUse,
    TableRows,
    TypedColumns,
    open_source,
    open_table,
)
from shardline.components.preprocess.sources.example import Example
from shardline.components.text import enumerate_names
from shardline.components.validate import RARE
from shardline.trainer.base.errors import SettingsError, SourceError, printable
from shardline.trainer.base.settings import BALANCED
from shardline.trainer.manifest import CLASS, LABEL, REGRESSION

# Fewest examples; up to so many, a fifth are for the test; a class with fewer is in every split.
_LEAST, _SMALL, _RARE = 10, 2_000, 100

# So many different words are learned in any table, in a larger one a tenth of its rows; text is longer than a
# name, by its mean of characters.
_MOST_WORDS, _TEXT = 20, 20

# Rows and images that are looked at, and rows and pixels on which a laptop trains in a minute or two.
_ROWS, _SAMPLE, _ROWS_TRAINED, _PIXELS_TRAINED = 200_000, 300, 300_000, 250_000_000

_IMAGES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".avif")

# Names of columns that are to be predicted, and that name a row, or many rows of one patient or shop.
_TARGET = re.compile(
    r"label|target|class|y|outcome|category|species|kind|type|price|rating|score|quality", re.I
)
_KEY = re.compile(r"(.*[ _-])?(key|id|uuid|guid|index|no|nr|number)|.*[a-z]I[Dd]", re.I)
_GROUP, _FEWEST_GROUPS = re.compile(r"(.*[ _-])?(id|uuid|guid)|patient|user|customer|subject", re.I), 20

# Uses of a column, and what to say about them; others are reasons to leave it out.
_USES = {
    "key": ": names each row",
    "group": ": all rows of one are in one split",
    "time": ": the oldest rows train, the newest test",
    **dict.fromkeys(("image", "numbers", "words", "text"), ""),
}


@dataclass(frozen=True)
class Data:
    """A user's data: parameters of a run on them, columns of text, and lines about what was found."""

    path: str
    kind: str
    parameters: Mapping[str, Any]
    texts: Sequence[str]
    found: Sequence[str]


def inspect_data(path: str, label: str, kind: str) -> Data:
    """Inspects a table, with a `label` to predict, or a directory with a folder of images for each class.

    `kind` is that of the project, empty to choose it. Raises SourceError or SettingsError when no model can
    be trained on the data.
    """
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise SourceError(f"cannot read {path!r}: it is not there")
    if any("\ud800" <= char <= "\udfff" for char in path):
        raise SourceError(f"the path {path!r} is not UTF-8, and no file of a project can have it; rename it")
    data = _inspect_table(path, label, kind) if os.path.isfile(path) else _inspect_images(path, label)
    if kind not in ("", data.kind):
        raise SettingsError(f"{path} is data of the kind {data.kind}, not {kind}; leave --kind out")
    return data


def _inspect_images(path: str, label: str) -> Data:
    if label:
        raise SettingsError(f"{path} is a directory, whose folders are the classes; leave --label out")
    found = open_source(PreprocessSettings(source=f"images:{path}"))
    files: dict[str, Any] = {item.key: item.image for item in found if isinstance(item, Example)}
    if other := [name for name in files if not name.lower().endswith(_IMAGES)]:
        raise SourceError(f"{path} has {other[0]!r}, which is no image; move it out, and others like it")
    counts = Counter(name.partition("/")[0] for name in files)
    if len(counts) < 2:
        raise SourceError(f"{path} has the class folders {[*counts]}; two or more are needed")
    if len(files) < _LEAST:
        raise SourceError(f"{path} has {len(files)} images; {_LEAST} or more are needed")
    sizes = []
    for file in islice(files.values(), 0, None, -(-len(files) // _SAMPLE)):
        with open(file.file, "rb") as opened:
            header = read_header(opened.read(1 << 20))
        sizes += [min(header.height, header.width)] if header and header.height else []
    largest = 128 if len(files) <= 1_000 else 96 if len(files) <= 4_000 else 64
    middle = int(statistics.median(sizes or [largest]))
    side = max(SMALLEST, min(middle, largest) // 4 * 4)
    why = f"the shorter side has {middle:,} pixels (median)" if sizes else "no JPEG or PNG tells its size"
    shown = {
        "images": f"{len(files):,}",
        "classes": f"{len(counts)}: {_listed(counts)}",
        "image_size": f"{side}: {why}; {largest} at most, to train in minutes",
    }
    parameters = {"source": f"images:{path}", "image_size": side}
    parameters |= _training(len(files), _PIXELS_TRAINED // side**2, counts)
    return Data(path, "images", parameters, (), _lines(shown))


def _training(examples: int, trained: int, counts: Mapping[Any, int]) -> dict[str, Any]:
    parameters: dict[str, Any] = {"epochs": min(max(trained // examples, 5), 60)}
    parameters |= {"stratify": True} if counts and min(counts.values()) < _RARE else {}
    return parameters | (
        {"split": {"train": 0.7, "validation": 0.1, "test": 0.2}} if examples <= _SMALL else {}
    )


def _inspect_table(path: str, label: str, kind: str) -> Data:
    from shardline.components.preprocess.plan import are_rows_alike  # numpy

    table = open_table(path)[0]
    target = _target(path, label, table.types)
    rows, counts, missing = _count(table)
    unlabelled = max(missing[name] for name in target.columns)
    if rows - unlabelled < _LEAST:
        raise SourceError(f"{path!r} has {rows - unlabelled} labelled rows; {_LEAST} or more are needed")
    roles, left_out = _roles(table, target, kind, counts, missing)
    if "time" in roles:
        left_out |= dict.fromkeys(roles.pop("group", ()), "repeats, and times decide the split")
    used = {name: name for role, names in roles.items() if role not in ("key", "time") for name in names}
    if used.keys() <= {*roles.get("group", ())}:
        why = "".join(f"; {name}: {reason}" for name, reason in left_out.items())
        raise SourceError(f"{path!r} has no column from which to predict {', '.join(target.columns)}{why}")
    keys = {"key": roles["key"][0]} if "key" in roles else {}
    parameters: dict[str, Any] = {"source": f"table:{path}", "label": label or LABEL}
    alike = are_rows_alike((counts[name] + Counter({None: missing[name]}) for name in used), rows)
    parameters |= {"features": {**keys, **(used if left_out else {})}}
    parameters |= {} if keys or alike else {"key": "content"}
    parameters |= {"group": roles["group"][0]} if "group" in roles else {}
    parameters |= {"split_by_time": roles["time"][0]} if "time" in roles else {}
    label_kind, shown = _label(path, table, target, counts[target.columns[0]], parameters)
    if unlabelled:
        share = min(1.0, math.ceil(100 * unlabelled / rows + 1) / 100)
        parameters |= {"on_bad_record": "skip", "max_bad_fraction": share}
    is_drawn = label_kind == CLASS and not roles.keys() & {"group", "time"}
    classes = counts[target.columns[0]] if is_drawn else {}
    parameters |= _training(rows - unlabelled, _ROWS_TRAINED, classes)
    if weighed := label_kind == CLASS and _has_rare(counts[target.columns[0]]):
        parameters |= {"class_weights": BALANCED}
    found = {"rows": f"{rows:,}", "label": shown}
    found |= {role: _listed(names) + _USES[role] for role, names in roles.items()}
    found["left out"] = "; ".join(f"{name}: {why}" for name, why in left_out.items())
    found["rare"] = "one class is, and counts as much as the other: class_weights" if weighed else ""
    found["missing"] = _listed(Counter({name: missing[name] for name in used if missing[name]}))
    found["no label"] = f"in {unlabelled:,} rows, which are left out" if unlabelled else ""
    chosen = "images" if "image" in roles else "text" if "text" in roles else "table"
    parameters |= {"image_size": 96} if chosen == "images" else {}
    return Data(path, chosen, parameters, roles.get("text", ()), _lines(found))


def _roles(
    table: TypedColumns,
    target: LabelSetting,
    kind: str,
    counts: Mapping[str, Counter[Any]],
    missing: Mapping[str, int],
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Returns the columns by their use, and why others are left out."""
    # Preprocessing asks whether some values are mistakes.
    faults = {name: form.fault for name, form in table.scan.text_formats.items() if form.fault}
    roles, left_out = dict[str, list[str]](), dict[str, str]()
    for name in (name for name in table.types if name not in target.columns):
        role = faults.get(name, "").partition(";")[0].removeprefix(f"column {name!r} ") or "image"
        if role == "image" != name:
            role = _role(name, table.types[name], counts[name], missing[name])
        role = "words" if (role, kind) == ("text", "table") else role
        if role not in _USES or (role in ("key", "group", "time") and role in roles):
            left_out[name] = f"a further {role}" if role in _USES else role
        else:
            roles.setdefault(role, []).append(name)
    return roles, left_out


def _has_rare(counts: Counter[Any]) -> bool:
    """Whether the rarer of two classes is rare: a model might never answer it, and the gate blocks that."""
    return len(counts) == 2 and min(counts.values()) < RARE / 2 * counts.total()


def _target(path: str, label: str, types: Mapping[str, str]) -> LabelSetting:
    if not label and LABEL not in types:
        likely = next(filter(_TARGET.fullmatch, types), [*types][-1])
        named = printable(", ".join(types))[:300]
        raise SourceError(
            f"{path!r} has the columns {named}: name the one to predict, such as "
            f"--label {shlex.quote(likely)}"
        )
    first, *more = parse_labels(label or LABEL)
    if more:
        raise SettingsError(
            f"--label {label!r} names several labels, and a new project predicts one; name one"
        )
    for column in first.columns:
        if column not in types:
            raise unknown_label(path, column, types, labelled=True)
    return first


def _count(table: TypedColumns) -> tuple[int, Mapping[str, Counter[Any]], Mapping[str, int]]:
    """Returns the number of rows, and by column the values of the first rows, and how many have none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows, missing = 0, Counter[str]()
    counts = {name: Counter[Any]() for name in table.types}
    for batch in table.batches([*table.types]):
        for name, values in batch.columns.items():
            is_value = pa.types.is_primitive(values.type) or pa.types.is_string(values.type)
            known = (values if is_value else pa.array(map(str, values.to_pylist()))).drop_null()
            if pa.types.is_string(values.type):
                known = known.filter(pc.invert(pc.is_in(known, pa.array([*NO_VALUES]))))
            missing[name] += batch.size - len(known)
            if rows < _ROWS:
                found = known.value_counts()
                counts[name].update(
                    dict(zip(found.field(0).to_pylist(), found.field(1).to_pylist(), strict=True))
                )
        rows += batch.size
    return rows, counts, missing


def _role(name: str, kind: str, counts: Counter[Any], missing: int) -> str:
    """Returns the use of a column, of `_USES`, or why it is left out."""
    different, known, first, is_text = len(counts), counts.total(), [*islice(counts, 1_000)], kind == "string"
    if kind in TIME_PARTS:
        return "is a time, which some rows lack" if missing else "time"
    if kind not in ("string", "int64", "float32") or different < 2:
        return "never varies" if different < 2 else f"is {kind}"
    are_codes = is_text and 2 * sum(" " not in text and bool(re.search(r"\d", text)) for text in first) > len(
        first
    )
    if different == known and not missing and kind != "float32":
        if are_codes or _KEY.fullmatch(name):
            return "key"
        if not is_text and max(counts) - min(counts) == known - 1:
            return "counts the rows"
    if _GROUP.fullmatch(name) and _FEWEST_GROUPS <= different < known and not missing and kind != "float32":
        return "group"
    if not is_text:
        return "numbers"
    if 2 * different > known and not are_codes and sum(map(len, first)) >= _TEXT * len(first):
        return "text"
    few = different <= max(_MOST_WORDS, known / 10)
    return "words" if few else f"has {different:,} words in {known:,} rows, too many to learn them"


def _label(
    path: str,
    table: TypedColumns,
    target: LabelSetting,
    counts: Counter[Any],
    parameters: dict[str, Any],
) -> tuple[str, str]:
    """Returns the kind of the label, and a description; sets it where whole numbers could be classes."""
    column, named = target.columns[0], ", ".join(target.columns)
    if len(counts) < 2:
        raise SourceError(f"column {column!r} of {path!r} has one value; a label needs two or more")
    while True:
        use = ColumnUse.of(PreprocessSettings(**parameters))
        try:
            label = TableRows(path, table, use, ("string",)).labels[0]
            break
        except SourceError:
            if table.types[column] != "int64" or parameters["label"] != column:
                raise
            parameters["label"] = f"{REGRESSION}:{column}"  # so many whole numbers are hardly classes
    if label.kind == REGRESSION:
        return label.kind, f"{named}: regression, {min(counts):,.7g} to {max(counts):,.7g}"
    names = counts if label.kind == CLASS else label.class_names
    return label.kind, f"{named}: {label.kind}, {len(names)}: {_listed(names)}"


def _listed(items: Iterable[Any]) -> str:
    shown = [f"{item} {items[item]:,}" if isinstance(items, Counter) else str(item) for item in items]
    return enumerate_names(shown, 8)


def _lines(found: Mapping[str, str]) -> list[str]:
    wrapped = {name: textwrap.wrap(printable(text)[:600], 66) for name, text in found.items()}
    return [
        f"{'' if i else name:<12}{line}" for name, lines in wrapped.items() for i, line in enumerate(lines)
    ]
