"""Drift: equal data have not moved, changed data have, and a person reads which and how."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.drift import Examples, doubled, profile, read, resample, scaled, share_moved
from shardline.components.preprocess.inspect.profile import Profile, make_profile, summarize
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.validate.drift import compare
from shardline.pipelines.cli.main import main
from shardline.trainer.errors import DatasetError
from shardline.trainer.records import load
from tests.helpers.data import real_data
from tests.helpers.datasets import CLASS_NAMES, write_dataset, write_table

WHOLE = {"split": {"train": 1.0}}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Examples]:
    """Examples of images, of a table and of texts, as a profile measures them."""
    out, random = tmp_path_factory.mktemp("drift"), np.random.default_rng(0)
    words = ["a", "shard", "holds", "records", "which", "validation", "reads"]
    rows = [
        f"{random.normal():.3f},{random.choice(['Ulm', 'Rom', 'Bern'])},"
        f"{' '.join(random.choice(words, random.integers(1, 12)))} {number},{random.choice(['no', 'yes'])}"
        for number in range(800)
    ]
    (out / "rows.csv").write_text("\n".join(["price,city,text,label", *rows]))
    sources = {"images": "digits", "table": f"table:{out / 'rows.csv'}"}
    return {
        name: read(out / name, PreprocessSettings(source=source, **WHOLE)) for name, source in sources.items()
    }


# The docs give the shares for 200 pairs of resamples of four datasets: `python -m benchmarks.drift`.
@pytest.mark.parametrize("name", ["images", "table"])
def test_resamples_of_the_same_data_have_not_moved(measured: dict[str, Examples], name: str) -> None:
    assert share_moved(measured[name], 300, pairs=100) < 0.05


@pytest.mark.parametrize(
    ("name", "feature", "change"),
    [
        ("images", "image brightness", scaled("image brightness", 1.1)),
        ("images", "label", doubled("3")),
        ("table", "price", scaled("price", 1.5)),
        ("table", "text length", scaled("text length", 1.25)),
        ("table", "label", doubled("yes")),
    ],
)
def test_a_change_is_found(measured: dict[str, Examples], name: str, feature: str, change) -> None:
    assert share_moved(measured[name], 2_000, change, feature, pairs=10) >= 0.9


def of_columns(rows: int = 400, **columns) -> Profile:
    """Returns the profile of columns, each given as a function of the row; of text with its length."""
    examples = [{name: value(row) for name, value in columns.items()} for row in range(rows)]
    for one in examples:
        one |= {f"{name} length": float(len(text)) for name, text in one.items() if isinstance(text, str)}
    return summarize(examples, {"x": rows})


def only(before: Profile, after: Profile, feature: str):
    return next(item for item in compare(before, after) if item.feature == feature)


def test_what_moved_is_said_in_words() -> None:
    before = of_columns(city=lambda row: ["Ulm", "Rom"][row % 2], price=float)
    after = of_columns(city=lambda row: ["Ulm", "Rom", "Rom", "Rom"][row % 4], price=lambda row: row + 100.0)

    city, price, label = (only(before, after, name) for name in ("city", "price", "label"))
    assert (city.before, city.after, city.distance) == ("Ulm: 50.0 %", "Ulm: 25.0 %", 0.25)
    assert (price.before, price.after) == ("median 199.5 (19.95 to 379)", "median 299.5 (120 to 479)")
    assert price.distance == pytest.approx(0.25)
    assert (city.moved, price.moved, label.moved) == (True, True, False)
    assert (label.distance, label.threshold) == (0.0, 0.05)


def test_numbers_that_are_missing_count_as_the_largest() -> None:
    before = of_columns(price=float)
    after = of_columns(price=lambda row: math.nan if row % 2 else float(row))

    found = only(before, after, "price")
    assert found.moved
    assert found.distance == pytest.approx(0.5, abs=0.01)
    assert found.after == "median 199 (19.9 to 378.1), 50.0 % missing"


def test_a_feature_that_one_has_alone_has_moved() -> None:
    before, after = of_columns(old=float, kept=float), of_columns(kept=float, new=str)

    assert [(item.feature, item.before, item.after) for item in compare(before, after) if item.moved] == [
        ("new length", "not there", "numbers"),
        ("old", "numbers", "not there"),
    ]


def test_text_that_becomes_various_is_compared_by_its_length() -> None:
    before, after = of_columns(text=lambda row: "yes"), of_columns(text=lambda row: f"{row:03d}")

    assert {item.feature for item in compare(before, after)} == {"label", "text length"}
    assert not any(item.moved for item in compare(before, after))


def test_few_examples_say_nothing() -> None:
    before, after = of_columns(rows=5, price=float), of_columns(rows=5, price=lambda row: row + 4.0)

    assert only(before, after, "price").threshold == 1.0
    assert not only(before, after, "price").moved


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = write_table(tmp_path / "data", records={"train": 60, "test": 30})
    made = make_profile(tmp_path / "data", manifest)
    made.write(tmp_path / "profile.json")

    assert load(Profile, tmp_path / "profile.json", DatasetError) == made
    assert made.categories["label"].counts == dict.fromkeys(CLASS_NAMES, 20)
    assert set(made.categories["city"].counts) == {"Ulm", "Bern", "Rom"}
    assert sorted(made.numbers) == ["city length", "income", "year"]


@pytest.mark.parametrize("encoding", ["png", "raw"])
def test_the_profile_of_images(tmp_path: Path, encoding: str) -> None:
    manifest = write_dataset(tmp_path, shape=(12, 16, 3), encoding=encoding, records={"train": 30})
    made = make_profile(tmp_path, manifest)

    assert made.numbers["image height"].values == (12.0,) * 30
    assert made.numbers["image width"].values == (16.0,) * 30
    assert 80 < np.median(made.numbers["image brightness"].values) < 100


def test_of_a_large_split_so_many_examples_are_looked_at(tmp_path: Path) -> None:
    manifest = write_table(tmp_path, records={"train": 4_000}, shards=3)
    made = make_profile(tmp_path, manifest)

    assert made.numbers["income"].examples == 3 * math.ceil(2_000 / 3)
    assert len(made.numbers["income"].values) == 500
    assert made.categories["label"].examples == 4_000


def test_photos_that_are_brighter(tmp_path: Path) -> None:
    settings = PreprocessSettings(source=f"images:{real_data()}/photos", image_size=64, **WHOLE)
    examples = read(tmp_path / "photos", settings)
    drawn = resample(examples, 300, np.random.default_rng(0))
    brighter = scaled("image brightness", 1.1)(drawn, np.random.default_rng(0))

    assert [item.feature for item in compare(profile(drawn), profile(brighter)) if item.moved] == [
        "image brightness"
    ]


# shardline drift


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Datasets of which the second has other incomes."""
    out = tmp_path_factory.mktemp("tables")
    for name, factor in (("before", 1.0), ("after", 1.1)):
        random = np.random.default_rng(len(name))
        rows = [f"{factor * random.uniform(1, 2):.4f},{'ab'[row % 2]}" for row in range(1_000)]
        (out / f"{name}.csv").write_text("\n".join(["income,label", *rows]))
        read(
            out / name,
            PreprocessSettings(source=f"table:{out / name}.csv", split={"train": 0.7, "test": 0.3}),
        )
    return str(out / "before"), str(out / "after")


