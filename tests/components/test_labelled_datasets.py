"""Datasets with labels of every kind, of real tables: what is stored, said, counted and shown."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn import datasets

from shardline.components.preprocess.inspect import profile, render_card, verify
from shardline.components.preprocess.tfrecord import read_batches, read_records
from shardline.components.validate.metrics import drift
from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import SourceError
from shardline.trainer.manifest import Label
from tests.helpers.preprocessing import contents, run


def write_csv(path: Path, names: list[str], rows: Any) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names, *rows])
    return path


def write_toy(directory: Path, name: str) -> Path:
    """Writes one of scikit-learn's datasets as CSV, the names of the columns as they are there."""
    found = getattr(datasets, f"load_{name}")()
    targets = found.target if name == "diabetes" else found.target_names[found.target]
    rows = [[*row, target] for row, target in zip(found.data.tolist(), targets.tolist(), strict=True)]
    return write_csv(directory / f"{name}.csv", [*found.feature_names, "target"], rows)


def read_all(directory: Path) -> list[dict[str, Any]]:
    """Returns the only value of each feature of all examples, and the split."""
    manifest = manifests.load(directory)
    return [
        {"split": name} | {feature: values[0] for feature, values in row.items()}
        for name, split in manifest.splits.items()
        for shard in split.shards
        for batch in read_batches(directory / shard.file, manifest.features)
        for row in pa.table(dict(batch.columns)).to_pylist()
    ]


@pytest.fixture(scope="module")
def diabetes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("diabetes")
    run(f"table:{write_toy(root, 'diabetes')}", root / "out", label="regression:target [score]")
    return root / "out"


