"""Statistics of a dataset: the profile of its values, and its manifest and classes as text, JSON or a page.

A profile is the distribution of the values of a split, small enough to be stored with a model. The dataset
card (a page) and `stats` show it, a schema is drafted from it, and `components.validate.metrics.drift`
compares later data with it, without the original data.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardline.components import text
from shardline.components.preprocess.images import read_header
from shardline.components.preprocess.lazy import pa, pc
from shardline.components.preprocess.schema import MAX_MISSING, are_classes
from shardline.components.preprocess.tfrecord import read_batches
from shardline.trainer.base import files
from shardline.trainer.base.errors import DatasetError, SourceError, printable
from shardline.trainer.base.progress import Meter
from shardline.trainer.manifest import (
    CLASS,
    LABEL,
    MULTILABEL,
    REGRESSION,
    Feature,
    Label,
    Manifest,
    Shard,
    Spread,
)

if TYPE_CHECKING:
    from shardline.components.html import Picture, Rows


#: The values of each feature in some records, as lists of the feature's length.
Columns = Mapping[str, Any]

#: Texts are counted by so many characters of their beginning.
LONGEST_VALUE = 100

# Of more numbers so many quantiles are kept, which give a share to within 0.2 %.
_QUANTILES = 500
# Most different texts that are counted.
_MOST_TEXTS = 10_000
# Records of a sample, and bytes after which it ends.
_SAMPLE, _SAMPLE_BYTES = 2_000, 128 << 20
_SIDE = 64
_MOST = 1 << 53
_FREQUENT = 3


@dataclass(frozen=True)
class Numbers:
    """Numbers in ascending order, or quantiles of them; non-finite ones last, as None.

    `missing` of them are not finite, and `zeros` are 0; `spread` is that of the finite ones, if any.
    """

    examples: int
    values: tuple[float | None, ...]
    missing: int
    zeros: int
    spread: Spread | None

    def __post_init__(self) -> None:
        if not 0 < len(self.values) <= self.examples <= _MOST:
            raise ValueError(f"{len(self.values):,} values of {self.examples:,} examples")

    @property
    def quantiles(self) -> list[float]:
        """Values below which are 5 %, half and 95 % of the finite ones; none without these."""
        finite = [value for value in self.values if value is not None]
        return np.quantile(finite, (0.05, 0.5, 0.95)).tolist() if finite else []


@dataclass(frozen=True)
class Categories:
    """Number of examples by value."""

    examples: int
    counts: Mapping[str, int]

    def __post_init__(self) -> None:
        if not 0 < sum(self.counts.values()) == self.examples <= _MOST or min(self.counts.values()) < 0:
            raise ValueError(f"counts that are not of {self.examples:,} examples")


@dataclass(frozen=True)
class Profile:
    """Distribution of every feature of a split, by its name.

    An image has the features "image brightness" (mean of its pixels, 0 to 255), "image height" and "image
    width"; text has its "length" in characters, and its values unless nearly all of them differ. Each of
    several numbers in one label, and each label of a multilabel one, is a feature of its own.
    """

    fingerprint: str
    split: str
    numbers: Mapping[str, Numbers]
    categories: Mapping[str, Categories]

    def write(self, path: Path) -> None:
        """Writes profile.json."""
        files.write_json(path, {"format": "shardline.profile", "format_version": 1, **asdict(self)})


def read_sample(
    directory: Path, manifest: Manifest, shards: Sequence[Shard], *, whole: bool = False
) -> Iterator[Columns]:
    """Yields the first records of up to 16 shards, about 2,000 in all, of large ones fewer; or the whole.

    They are a random sample, as shards are written in the order of hashes. Raises DatasetError if a shard
    cannot be read.
    """
    report, most = Meter("read", manifest.records, topic="dataset").advance if whole else None, None
    if not whole:
        shards = shards[:: -(-len(shards) // 16)]  # remote ones cost some requests each
        most = -(-_SAMPLE // len(shards))
    for shard in shards:
        size = 0
        try:
            for batch in read_batches(directory / shard.file, manifest.features, report, most):
                for fault in batch.faults.values():
                    raise SourceError(f"a record {fault}")
                yield batch.columns
                size += batch.bytes
                if not whole and size >= _SAMPLE_BYTES // len(shards):
                    break
        except (SourceError, OSError) as error:
            raise DatasetError(
                f"cannot read {shard.file}: {error}; 'shardline dataset verify {directory}' lists all damage"
            ) from None


def make_profile(
    directory: Path, manifest: Manifest, split: str = "train", *, whole: bool = False
) -> Profile:
    """Profiles a split of a dataset, or with "" all of it, from up to 2,000 examples.

    Labels of a split are counted from the manifest. With `whole`, all examples are read, without their
    images. Raises DatasetError if there is no such split, or a shard cannot be read.
    """
    labels: dict[str, Mapping[str, int]] = {}
    shards, without = manifest.shards, {manifest.time_feature, *(["image"] if whole else [])}
    if split:
        if (found := manifest.splits.get(split)) is None:
            names = ", ".join(manifest.splits)
            raise DatasetError(f"the dataset {directory} has no {split} split; its splits: {names}")
        shards, without = list(found.shards), without | manifest.split_columns
        for label in manifest.labels:
            counts = dict(zip(label.outputs, found.labels[label.name].counts, strict=False))
            if label.kind == CLASS:
                labels[label.name] = counts
            for output, count in counts.items() if label.kind == MULTILABEL else ():
                labels[f"{label.name} {output}"] = {"yes": count, "no": found.records - count}
    batches = read_sample(directory, manifest, shards, whole=whole)
    measured = [measure(batch, manifest, without) for batch in batches]
    return summarize(measured, labels, manifest.fingerprint, split)


def number_names(label: Label) -> dict[str, str]:
    """Returns the name of each number of a label in a profile, by its name in the manifest."""
    names = [label.name] if len(label.outputs) == 1 else [f"{label.name} {name}" for name in label.outputs]
    return dict(zip(label.outputs, names, strict=True))


def measure(columns: Columns, manifest: Manifest, without: Collection[str] = ()) -> dict[str, Any]:
    """Returns the features of some examples for a profile, as float64 or text.

    Left out are the key, labels that are classes, vectors, and those that are named.
    """
    measured: dict[str, Any] = {}
    labels = {label.name: label for label in manifest.labels}
    for feature in manifest.features:
        name, label, values = feature.name, labels.get(feature.name), columns[feature.name].flatten()
        if name in {"key", *without} or (label and label.kind != REGRESSION):
            continue
        if label:
            table = values.to_numpy().reshape(-1, len(label.outputs)).astype(np.float64)
            measured |= dict(zip(number_names(label).values(), map(pa.array, table.T), strict=True))
        elif feature.encoding:
            found = np.array([_measure_image(value, feature) for value in values.to_pylist()]).reshape(-1, 3)
            found = found[found[:, 1] > 0]
            for what, column in zip(("brightness", "height", "width"), found.T, strict=True):
                measured[f"{name} {what}"] = pa.array(column)
        elif feature.dtype == "string":
            texts = pa.array([value.decode("utf-8", "replace") for value in values.to_pylist()], pa.string())
            measured[name] = pc.utf8_slice_codeunits(texts, 0, LONGEST_VALUE)
            measured[f"{name} length"] = pc.utf8_length(texts).cast(pa.float64())
        elif not feature.shape:
            measured[name] = values.cast(pa.float64(), safe=False)
    return measured


def summarize(
    batches: Sequence[Mapping[str, Any]],
    labels: Mapping[str, Mapping[str, int]],
    fingerprint: str = "",
    split: str = "train",
) -> Profile:
    """Returns the profile of measured examples, with the number of examples by label and class."""
    numbers = {}
    categories = {
        name: Categories(sum(counts.values()), dict(counts))
        for name, counts in labels.items()
        if any(counts.values())
    }
    for name in batches[0]:
        values = pa.chunked_array([batch[name] for batch in batches])
        if not pa.types.is_string(values.type):
            if len(values):
                numbers[name] = _numbers(values.to_numpy())
            continue
        counted = values.value_counts()
        if len(counted) <= min(len(values) / 2, _MOST_TEXTS):
            counts = Counter({each["values"]: each["counts"] for each in counted.to_pylist()})
            categories[name] = Categories(len(values), dict(counts.most_common()))
    return Profile(fingerprint, split, numbers, categories)


def _numbers(values: np.ndarray) -> Numbers:
    finite = values[np.isfinite(values)]
    ordered = np.sort(np.where(np.isfinite(values), values, math.inf))
    if len(ordered) > _QUANTILES:
        ordered = ordered[((np.arange(_QUANTILES) + 0.5) * len(ordered) / _QUANTILES).astype(int)]
    shown = tuple(float(f"{value:.9g}") if math.isfinite(value) else None for value in ordered.tolist())
    facts = (finite.min(), finite.max(), finite.mean(), finite.std()) if len(finite) else ()
    spread = Spread(*map(float, facts)) if facts else None
    return Numbers(len(values), shown, len(values) - len(finite), int((finite == 0).sum()), spread)


#: Titles of the cells of the rows of `tables`.
NUMBER_TITLES = (
    "numbers", "least", "5 %", "median", "95 %", "largest", "mean", "deviation", "missing", "zeros"
)  # fmt: skip
TEXT_TITLES = ("text", "different", "empty", "characters", "most frequent")


def _number_row(name: str, numbers: Numbers, shown: Callable[[float], str]) -> tuple[str, ...]:
    shares = (f"{count / numbers.examples:.1%}" for count in (numbers.missing, numbers.zeros))
    if numbers.spread is None:
        return (printable(name), *("",) * 7, *shares)
    low, middle, high = numbers.quantiles
    least, largest, mean, deviation = astuple(numbers.spread)
    return (printable(name), *map(shown, (least, low, middle, high, largest, mean, deviation)), *shares)


def tables(
    profile: Profile, manifest: Manifest, shown: Callable[[float], str] = "{:.5g}".format
) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, ...]]]:
    """Returns table rows of the numbers, by their names in the profile, and of the texts."""
    texts = {f"{each.name} length": each.name for each in manifest.columns if each.dtype == "string"}
    names = {
        known: name
        for label in manifest.labels
        if label.kind == REGRESSION
        for name, known in number_names(label).items()
    }
    rows = {
        name: _number_row(names.get(name, name), numbers, shown)
        for name, numbers in profile.numbers.items()
        if name not in texts
    }
    lengths = [(texts[name], numbers) for name, numbers in profile.numbers.items() if name in texts]
    return rows, [_text_row(name, each, profile.categories.get(name)) for name, each in lengths]


def _text_row(name: str, lengths: Numbers, found: Categories | None) -> tuple[str, ...]:
    assert lengths.spread  # a length is finite
    least, largest, mean, _ = astuple(lengths.spread)
    most = Counter(found.counts if found else {}).most_common(_FREQUENT)
    frequent = ", ".join(
        f"{text.truncate(printable(value), 30) or 'empty'} {count / lengths.examples:.1%}"
        for value, count in most
    )
    distinct, empty = f"{len(found.counts):,}" if found else "most", f"{lengths.zeros / lengths.examples:.1%}"
    return printable(name), distinct, empty, f"{least:,.0f} to {largest:,.0f}, mean {mean:,.1f}", frequent


def _measure_image(encoded: bytes, feature: Feature) -> tuple[float, ...]:
    """Returns brightness, height and width; zeros for one that `dataset verify` names as damaged."""
    if feature.encoding == "raw":
        height, width, _ = (side or 0 for side in feature.shape)
        return float(np.frombuffer(encoded, np.uint8).mean()), height, width
    if (header := read_header(encoded)) is None:
        return 0, 0, 0
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # its size was accepted
            image = Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG"))
        image.draft("L", (_SIDE, _SIDE))  # a large JPEG is decoded at a fraction of its size
        return float(np.asarray(image.convert("L")).mean()), header.height, header.width
    except Exception:  # Pillow's decoders raise OSError, SyntaxError, ValueError and more
        return 0, 0, 0


# Share of the range of the numbers by which a drafted range is wider at each end.
_WIDER = 0.1
# Significant digits of a limit, relative to the range; of a constant number, to itself.
_DIGITS, _DIGITS_OF_ONE = 2, 6


def draft(manifest: Manifest, found: Profile) -> dict[str, Any]:
    """Returns a Table Schema of a dataset, labels first.

    Numbers get a range that is wider by a tenth than theirs at each end. A text of few different values (at
    most 50, and one for each ten examples) gets an enum of them. A column is required if every example has
    it; otherwise twice the share that lacks it is allowed.
    """
    numbers = found.numbers
    fields: list[dict[str, Any]] = []
    for label in manifest.labels:
        if label.kind == REGRESSION:
            names = number_names(label).items()
            fields += [_number_field(output, numbers[name], whole=False) for output, name in names]
        else:
            kind = "string" if label.kind == CLASS else "list"
            fields.append({"name": label.name, "type": kind, "constraints": {"enum": list(label.outputs)}})
    for feature in manifest.columns:
        if lengths := numbers.get(f"{feature.name} length") if feature.dtype == "string" else None:
            counts = found.categories[feature.name].counts if feature.name in found.categories else {}
            values = sorted(filter(None, counts))
            short = lengths.spread is not None and lengths.spread.largest <= LONGEST_VALUE
            few = short and bool(values) and are_classes(len(values), lengths.examples)
            constraints = {"enum": values} if few else {}
            fields.append(_draft_field(feature.name, "string", constraints, lengths.zeros / lengths.examples))
        elif feature.name in numbers:
            fields.append(_number_field(feature.name, numbers[feature.name], whole=feature.dtype == "int64"))
    origin = f"Drafted from {manifest.records:,} examples of {manifest.source}; edit what they do not show."
    return {"description": origin, "fields": fields, "missingValues": [""]}


def _number_field(name: str, column: Numbers, *, whole: bool) -> dict[str, Any]:
    constraints: dict[str, Any] = {}
    if column.spread:
        low, high = _widened(column.spread.least, column.spread.largest, whole=whole)
        constraints |= {"minimum": low, "maximum": high}
    return _draft_field(name, "integer" if whole else "number", constraints, column.missing / column.examples)


def _draft_field(name: str, kind: str, constraints: dict[str, Any], missing: float) -> dict[str, Any]:
    if not missing:
        return {"name": name, "type": kind, "constraints": {"required": True, **constraints}}
    allowed = math.ceil(200 * missing) / 100
    share = {MAX_MISSING: allowed} if allowed < 1 else {}
    return {"name": name, "type": kind, "constraints": constraints, **share}


def _widened(least: float, largest: float, *, whole: bool) -> tuple[float, float]:
    low: float
    high: float
    margin = _WIDER * (largest - least)
    if whole:
        low, high = int(least) - math.floor(margin), int(largest) + math.floor(margin)
    else:
        unit = largest - least or abs(least) or 1.0
        decimals = (_DIGITS if margin else _DIGITS_OF_ONE) - math.floor(math.log10(unit))
        low, high = (round(limit * 10.0**decimals, 6) for limit in (least - margin, largest + margin))
        low, high = (
            round(limit / 10.0**decimals, max(decimals, 0)) for limit in (math.floor(low), math.ceil(high))
        )
    limits = (max(low, 0) if least >= 0 else low), (min(high, 0) if largest <= 0 else high)
    low, high = (int(limit) if limit == int(limit) else limit for limit in limits)
    return low, high


_MOST_CLASSES = 20
_MOST_NAMED = 10


class ClassTable(NamedTuple):
    """A table of classes, of many only the largest and smallest, and a note that says so."""

    titles: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str


def render(manifest: Manifest, found: Profile) -> str:
    """Renders the manifest, the classes and the profile of a sample as text."""
    parts = [render_manifest(manifest)]
    for label in manifest.labels:
        if label.class_names:
            titles, rows, note = class_table(label, manifest)
            table = text.table(titles, [(printable(row[0]), *row[1:]) for row in rows])
            parts.append(f"{table}\n{note}".rstrip())
    numbers, texts = tables(found, manifest)
    if numbers:
        parts.append(text.table(NUMBER_TITLES, list(numbers.values())))
    if texts:
        parts.append(text.table(TEXT_TITLES, texts, align="lrrl"))
    return "\n\n".join(parts)


def class_table(label: Label, manifest: Manifest) -> ClassTable:
    """Returns the number of examples of each class or label, by split."""
    by_split = {name: split.labels[label.name].counts for name, split in manifest.splits.items()}
    totals = [sum(column) for column in zip(*by_split.values(), strict=True)]
    order = sorted(range(len(totals)), key=lambda index: (-totals[index], index))
    half = _MOST_CLASSES // 2
    shown = order if len(order) <= _MOST_CLASSES else order[:half] + order[-half:]
    rows = [
        (
            label.outputs[index],
            *(f"{counts[index]:,}" for counts in by_split.values()),
            f"{totals[index]:,}",
            f"{totals[index] / max(1, manifest.records):.1%}",
        )
        for index in shown
    ]
    title = f"{label.name}, {label.kind}"
    if label.name == LABEL:
        title = "class" if label.kind == CLASS else LABEL
    note = (
        f"the {half} largest and {half} smallest of {len(order):,} classes" if len(shown) < len(order) else ""
    )
    return ClassTable((title, *by_split, "all", "share"), rows, note)


def describe(manifest: Manifest) -> dict[str, Any]:
    """Returns the manifest as JSON, with the number of the shards of a split in their place."""
    splits = {
        name: {**asdict(split), "shards": len(split.shards), "records": split.records, "bytes": split.bytes}
        for name, split in manifest.splits.items()
    }
    content = asdict(manifest) | {"splits": splits, "records": manifest.records}
    described: dict[str, Any] = json.loads(json.dumps(content))
    return described


def render_manifest(manifest: Manifest) -> str:
    """Renders a summary of the manifest as text."""
    rejected = f", {_counted(manifest.rejected)} rejected" if manifest.rejected else ""
    found = manifest.duplicates
    groups = f"{found.straddling:,} group{'s' if found.straddling != 1 else ''} in more than one split"
    groups = groups if found.straddling else "by chance" if found.by_chance else "none across splits"
    duplicates = f"{found.examples:,} repeat another example, {groups}" if found.examples else "none"
    labels = []
    for label in manifest.labels:
        units = label.units or ("",) * len(label.outputs)
        names = [
            f"{name} [{unit}]" if unit else name for name, unit in zip(label.outputs, units, strict=True)
        ]
        more = ", ..." if len(names) > _MOST_NAMED else ""
        kind = "classes" if label.name == LABEL and label.class_names else f"{label.name}, {label.kind}"
        labels.append((kind, f"{len(names):,}: {printable(', '.join(names[:_MOST_NAMED]))}{more}"))
    settings = {
        name: "/".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else value
        for name, value in manifest.settings.items()
    }
    shown = ", ".join(f"{name} {'none' if value == '' else value}" for name, value in settings.items())
    rows = [
        ("source", printable(manifest.source)),
        ("fingerprint", manifest.fingerprint),
        ("features", ", ".join(describe_feature(feature) for feature in manifest.features)),
        *labels,
        ("records", f"{manifest.records:,} of {manifest.records_in:,} in the source{rejected}"),
        ("converted", _counted(manifest.converted)),
        ("duplicates", duplicates),
        *(("anomaly", printable(str(anomaly))) for anomaly in manifest.anomalies),
        ("settings", printable(shown)),
    ]
    splits = [
        (name, f"{split.records:,}", f"{len(split.shards)}", text.size(split.bytes))
        for name, split in manifest.splits.items()
    ]
    return f"{text.facts(rows)}\n\n{text.table(('split', 'records', 'shards', 'size'), splits)}"


def describe_feature(feature: Feature) -> str:
    """Describes a feature: "image 224 x 224 x 3 jpeg (crop)"."""
    parts = [printable(feature.name)]
    if feature.shape:
        parts.append(" x ".join("any" if side is None else str(side) for side in feature.shape))
    parts.append(feature.encoding or feature.dtype)
    return " ".join(parts) + (f" ({feature.resize})" if feature.resize else "")


def _counted(amounts: Mapping[str, int]) -> str:
    """Formats counts by name: "3 cmyk, 1 alpha", or "none"."""
    return printable(", ".join(f"{count:,} {what}" for what, count in amounts.items())) or "none"


# The card.
_CARD_SIDE = 96
_ROWS_SHOWN, _LONGEST = 10, 300
# A sample of more columns has a row for each of them, and fewer examples.
_ACROSS, _EXAMPLES_ACROSS = 8, 4
_BINS = 24


def render_card(directory: Path, manifest: Manifest) -> str:
    """Renders the card of a finished dataset: an HTML page without network or script.

    The numbers are the manifest's. Sample images and columns are from the first records of some shards, a
    random sample as shards are written in the order of hashes. The same dataset gives the same page. Raises
    DatasetError if a shard cannot be read.
    """
    from shardline.components.html import fact_rows, render_page

    counted = [class_table(label, manifest) for label in manifest.labels if label.class_names]
    drawn = [row[0] for row in counted[0].rows] if manifest.is_classes else []
    features = [
        (each.name, describe_feature(each).removeprefix(f"{each.name} ")) for each in manifest.features
    ]
    settings = [(name, text.hide_directories(value)) for name, value in fact_rows(manifest.settings)]
    # Number, split, and its smallest, largest, mean value and standard deviation.
    spreads = []
    for label in (label for label in manifest.labels if label.kind == REGRESSION):
        for index, output in enumerate(label.outputs):
            unit = f" [{label.units[index]}]" if label.units and label.units[index] else ""
            for name, split in manifest.splits.items():
                values = astuple(split.labels[label.name].spreads[index])
                spreads.append((f"{output}{unit}", name, *(f"{value:,.6g}" for value in values)))
    return render_page(
        Path(__file__).with_name("card.html.j2"),
        manifest=manifest,
        public=text.hide_directories,
        records=manifest.records,
        numbers=_amounts(manifest),
        size=text.size,
        classes=counted,
        spreads=spreads,
        sample=_read_card_sample(directory, manifest, drawn),
        titles=(NUMBER_TITLES, TEXT_TITLES),
        uncounted=[
            each.name for each in manifest.columns if each.shape or each.name == manifest.time_feature
        ],
        tables=[("Settings", settings), ("Features", features)],
    )


def _amounts(manifest: Manifest) -> Rows:
    images = [feature for feature in manifest.features if feature.name == "image"]
    names = {CLASS: "classes", MULTILABEL: "labels", REGRESSION: "numbers"}
    return [
        ("examples", f"{manifest.records:,}"),
        *(
            (
                names[label.kind] + ("" if label.name == LABEL else f" of {label.name}"),
                f"{len(label.outputs):,}",
            )
            for label in manifest.labels
        ),
        *(("image", describe_feature(feature).removeprefix("image ")) for feature in images),
        ("stored", text.size(sum(split.bytes for split in manifest.splits.values()))),
        ("left out", f"{sum(manifest.rejected.values()):,}"),
        ("exact repeats", f"{manifest.duplicates.examples:,}"),
    ]


def _targets(columns: Columns, label: Label) -> list[str]:
    rows = columns[label.name].to_pylist()
    if label.kind == CLASS:
        return [label.outputs[index] for (index,) in rows]
    if label.kind == REGRESSION:
        return [", ".join(map(value_text, row)) for row in rows]
    return [", ".join(name for name, has in zip(label.outputs, row, strict=True) if has) for row in rows]


def _read_card_sample(directory: Path, manifest: Manifest, classes: Collection[str]) -> dict[str, Any]:
    """Reads the first records of some shards, about 2,000 in all, as a sample for the template.

    Returns their number `records`; some `pictures` with their keys by class, of the named ones, or "examples"
    without classes; without images some examples as `rows` below `columns`; and the table rows of columns of
    `numbers`, with histograms, and of `texts`.
    """
    image = next((feature for feature in manifest.features if feature.name == "image"), None)
    others = [feature.name for feature in manifest.columns if feature.name != manifest.time_feature]
    each, records = 6 if len(classes) <= 10 else 4, 0
    measured, rows = list[Mapping[str, Any]](), list[list[str]]()
    pictures: dict[str, list[tuple[str, Picture]]] = {name: [] for name in classes or ("examples",)}
    for columns in read_sample(directory, manifest, manifest.shards):
        measured.append(measure(columns, manifest, {manifest.time_feature}))
        keys = [value_text(key) for (key,) in columns["key"].to_pylist()]
        records += len(keys)
        targets = [_targets(columns, label) for label in manifest.labels]
        if image is None:
            shown = (columns[name].slice(0, _ROWS_SHOWN).to_pylist() for name in others)
            cells = ([", ".join(map(value_text, row)) for row in values] for values in shown)
            found = zip(keys, *targets, *cells, strict=False)
            cut = [[text.truncate(cell, _LONGEST) for cell in row] for row in found]
            rows += cut[: _ROWS_SHOWN - len(rows)]
            continue
        names = targets[0] if manifest.is_classes else ["examples"] * len(keys)
        for key, name, encoded in zip(keys, names, columns["image"].flatten(), strict=True):
            if len(pictures.get(name, [None] * each)) < each:
                pictures[name].append((key, _picture(encoded.as_py(), image)))
    # A regression label without a name of its own has the names of its outputs.
    titles = [
        ", ".join(label.outputs) if label.name == LABEL and label.kind == REGRESSION else label.name
        for label in manifest.labels
    ]
    heads = ["key", *(["class"] if manifest.is_classes else titles), *others]
    if rows and len(heads) > _ACROSS:
        heads, *rows = map(list, zip(heads, *rows[:_EXAMPLES_ACROSS], strict=True))
    profiled = summarize(measured, {})
    numbers, texts = tables(profiled, manifest, "{:,.6g}".format)
    return {
        "records": records,
        "pictures": pictures,
        "rows": rows,
        "columns": heads,
        "numbers": [(row, _histogram(profiled.numbers[name].values)) for name, row in numbers.items()],
        "texts": texts,
    }


def _histogram(values: Sequence[float | None]) -> str:
    """Draws a histogram of numbers, in a box of 100 x 100, as the `d` of an SVG path."""
    counts = np.histogram([value for value in values if value is not None], _BINS)[0]
    heights, width = 100 * counts / max(1, counts.max()), 100 / _BINS
    return "".join(
        f"M{index * width:.2f} {100 - height:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}z"
        for index, height in enumerate(heights.tolist())
    )


def _picture(encoded: bytes, image: Feature) -> Picture:
    """Draws an image of a record; one that cannot be decoded as a box that says so."""
    from PIL import Image, ImageDraw

    from shardline.components.html import make_picture

    try:
        if image.encoding != "raw":
            return make_picture(encoded, _CARD_SIDE)
        height, width, channels = (side or 0 for side in image.shape)
        pixels = Image.frombytes("L" if channels == 1 else "RGB", (width, height), encoded)
    except Exception:  # Pillow's decoders raise OSError, SyntaxError, ValueError and more
        pixels = Image.new("L", (_CARD_SIDE, _CARD_SIDE // 2), 224)
        ImageDraw.Draw(pixels).multiline_text((8, 8), "cannot be\ndecoded", fill=96)
    return make_picture(pixels, _CARD_SIDE)


def value_text(value: bytes | float) -> str:
    """Returns a value of a feature as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else f"{value:g}"