def test_drift_of_two_datasets(tables: tuple[str, str]) -> None:
    done = CliRunner().invoke(main, ["drift", *tables])

    assert done.exit_code == 1
    heading, first, *_, summary = done.output.splitlines()
    assert heading.split() == ["feature", "before", "after", "distance", "threshold"]
    assert first.startswith("income ")
    assert first.endswith(" moved")
    assert summary == "drift: 1 of 2 features moved"


@pytest.mark.parametrize("second", [True, False], ids=["of the same data", "of training and test split"])
def test_no_drift(tables: tuple[str, str], second: bool) -> None:
    done = CliRunner().invoke(main, ["drift", tables[0], *([tables[0]] if second else []), "--json"])

    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["drifted"] == 0
    assert {item["feature"]: item["moved"] for item in found["features"]} == {"label": False, "income": False}


def test_drift_of_what_is_no_dataset(tables: tuple[str, str], tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["drift", tables[0], str(tmp_path)])

    assert done.exit_code == 2
    assert "no manifest.json in" in done.output


def test_a_split_that_is_not_there(tmp_path: Path) -> None:
    manifest = write_table(tmp_path, records={"test": 30})

    with pytest.raises(DatasetError, match="has no train split; its splits: test"):
        make_profile(tmp_path, manifest)
