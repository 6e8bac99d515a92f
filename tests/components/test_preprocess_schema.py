"""Schemas of tables: anomalies end a run or are recorded, and a dataset gives a schema that it fits."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shardline.components.changes.component import detect_changes
from shardline.components.preprocess.inspect import (
    describe,
    draft,
    make_profile,
    render_card,
    render_manifest,
)
from shardline.components.preprocess.run import finish, plan_dataset, write_shards
from shardline.components.preprocess.schema import read_schema
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.pipelines.cli.main import main
from shardline.trainer import manifest as manifests
from shardline.trainer.base.errors import SourceError
from tests.components.test_changes import SETTINGS
from tests.helpers.preprocessing import SOURCE, contents, run

Rows = list[dict[str, Any]]


def drafted(directory: Path) -> dict[str, Any]:
    manifest = manifests.load(directory)
    return draft(manifest, make_profile(directory, manifest, "", whole=True))


def rows() -> Rows:
    return [
        {"age": 20 + index % 50, "bmi": 18.0 + index % 25, "sex": "mf"[index % 2], "risk": index / 10}
        for index in range(100)
    ]


def write_csv(path: Path, table: Rows) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    return f"table:{path}"


def changed() -> Rows:
    table = rows()
    table[17]["bmi"] *= 10
    table[5]["sex"] = table[9]["sex"] = "d"
    table[3]["risk"] = 500.0
    return table


@pytest.fixture
def schema(tmp_path: Path) -> str:
    run(write_csv(tmp_path / "first.csv", rows()), tmp_path / "first", label="regression:risk")
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(drafted(tmp_path / "first")))
    return str(path)


def test_a_draft_describes_a_dataset(schema: str, tmp_path: Path) -> None:
    fields = {field.name: field for field in read_schema(schema).fields.values()}
    assert {name: field.type for name, field in fields.items()} == {
        "risk": "number", "age": "integer", "bmi": "number", "sex": "string"
    }  # fmt: skip
    assert fields["age"].constraints == {"required": True, "minimum": 16, "maximum": 73}
    assert fields["bmi"].constraints == {"required": True, "minimum": 15.6, "maximum": 44.4}
    assert fields["sex"].constraints == {"required": True, "enum": ["f", "m"]}
    plain = contents(tmp_path / "first")
    manifest = run(
        f"table:{tmp_path / 'first.csv'}", tmp_path / "again", label="regression:risk", schema=schema
    )
    assert manifest.anomalies == ()
    assert (manifest.settings["schema"], manifest.settings["on_anomaly"]) == (
        read_schema(schema).digest,
        "fail",
    )
    assert contents(tmp_path / "again") == plain | {
        "manifest.json": contents(tmp_path / "again")["manifest.json"]
    }


def test_anomalies_end_a_run(tmp_path: Path, schema: str, capsys: Any) -> None:
    pq.write_table(pa.Table.from_pylist(changed()), tmp_path / "t.parquet")
    with pytest.raises(SourceError) as caught:
        run(f"table:{tmp_path / 't.parquet'}", tmp_path / "out", label="regression:risk", schema=schema)
    assert "risk (maximum), bmi (maximum), sex (enum) (see the log); correct" in str(caught.value)
    assert "\n" not in caught.value.line
    said = capsys.readouterr().out
    assert "anomaly: column 'bmi': expected at most 44.4; 1 of 100 examples" in said
    assert "first 'row 18' with 350.0" in said
    assert "column 'sex': expected one of f, m; 2 of 100 examples" in said
    assert not (tmp_path / "out").exists()


def test_anomalies_are_recorded_where_they_warn(tmp_path: Path, schema: str) -> None:
    table = [{**row, "extra": 1} for row in changed()]
    for row in table:
        del row["age"]
    settings = {"label": "regression:risk", "schema": schema, "on_anomaly": "warn"}
    source = write_csv(tmp_path / "t.csv", table)
    manifest = run(source, tmp_path / "out", **settings)
    assert [(one.column, one.problem, one.examples) for one in manifest.anomalies] == [
        ("risk", "maximum", 1),
        ("age", "missing column", 0),
        ("bmi", "maximum", 1),
        ("sex", "enum", 2),
        ("extra", "new column", 0),
    ]
    assert manifests.load(tmp_path / "out").anomalies == manifest.anomalies
    assert len(describe(manifest)["anomalies"]) == 5
    assert "column 'age': no such column in the source" in render_manifest(manifest)
    assert "first &#39;row 6&#39; with &#39;d&#39;" in render_card(tmp_path / "out", manifest)
    plan_dataset(PreprocessSettings(source=source, **settings), tmp_path / "tasks")
    write_shards(tmp_path / "tasks", 0, 1)
    assert finish(tmp_path / "tasks") == manifest


def test_text_in_a_column_of_numbers_is_an_anomaly_and_in_a_label_a_bad_record(
    tmp_path: Path, schema: str, capsys: Any
) -> None:
    table = rows()
    table[7]["bmi"] = "high"
    settings = {"label": "regression:risk", "schema": schema}
    with pytest.raises(SourceError, match=r"bmi \(type\)"):
        run(write_csv(tmp_path / "a.csv", table), tmp_path / "out", **settings)
    assert "column 'bmi': expected a number; 1 of 100 examples" in capsys.readouterr().out
    table[8]["risk"] = "much"
    with pytest.raises(SourceError, match="'much'"):
        run(write_csv(tmp_path / "b.csv", table), tmp_path / "out", **settings)


def test_a_schema_sets_the_types_of_columns_that_would_be_inferred(tmp_path: Path) -> None:
    table: Rows = [
        {"house": 100 + n, "zip": f"{n + 1:05}", "part": 17_031_000_000 + n, "age": n, "risk": n}
        for n in range(40)
    ]
    table[3]["part"] = ""
    kinds = {"house": "string", "zip": "integer", "part": "integer", "age": "number", "risk": "number"}
    fields = [{"name": name, "type": kind} for name, kind in kinds.items()]
    (tmp_path / "s.json").write_text(json.dumps({"fields": fields}))
    settings = {"label": "regression:risk", "schema": str(tmp_path / "s.json")}
    manifest = run(write_csv(tmp_path / "t.csv", table), tmp_path / "out", **settings)
    stored = {"house": "string", "zip": "int64", "part": "string", "age": "float32"}
    assert {feature.name: feature.dtype for feature in manifest.columns} == stored
    table[5]["zip"] = "north"
    with pytest.raises(SourceError, match=r"schema .*: zip \(type\)"):
        run(write_csv(tmp_path / "t.csv", table), tmp_path / "other", **settings)
    settings["columns"] = {"zip": "text"}
    with pytest.raises(SourceError, match=r"schema .*: zip \(type\)"):
        run(write_csv(tmp_path / "t.csv", table), tmp_path / "other", **settings)
    manifest = run(write_csv(tmp_path / "t.csv", table), tmp_path / "other", **settings, on_anomaly="warn")
    assert manifest.settings["columns"] == {"zip": "text"}


def test_classes_of_images_are_checked(tmp_path: Path, monkeypatch: Any) -> None:
    run("digits", tmp_path / "first")
    fields = drafted(tmp_path / "first")["fields"]
    assert fields == [{"name": "label", "type": "string", "constraints": {"enum": list("0123456789")}}]
    fields[0]["constraints"]["enum"].remove("7")
    (tmp_path / "s.json").write_text(json.dumps({"fields": fields}))
    with pytest.raises(SourceError, match=r"label \(enum\)"):
        run("digits", tmp_path / "out", schema=str(tmp_path / "s.json"))
    (tmp_path / "checked_source.py").write_text(SOURCE.format(last=""))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SourceError, match=r"label \(enum\)"):
        run("checked_source:Source", tmp_path / "out", schema=str(tmp_path / "s.json"))


def test_another_schema_is_another_run(tmp_path: Path, schema: str) -> None:
    source = f"table:{tmp_path / 'first.csv'}"
    given = SETTINGS | {"source": source, "label": "regression:risk", "data_options": {"schema": schema}}
    history = str(tmp_path / "history")

    def key() -> str:
        found = detect_changes(history_uri=history, created="2026-01-31T09:15:00Z", **given)
        return found.fingerprint.rpartition("-")[0]

    first = key()
    assert key() == first
    Path(schema).write_text(Path(schema).read_text().replace("44.4", "99"))
    assert key() != first
    Path(schema).write_text("{")
    with pytest.raises(SystemExit):
        key()


def test_the_command_writes_a_schema_and_checks_by_it(tmp_path: Path, schema: str) -> None:
    output = tmp_path / "new.json"
    command = ["dataset", "schema", str(tmp_path / "first")]
    done = CliRunner().invoke(main, [*command, "--output", str(output)])
    assert (done.exit_code, output.read_text().strip()) == (
        0, json.dumps(json.loads(Path(schema).read_text()), indent=2)
    )  # fmt: skip
    assert "4 fields; edit" in done.output
    assert json.loads(CliRunner().invoke(main, command).stdout) == json.loads(output.read_text())
    assert CliRunner().invoke(main, [*command, "--output", str(output)]).exit_code != 0
    source = write_csv(tmp_path / "t.csv", changed())
    arguments = ["preprocess", source, str(tmp_path / "out"), "--label", "regression:risk", "--schema"]
    failed = CliRunner().invoke(main, [*arguments, str(output)])
    assert failed.exit_code != 0
    warned = CliRunner().invoke(main, [*arguments, str(output), "--option", "on_anomaly=warn"])
    assert warned.exit_code == 0
    assert "anomaly: column 'sex'" in warned.output
