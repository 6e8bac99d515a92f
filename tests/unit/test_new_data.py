"""`shardline new --data`: what is found in a user's data, and the project that follows from it."""

from __future__ import annotations

import ast
import csv
import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources import open_source
from shardline.pipelines.cli.main import main
from shardline.pipelines.parameters import check_parameters, read_parameters
from shardline.pipelines.project.data import inspect_data
from shardline.pipelines.spec import load_pipeline
from tests.helpers.markdown import ROOT

#: Rows of a table that has a column for each thing that a column can be.
ORDERS = ["order_id;customer_id;day;shop;pieces;note;always;size;kind;price"] + [
    f"A-{i};{i % 25};2026-01-{i % 28 + 1:02};{'east' if i % 2 else 'west'};{'' if i == 7 else i % 5};"
    f"a note of some words {i}, about it;x;{i + 4};{'big' if i % 3 else 'small'};{100_000 + 7 * i}"
    for i in range(80)
]


def shardline(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    path = tmp_path / "orders.csv"
    path.write_text("\n".join(ORDERS) + "\n")
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for i in range(12):
        file = tmp_path / "photos" / ("cat" if i % 2 else "dog") / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50 + i, 46), (i, 0, 0)).save(file)
    return tmp_path / "photos"


def test_each_column_of_a_table_is_used_as_what_it_is(orders: Path) -> None:
    data = inspect_data(str(orders), "price", "")

    assert (data.kind, data.texts) == ("text", ["note"])
    assert data.parameters["label"] == "regression:price", "so many whole numbers are not classes"
    used = {name: name for name in ("shop", "pieces", "note", "kind")}
    assert data.parameters["features"] == {"key": "order_id", **used}
    assert data.parameters["split_by_time"] == "day"
    shown = "\n".join(data.found)
    assert "100,000 to 100,553" in shown
    for why in ("always: never varies", "size: counts the rows", "customer_id: repeats", "pieces 1"):
        assert why in shown
    assert max(map(len, data.found)) <= 80


