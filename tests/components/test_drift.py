"""Drift: equal data have not moved, changed data have, and a person reads which and how."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner

from benchmarks.drift import Examples, doubled, read, scaled, share_moved
from shardline.components.model_store import PROFILE_FILE
from shardline.components.preprocess.inspect.profile import Profile, make_profile, summarize
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.validate.gate import judge
from shardline.components.validate.gate.champion import ChampionEvaluation
from shardline.components.validate.gate.verdict import NoChampion
from shardline.components.validate.metrics.drift import add_drift, compare_profiles, read_profile, warnings
from shardline.components.validate.rules import Gate, parse_rules
from shardline.pipelines.cli.main import main
from shardline.trainer import manifest as manifests
from shardline.trainer.base.deserialize import load
from shardline.trainer.base.errors import DatasetError, SettingsError
from shardline.trainer.manifest import Feature
from tests.helpers.datasets import CLASS_NAMES, write_dataset, write_table
from tests.helpers.reports import make_evaluation, make_report, with_champion

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
    """Returns the profile of columns, each a function of the row; of text with its length."""
    found = {name: pa.array(map(value, range(rows))) for name, value in columns.items()}
    texts = {name: values for name, values in found.items() if pa.types.is_string(values.type)}
    lengths = {f"{name} length": pc.utf8_length(values) for name, values in texts.items()}
    return summarize([found | lengths], {"label": {"x": rows}})


def only(before: Profile, after: Profile, feature: str):
    return next(item for item in compare_profiles(before, after) if item.feature == feature)


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

    assert [
        (item.feature, item.before, item.after) for item in compare_profiles(before, after) if item.moved
    ] == [
        ("new length", "not there", "numbers"),
        ("old", "numbers", "not there"),
    ]


def test_text_that_becomes_various_is_compared_by_its_length() -> None:
    before, after = of_columns(text=lambda row: "yes"), of_columns(text=lambda row: f"{row:03d}")

    assert {item.feature for item in compare_profiles(before, after)} == {"label", "text length"}
    assert not any(item.moved for item in compare_profiles(before, after))


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


def test_the_profile_of_images(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path, shape=(12, 16, 3), encoding="raw", records={"train": 30})
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


def test_a_record_that_is_not_as_the_manifest_says_is_refused(tmp_path: Path) -> None:
    manifest = write_table(tmp_path, records={"train": 30})
    other = dataclasses.replace(manifest, features=(*manifest.features, Feature("extra", "float32")))

    with pytest.raises(DatasetError, match="has no feature 'extra'; 'shardline dataset verify"):
        make_profile(tmp_path, other)
    with pytest.raises(DatasetError, match="has no train split; its splits: test"):
        make_profile(tmp_path, dataclasses.replace(manifest, splits={"test": manifest.splits["train"]}))


# Compared with the champion


@pytest.fixture
def trained_on(tmp_path: Path) -> Path:
    """A dataset directory of a table: 60 training and 30 test examples."""
    write_table(tmp_path / "data", records={"train": 60, "test": 30})
    return tmp_path / "data"


def evaluate_with(data: Path, out: Path, champion: Path | None):
    """Returns an evaluation of a model trained on a dataset, with the drift from a champion's profile."""
    out.mkdir()
    profile = read_profile(champion, champion.name) if champion else ChampionEvaluation.profile
    return add_drift(make_evaluation(CLASS_NAMES), data, manifests.load(data), out, profile)


def moved_profile(out: Path, data: Path) -> Path:
    """Writes the profile of a champion that was trained on other incomes."""
    profile = make_profile(data, manifests.load(data))
    incomes = dataclasses.replace(profile.numbers["income"], values=(1.0,) * 60)
    out.mkdir()
    dataclasses.replace(profile, numbers={**profile.numbers, "income": incomes}).write(out / PROFILE_FILE)
    return out


def test_a_run_is_compared_with_the_profile_of_the_champion(trained_on: Path, tmp_path: Path) -> None:
    first = evaluate_with(trained_on, tmp_path / "first", None)
    assert (first.drift, first.no_drift) == ((), "there is no champion to compare with")
    assert "drifted" not in first.metrics
    assert {item.feature: item.moved for item in first.skew} == dict.fromkeys(
        ["label", "city", "city length", "year", "income"], False
    )

    same = evaluate_with(trained_on, tmp_path / "same", tmp_path / "first")
    assert same.metrics["drifted"] == 0
    assert warnings(same) == []

    other = evaluate_with(trained_on, tmp_path / "other", moved_profile(tmp_path / "champion", trained_on))
    assert [item.feature for item in other.drift if item.moved] == ["income"]
    assert other.metrics["drifted"] == 1
    (warning,) = warnings(other)
    assert warning.startswith("Moved since the champion was trained: income: always 1 -> median 5e+06 (")