def test_a_number_is_stored_as_it_is_and_measured(
    diabetes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, real = manifests.load(diabetes), datasets.load_diabetes()
    assert manifest.labels == (Label("label", "regression", ("target",), ("score",)),)
    stored = {example["key"].decode(): example["label"] for example in read_all(diabetes)}
    assert [stored[f"row {number}"] for number in range(1, 443)] == real.target.tolist()
    for name, split in manifest.splits.items():
        (spread,) = split.labels["label"].spreads
        values = [example["label"] for example in read_all(diabetes) if example["split"] == name]
        assert (spread.least, spread.largest) == (min(values), max(values))
        assert (spread.mean, spread.deviation) == pytest.approx((np.mean(values), np.std(values)), rel=1e-12)
    run(f"table:{write_toy(tmp_path, 'diabetes')}", tmp_path / "out", label="target", processes=2)
    assert "preprocess: label: target, regression, 25 to 346" in capsys.readouterr().out
    shards = {name: data for name, data in contents(tmp_path / "out").items() if name.endswith(".tfrecord")}
    assert shards.items() <= contents(diabetes).items()


def test_columns_are_counted_as_numpy_counts_them(diabetes: Path) -> None:
    manifest, real = manifests.load(diabetes), datasets.load_diabetes()
    found = profile.make_profile(diabetes, manifest, "")
    assert list(found.numbers) == ["label", *real.feature_names]
    table = np.column_stack([real.target, real.data]).astype(np.float32).astype(np.float64)
    for column, values in zip(found.numbers.values(), table.T, strict=True):
        assert column.spread is not None
        assert (column.examples, column.missing, column.zeros) == (442, 0, (values == 0).sum())
        assert column.spread.mean == pytest.approx(values.mean(), abs=1e-12)
        assert column.spread.deviation == pytest.approx(values.std(), rel=1e-12)
        assert column.quantiles == pytest.approx(np.quantile(values, [0.05, 0.5, 0.95]), rel=1e-8)
    assert re.search(r"target +25 +51 +140", profile.render(manifest, found))


def test_texts_and_what_is_missing_are_counted(tmp_path: Path) -> None:
    rows = [(index % 2, index or "", "" if index % 4 else "often", f"text {index}") for index in range(40)]
    path = write_csv(tmp_path / "table.csv", ["label", "size", "note", "text"], rows)
    manifest = run(f"table:{path}", tmp_path / "out", label="class:label")
    shown = profile.render(manifest, profile.make_profile(tmp_path / "out", manifest, ""))
    assert re.search(r"^size .* 2.5% +0.0%$", shown, re.MULTILINE)
    assert re.search(r"^note +2 +75.0% +0 to 5, mean 1.2 +empty 75.0%, often 25.0%$", shown, re.MULTILINE)
    assert re.search(r"^text +most +0.0% +6 to 7, mean 6.8", shown, re.MULTILINE)


def test_a_column_without_any_number() -> None:
    found = profile.summarize([{"x": pa.array([float("nan")])}], {}).numbers["x"]
    assert (found.missing, found.spread, found.quantiles) == (1, None, [])


@pytest.mark.parametrize(
    ("label", "says", "moving"),
    [
        ("class:a;class:b", ("Label a, class", "Label b, class"), {"a", "b"}),
        ("multilabel:a,flag", ("Labels", "flag"), {"label a", "label flag"}),
        ("regression:p,b [m]", ("Numbers to predict", "b [m]"), {"label p", "label b"}),
        (
            "regression:p;multilabel:tags;class:b",
            ("Numbers to predict", "Label tags, multilabel", "Label b, class"),
            {"p", "tags x", "tags y", "b"},
        ),
    ],
)
def test_reports_of_every_kind(tmp_path: Path, label: str, says: tuple[str, ...], moving: set[str]) -> None:
    rows = [(i % 2, i % 7, i / 3, bool(i % 3), "x|y" if i % 4 else "", "t") for i in range(90)]
    path = write_csv(tmp_path / "table.csv", ["a", "b", "p", "flag", "tags", "text"], rows)
    manifest = run(f"table:{path}", tmp_path / "out", label=label)
    assert verify(tmp_path / "out", processes=1).damages == ()
    page = render_card(tmp_path / "out", manifest)
    for words in says:
        assert words in page
    assert profile.render(manifest, profile.make_profile(tmp_path / "out", manifest, ""))
    made = profile.make_profile(tmp_path / "out", manifest)
    assert moving <= {*made.numbers, *made.categories}
    assert not any(each.moved for each in drift.compare_profiles(made, made))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("mixed", "column .mixed. has .oops. in row 8, and numbers in 39 of 40 rows"),
        ("regression:gaps", r"table.csv row 4': has no value in column 'gaps'; .*--on-bad-record skip"),
        ("regression:endless", r"table.csv row 5': has inf in column 'endless', .* not a finite number"),
        ("numbers", "40 different whole numbers in its first 40 rows: say whether they are numbers"),
        ("", "has no column 'label', .* with --label endless"),
    ],
)
def test_labels_that_cannot_be_learned_are_refused(tmp_path: Path, label: str, message: str) -> None:
    rows = [[i, i, "" if i == 3 else i / 2, i / 2] for i in range(40)]
    if label == "mixed":
        rows[7][1] = "oops"
    if label == "regression:endless":
        rows[4][3] = "inf"
    path = write_csv(tmp_path / "table.csv", ["numbers", "mixed", "gaps", "endless"], rows)
    with pytest.raises(SourceError, match=message):
        run(f"table:{path}", tmp_path / "out", label=label)
    assert not (tmp_path / "out").exists()


def test_the_same_labels_are_the_same_bytes(tmp_path: Path) -> None:
    rows = [(i % 3, i % 5, i / 3) for i in range(60)]
    path = write_csv(tmp_path / "table.csv", ["a", "b", "p"], rows)
    made = [
        run(f"table:{path}", tmp_path / f"out {n}", label=label, processes=n)
        for n, label in enumerate(("class:a;p", "class:a;regression:p", "regression:p;class:a"), start=1)
    ]
    assert made[0].fingerprint == made[1].fingerprint
    assert made[0].fingerprint != made[2].fingerprint
    for shard in made[0].shards:
        records = list(read_records(tmp_path / "out 1" / shard.file))
        assert len(records) == shard.records