def test_what_repeats_for_a_customer_is_the_group_where_there_is_no_time(tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    rows = [f"{i % 25},{3 * i},{'ab'[i % 2]}" for i in range(1, 81)]
    path.write_text("\n".join(["customer_id,size,kind", *rows]))

    parameters = inspect_data(str(path), "kind", "").parameters

    assert parameters["group"] == "customer_id"
    assert (parameters["key"], "stratify" in parameters) == ("content", False)


def test_rows_that_chance_makes_equal_are_not_kept_together(tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    rows = [f"{'xyz'[i % 3]},{'pq'[i % 2]},,{'ab'[i // 7 % 2]}" for i in range(80)]
    path.write_text("\n".join(["first,second,empty,label", *rows]))

    assert "key" not in inspect_data(str(path), "label", "").parameters


@pytest.mark.parametrize("label", ["price", "kind", "multilabel:shop", "class:kind"])
@pytest.mark.parametrize("kind", ["table", "text"])
def test_a_project_has_parameters_of_the_pipeline_and_a_model_of_its_kind(
    orders: Path, label: str, kind: str
) -> None:
    orders.write_text(orders.read_text().replace("east", "east|far"))
    project = orders.parent / "project"
    done = shardline("new", project, "--data", orders, "--label", label, "--kind", kind)

    assert done.exit_code == 0, done.output
    local, sent = (read_parameters(project / name) for name in ("params.toml", "params/vertex.toml"))
    check_parameters(load_pipeline(ROOT / "compiled" / "retrain.yaml"), sent)
    assert sent["source"] == "table:gs://my-bucket/data/orders.csv"
    differing = ("source", "champion_uri", "history_uri")
    assert sent == {**local, **{name: sent[name] for name in differing}}
    known = {field.name for field in dataclasses.fields(PreprocessSettings)}
    source = open_source(PreprocessSettings(**{name: local[name] for name in local.keys() & known}))
    assert len(list(source)) == 80
    assert "rules" not in local
    model = (project / "project" / "model.py").read_text()
    assert ('TEXTS = ("note",)' in model) == (kind == "text")
    assert {path.name for path in (project / "project").iterdir()} == {"__init__.py", "model.py"}
    assert "make run\n" not in (project / ".github" / "workflows" / "ci.yaml").read_text()
    for command in (["format", "--check"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache"]
        linted = subprocess.run(ruff, cwd=project, capture_output=True, text=True)
        assert linted.returncode == 0, linted.stdout


def test_images_keep_the_size_that_most_of_them_have(photos: Path) -> None:
    data = inspect_data(str(photos), "", "")

    assert (data.kind, data.parameters["image_size"]) == ("images", 44)
    assert data.parameters["stratify"] is True
    assert "dog 6" in "\n".join(data.found)


def test_columns_with_mistakes_or_dates_of_two_meanings_are_left_out_with_the_reason(tmp_path: Path) -> None:
    rows = [
        f'{"12a" if i == 7 else i / 2},0{i % 9 + 1}/0{i % 8 + 1}/2026,"{i},5",{"ab"[i % 2]}'
        for i in range(200)
    ]
    path = tmp_path / "orders.csv"
    path.write_text("\n".join(["size,sold_on,price,label", *rows]))

    data = inspect_data(str(path), "", "")

    assert data.parameters["features"] == {"price": "price"}
    found = " ".join(" ".join(data.found).split())
    assert "numbers price" in found
    assert "size: has '12a' in row 8, and numbers in 199 of 200 rows" in found
    assert "sold_on: has dates such as '01/01/2026', where the day or the month may be first" in found


ODD = ("\U0001f600", "@RUN@", "my_package", "two words", 'a "quote"', "back\\slash", "del\x7f", "line\nbreak")


@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_odd_names_are_written_so_that_they_can_be_read(tmp_path: Path, odd: str) -> None:
    path = tmp_path / f"{odd} data.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([odd, "number", "empty", "label"])
        writer.writerows([f"{odd} {i}, told at some length", i, "", f"{odd} {i % 2}"] for i in range(40))

    done = shardline("new", tmp_path / "project", "--data", path, "--name", "leaf")

    assert done.exit_code == 0, done.output
    given = tomllib.loads((tmp_path / "project" / "params.toml").read_text("utf-8"))
    assert given["source"] == f"table:{path}"
    assert given["features"][odd] == odd
    cloud = tomllib.loads((tmp_path / "project" / "params" / "vertex.toml").read_text("utf-8"))
    assert cloud["source"] == f"table:gs://my-bucket/data/{path.name}"
    module = ast.parse((tmp_path / "project" / "leaf" / "model.py").read_text("utf-8"))
    assert [node.value for node in ast.walk(module) if isinstance(node, ast.Constant) and node.value == odd]
    assert "leaf" in (tmp_path / "project" / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "orders.csv"], "such as --label kind"),
        (["--data", "notes.csv"], "such as --label 'Star Rating'"),
        (["--data", "orders.csv", "--label", "prise"], "did you mean price?"),
        (["--data", "orders.csv", "--label", "always"], "has one value"),
        (["--data", "orders.csv", "--label", "class:price;class:kind"], "several labels"),
        (["--data", "orders.csv", "--label", "kind", "--kind", "images"], "of the kind text, not images"),
        (["--data", "empty.csv", "--label", "a"], "is empty: it has no column"),
        (["--data", "short.csv", "--label", "a"], "has 1 labelled rows"),
        (["--data", "index.csv", "--label", "a"], "a column without a name (an index of pandas?); name it"),
        (["--data", "only.csv", "--label", "a"], "no column from which to predict a"),
        (["--data", "nowhere"], "it is not there"),
        (["--data", "photos", "--label", "a"], "leave --label out"),
        (["--data", "photos/cat"], "next to the class folders"),
        (["--data", "bare"], "has the class folders []; two"),
        (["--data", "single"], "has the class folders ['a']; two"),
        (["--data", "mixed"], "'b/a.pdf', which is no image"),
        (["--label", "a"], "--label belongs to --data"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_is_written(
    orders: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(orders.parent)
    Path("empty.csv").write_text("")
    Path("short.csv").write_text("a,b\n1,2\n")
    Path("index.csv").write_text(",a\n0,1\n1,2\n")
    Path("bare").mkdir()
    Path("only.csv").write_text("a\n" + "1\n2\n" * 10)
    Path("notes.csv").write_text("Text,Star Rating\nfine,5\n")
    for name, files in {
        "single": [f"a/{i}.png" for i in range(12)],
        "mixed": [f"a/{i}.png" for i in range(12)] + ["b/a.pdf"],
    }.items():
        for file in files:
            Path(name, file).parent.mkdir(parents=True, exist_ok=True)
            Path(name, file).write_bytes(b"")

    done = shardline("new", "project", *words)

    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not Path("project").exists()


def test_what_some_rows_lack_does_not_decide_the_split(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [
        f"{i % 25 if i else ''},{'' if i == 3 else '2026-01-02'},{i / 2},{'ab'[i % 2]}" for i in range(80)
    ]
    path.write_text("\n".join(["customer_id,day,size,label", *rows]))

    data = inspect_data(str(path), "", "")

    assert data.parameters["features"] == {"customer_id": "customer_id", "size": "size"}
    assert not data.parameters.keys() & {"group", "split_by_time"}
    assert "day: is a time, which some rows lack" in "\n".join(data.found)


def test_rows_without_a_label_end_no_run(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{i / 2},{'' if i == 5 else 'ab'[i % 2]}" for i in range(80)]
    path.write_text("\n".join(["size,label", *rows]))

    parameters = inspect_data(str(path), "", "").parameters

    assert (parameters["on_bad_record"], parameters["max_bad_fraction"]) == ("skip", 0.03)


def test_words_that_hardly_repeat_are_left_out_and_a_rare_class_is_weighed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [
        f"{i / 2},Z{i % 70:05},Ann B{chr(97 + i % 26)}{i},{'abc'[i % 3]},{'yes' if i % 12 == 5 else 'no'}"
        for i in range(420)
    ]
    path.write_text("\n".join(["size,zip,name,shop,label", *rows]))

    data = inspect_data(str(path), "", "")

    assert data.parameters["features"] == {"size": "size", "shop": "shop"}
    assert data.parameters["class_weights"] == "balanced"
    shown = "\n".join(data.found)
    assert "zip: has 70 words in 420 rows" in shown
    assert "name: has" in shown.replace("\n            ", " ")
    assert "rare        one class" in shown
    path.write_text("\n".join(["size,zip,name,shop,label", *rows * 2]))
    assert "zip: has" not in "\n".join(inspect_data(str(path), "", "").found), "a tenth of 840 rows are 84"