UNSOUND = {"numbers": {"x": {"examples": 3, "values": [], "missing": 0, "zeros": 0, "spread": None}}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "the champion old has no profile.json"),
        ("{", "profile.json is not JSON"),
        (json.dumps({"fingerprint": "", "split": "", "categories": {}} | UNSOUND), "0 values of 3 examples"),
    ],
)
def test_a_champion_without_a_sound_profile(content, words: str, trained_on: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    if content:
        (tmp_path / "old" / PROFILE_FILE).write_text(content)

    found = evaluate_with(trained_on, tmp_path / "out", tmp_path / "old")
    assert found.drift == ()
    assert words in found.no_drift


def test_without_a_training_split_nothing_is_compared(tmp_path: Path) -> None:
    write_table(tmp_path / "data", records={"test": 30})
    found = evaluate_with(tmp_path / "data", tmp_path / "out", tmp_path / "champion")
    assert (found.no_drift, found.skew) == ("the dataset has no training split", ())


def test_the_report_says_what_moved(trained_on: Path, tmp_path: Path) -> None:
    other = evaluate_with(trained_on, tmp_path / "other", moved_profile(tmp_path / "champion", trained_on))
    page = make_report(other)
    assert "1 of 5 features have moved" in page
    assert "Between training and test split none of 5 features differs." in page
    first = make_report(evaluate_with(trained_on, tmp_path / "out", None))
    assert "Not compared with the champion's training data: there is no champion to compare with." in first


@pytest.mark.parametrize(("rule", "verdict"), [("drifted == 0", "failed"), ("drift[label]<=0.1", "passed")])
def test_a_rule_may_block(rule: str, verdict: str, trained_on: Path, tmp_path: Path) -> None:
    rules = parse_rules([rule])
    Gate(rules=(rule,)).for_dataset(manifests.load(trained_on))
    other = evaluate_with(trained_on, tmp_path / "other", moved_profile(tmp_path / "champion", trained_on))
    assert judge(other, rules, champion="v1").rules[0].verdict == verdict


@pytest.mark.parametrize("rule", ["drifted == 0", "drift[label] <= 0.1"])
def test_a_rule_without_a_champion_is_left_to_the_first_run(rule: str) -> None:
    found, first = make_evaluation(CLASS_NAMES), NoChampion("there is none yet", first=True)
    rules = parse_rules([rule])
    assert judge(found, rules, missing=first, champion="").rules[0].verdict == "skipped"
    block = Gate(first_run="block")
    assert judge(found, rules, block, missing=first, champion="").rules[0].verdict == "failed"
    assert judge(found, rules).rules[0].verdict == "skipped"
    without = dataclasses.replace(with_champion(found), no_drift="the champion v1 has no profile.json")
    (judged,) = judge(without, rules, champion="v1").rules
    assert (judged.verdict, judged.note) == ("unmeasured", "the champion v1 has no profile.json")


def test_a_rule_about_a_feature_that_is_not_there_is_refused(trained_on: Path, tmp_path: Path) -> None:
    gate = Gate(rules=("drift[incme] <= 0.1",))
    with pytest.raises(SettingsError, match=r"of label, year, income, city, city length$"):
        gate.for_dataset(manifests.load(trained_on))
    images = write_dataset(tmp_path / "images", records={"train": 3})
    with pytest.raises(SettingsError, match=r"of label, image brightness, image height, image width$"):
        gate.for_dataset(images)


# shardline drift


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Datasets of which the second has other incomes."""
    out = tmp_path_factory.mktemp("tables")
    for name, factor in (("before", 1.0), ("after", 1.1)):
        random = np.random.default_rng(len(name))
        rows = [f"{factor * random.uniform(1, 2):.4f},{'ab'[row % 2]}" for row in range(1_000)]
        (out / f"{name}.csv").write_text("\n".join(["income,label", *rows]))
        split = {"train": 0.7, "test": 0.3}
        read(out / name, PreprocessSettings(source=f"table:{out / name}.csv", split=split))
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
