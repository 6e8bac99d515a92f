"""BigQuery as a source, read by Google's unmodified clients from a fake on this machine."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from click.testing import CliRunner

pytest.importorskip("google.cloud.bigquery_storage_v1", reason="pip install 'shardline[bigquery]'")

from shardline.components.changes import fingerprint
from shardline.components.preprocess.run import plan_dataset, write_shards
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.components.preprocess.sources.bigquery import parse
from shardline.components.preprocess.sources.example import WHOLE_FILE, BadExample, Example, Span
from shardline.pipelines.cli.main import main
from shardline.trainer.base.errors import PlatformError, SourceError
from tests.helpers import sources
from tests.helpers.fake_bigquery import FakeBigQuery, FakeTable, RefusalError, at, fake_bigquery
from tests.helpers.preprocessing import contents, run
from tests.helpers.sources import opened

TABLE = "acme-vision.shop.orders"
MOMENT = f"{TABLE}@2026-11-20T12:00:00Z"
SOURCE = f"bigquery:{MOMENT}"


def rows(count: int, **columns: Any) -> pa.Table:
    return pa.table(
        {
            "id": [f"order-{number}" for number in range(count)],
            "label": [("returned", "kept", "kept")[number % 3] for number in range(count)],
            "price": [number / 4 for number in range(count)],
            "items": list(range(count)),
            "gift": [number % 2 == 0 for number in range(count)],
            **columns,
        }
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeBigQuery]:
    account = tmp_path_factory.mktemp("account")
    with fake_bigquery(account) as (fake, environment), pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.lower().endswith("_proxy"):
                patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        yield fake


@pytest.fixture
def fake(served: FakeBigQuery, monkeypatch: pytest.MonkeyPatch) -> FakeBigQuery:
    """The fake with one table, of ten rows at 10:00 and twelve from 14:00 on."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    clean = FakeBigQuery()
    for name in ("answer", "failures", "message_rows"):
        setattr(served, name, getattr(clean, name))
    served.tables = {TABLE: FakeTable([(at("10:00"), rows(10)), (at("14:00"), rows(12))])}
    served.calls.clear()
    return served


def read(source: Any) -> list[Example]:
    return sorted(sources.read(source), key=lambda example: example.key)


def test_rows_as_of_a_snapshot_with_typed_features(fake: FakeBigQuery) -> None:
    source = opened(SOURCE, key="id")
    found = [(feature.name, feature.dtype) for feature in source.features]
    assert found == [("price", "float32"), ("items", "int64"), ("gift", "int64")]
    assert source.labels[0].outputs == ("kept", "returned")
    examples = read(source)
    assert len(examples) == 10
    assert examples[3] == Example(key="order-3", label=1, features={"price": 0.75, "items": 3, "gift": 0})


def test_columns_and_row_filter_are_pushed_down(fake: FakeBigQuery) -> None:
    source = opened(f"{SOURCE} WHERE items > 6", key="id", price="price")
    assert [example.key for example in read(source)] == ["order-7", "order-8", "order-9"]
    asked = fake.called("CreateReadSession")
    wanted = ["label", "id", "price"]
    assert asked[-1] == ("projects/acme-vision", TABLE, wanted, "items > 6", at("12:00"))
    assert {details[3] for details in asked} == {"items > 6"}


@pytest.mark.parametrize("features", [{"key": "id"}, {}], ids=["key", "no key"])
def test_the_same_bytes_in_any_order_of_the_rows(
    fake: FakeBigQuery, tmp_path: Path, features: dict[str, str]
) -> None:
    # Among them rows that are equal in all columns, and some that are left out.
    holes = pa.array([None if number % 7 == 0 else 2 for number in range(80)])
    table = rows(80, weight=holes)
    if not features:
        table = pa.concat_tables([table, table.slice(0, 9)]).drop_columns(["id"])
    fake.tables[TABLE].versions = [(at("10:00"), table)]
    options: Any = {"features": features, "on_bad_record": "skip", "max_bad_fraction": 0.5}
    first = run(SOURCE, tmp_path / "first", **options)
    assert run(SOURCE, tmp_path / "second", **options) == first
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    assert first.source == SOURCE
    assert (tmp_path / "first" / "rejected.jsonl").read_text().startswith('{"file": "bigquery:')


def test_a_stream_continues_where_it_broke_off(fake: FakeBigQuery) -> None:
    fake.message_rows = 3
    whole = read(opened(SOURCE, key="id"))
    fake.calls.clear()
    source = opened(SOURCE, key="id")
    assert source.labels
    fake.calls.clear()
    lost = RefusalError(grpc.StatusCode.UNAVAILABLE, 503, "the connection was reset")
    fake.failures["ReadRows"] = [lost, lost, lost]
    assert read(source) == whole
    assert [offset for _, offset in fake.called("ReadRows")] == [0, 3, 6, 9]


def test_images_are_bytes_or_urls(fake: FakeBigQuery) -> None:
    photos = [b"photo %d" % number for number in range(10)]
    fake.tables[TABLE].versions = [(at("10:00"), rows(10, photo=photos))]
    examples = read(opened(SOURCE, key="id", image="photo", price="price"))
    assert [example.image for example in examples] == photos

    urls = ["gs://bucket/a.jpg"] * 9 + ["a.jpg"]
    fake.tables[TABLE].versions = [(at("10:00"), rows(10, photo=urls))]
    *good, bad = sorted(opened(SOURCE, key="id", image="photo", price="price"), key=lambda item: item[0])
    assert {example.image for example in good[1:]} == {Span("gs://bucket/a.jpg", 0, WHOLE_FILE)}
    (bad,) = [item for item in opened(SOURCE, key="id", image="photo") if isinstance(item, BadExample)]
    assert bad == BadExample(
        "bigquery:acme-vision.shop.orders order-9",
        "has an image that is not a URL (gs://...) in column 'photo'",
    )


#: Few rows, in one split.
ALL: dict[str, Any] = {"split": {"train": 1.0}}


def test_the_time_of_a_table_is_a_day_of_some_zone() -> None:
    found = parse("bigquery:p.d.t_{date:%Y}@{date in Europe/Berlin}T00:00:00+01:00 WHERE a = '{b}'")
    assert found.snapshot == "{date in Europe/Berlin}T00:00:00+01:00"
    assert (found.table, found.row_filter) == ("p.d.t_{date:%Y}", "a = '{b}'")


QUERY = "bigquery:SELECT label, price FROM `shop.orders` FOR SYSTEM_TIME AS OF '{snapshot}'"


def test_a_query_is_run_once_and_its_result_read(fake: FakeBigQuery) -> None:
    fake.answer = lambda query: (rows(7).select(["label", "price"]), [TABLE])
    source = opened(QUERY.replace("{snapshot}", "2026-11-20T12:00:00.000Z"))
    assert fake.called("Query") == []
    assert len(read(source)) == 7
    (query,) = fake.called("Query")
    assert query == "SELECT label, price FROM `shop.orders` FOR SYSTEM_TIME AS OF '2026-11-20T12:00:00.000Z'"
    assert {details[1] for details in fake.called("CreateReadSession")} == {"acme-vision._anonymous.result0"}


@pytest.mark.parametrize("source", [f"bigquery:{TABLE}", QUERY])
def test_the_manifest_names_the_snapshot_and_a_rerun_gives_the_same_bytes(
    fake: FakeBigQuery, tmp_path: Path, source: str
) -> None:
    fake.answer = lambda query: (rows(7).select(["label", "price"]), [TABLE])
    first = run(source, tmp_path / "first", **ALL)
    assert re.search(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.source)
    fake.tables[TABLE].versions.append((datetime.now(UTC), rows(20)))
    again = run(first.source, tmp_path / "again", **ALL)
    assert contents(tmp_path / "again") == contents(tmp_path / "first")
    assert again == first
    if source != QUERY:
        assert run(source, tmp_path / "now", **ALL).records == 20


def test_an_interrupted_run_keeps_its_snapshot(fake: FakeBigQuery, tmp_path: Path) -> None:
    source = f"bigquery:{TABLE}"
    settings = PreprocessSettings(source=source, features={"key": "id"}, split={"train": 1.0})
    first = plan_dataset(settings, tmp_path / "out")
    write_shards(tmp_path / "out", 0, 2)
    fake.tables[TABLE].versions.append((datetime.now(UTC), rows(20)))
    manifest = run(source, tmp_path / "out", features={"key": "id"}, **ALL)
    assert manifest.source == first.settings.source
    assert manifest.records == 12


def known(source: str, **features: str) -> Any:
    return fingerprint(PreprocessSettings(source=source, features=features))


@pytest.mark.parametrize("source", ["bigquery:acme-vision.shop.orders@{}", "bigquery:SELECT '{}' FROM t"])
def test_a_table_is_known_by_its_last_change(fake: FakeBigQuery, source: str) -> None:
    fake.answer = lambda query: (rows(7), [TABLE])
    times = [f"2026-11-20T{hour}:00:00.000Z" for hour in (15, 16, 12)]
    first, second, before = (known(source.format(time)) for time in times)
    assert first == second
    assert first.known_by == "version"
    assert first.text.startswith("12 rows, ")
    assert first.text.endswith(", changed 2026-11-20 14:00:00")
    # What it was at noon is not known from what it is now.
    assert before.digest != first.digest
    fake.tables[TABLE].versions.append((at("15:30"), rows(12)))
    assert known(source.format(times[1])).digest != first.digest


@pytest.mark.parametrize(
    ("source", "tables", "doubt"),
    [
        ("SELECT * FROM t tablesample system (1 percent)", [TABLE], "tablesample gives another result each"),
        (f"{MOMENT} WHERE day > current_date", [], "current_date gives another result each time"),
        ("SELECT * FROM EXTERNAL_QUERY('eu.shop', 'SELECT 1')", [], "BigQuery names 0 tables that it reads"),
        ("SELECT * FROM t", [TABLE] * 50, "BigQuery names 50 tables that it reads, and never more than 50"),
        ("SELECT * FROM sheet", ["acme-vision.shop.sheet"], "acme-vision.shop.sheet is of type EXTERNAL"),
        ("SELECT id AS image, * FROM t", [TABLE], "images at URLs in column 'image'"),
    ],
)
def test_what_may_change_undetected_is_never_called_unchanged(
    fake: FakeBigQuery, source: str, tables: list[str], doubt: str
) -> None:
    image = rows(7).append_column("image", [["gs://bucket/a.jpg"] * 7])
    fake.answer = lambda query: (image if "AS image" in query else rows(7), tables)
    fake.tables["acme-vision.shop.sheet"] = FakeTable([(at("10:00"), rows(3))], kind="EXTERNAL")
    found = known(f"bigquery:{source}")
    assert found.known_by == ""
    assert doubt in found.text
    assert known(SOURCE, image="id").text.startswith("images at URLs in column 'id'")


def test_a_dry_run_reports_what_is_billed_and_reads_nothing(fake: FakeBigQuery, tmp_path: Path) -> None:
    cost = opened(f"{SOURCE} WHERE items > 6", key="id").cost()
    assert cost == "5 columns, 112 B to read; see cloud.google.com/bigquery/pricing"
    fake.answer = lambda query: (rows(7).select(["label", "price"]), [TABLE])
    cost = opened("bigquery:SELECT label, price FROM t").cost()
    assert cost.startswith("the query processes 440 B; its result is read as well")
    command = ["preprocess", SOURCE, str(tmp_path / "out"), "--dry-run", "--feature", "key=id"]
    shown = CliRunner().invoke(main, command)
    assert shown.output.splitlines() == [
        f"source: {SOURCE}",
        "content: 12 rows, 440 B, changed 2026-11-20 14:00:00",
        "cost: 5 columns, 368 B to read; see cloud.google.com/bigquery/pricing",
    ]
    assert fake.called("Query") == fake.called("ReadRows") == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "features", "message"),
    [
        ("acme-vision.shop.absent", "", "absent does not exist: .*Not found: Table acme-vision:shop.absent"),
        (f"{TABLE}@2026-11-01T10:00:00Z", "", "as of 2026-11-01T10:00:00Z: .*history is kept for 7 days"),
        (f"{MOMENT} WHERE absent > 6", "", "Unrecognized name: absent"),
        ("SELECT nonsense", "", "BigQuery refuses bigquery:SELECT nonsense: .*Syntax error"),
        (MOMENT, "label=colour", "has no column 'colour' for the label, it has id, label, price"),
        ("acme-vision.shop.view", "", "type VIEW, .*bigquery:SELECT ... FROM `acme-vision.shop.view`"),
        ("acme-vision.shop.nested", "", "column 'tags' of .* is REPEATED STRING; only whole numbers"),
        ("acme-vision.shop.nested", "label=label,a=size", "column 'size' of .* is RECORD; only"),
        ("acme-vision.shop.nested", "label=day,x=price", "is time; as a label, whole numbers, floats"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    fake: FakeBigQuery, source: str, features: str, message: str
) -> None:
    fake.tables["acme-vision.shop.view"] = FakeTable([(at("10:00"), rows(3))], kind="VIEW")
    days = pa.array([0] * 10, pa.timestamp("us"))
    nested = rows(10, tags=[["a"]] * 10, size=[{"x": 1}] * 10, day=days)
    fake.tables["acme-vision.shop.nested"] = FakeTable([(at("10:00"), nested)])
    with pytest.raises(SourceError, match=message) as raised:
        list(opened(f"bigquery:{source}", **dict(pair.split("=") for pair in features.split(",") if pair)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("method", "said", "message"),
    [
        (
            "CreateReadSession",
            "the user does not have 'bigquery.readsessions.create' permission for 'projects/acme-vision'",
            "bigquery.readsessions.create is missing.*bigquery.readSessionUser",
        ),
        (
            "GetTable",
            f"Access Denied: Table {TABLE}: Permission bigquery.tables.get denied on table {TABLE}",
            "bigquery.tables.get is missing.*grant roles/bigquery.dataViewer",
        ),
    ],
)
def test_a_permission_that_is_missing(fake: FakeBigQuery, method: str, said: str, message: str) -> None:
    fake.failures[method] = [RefusalError(grpc.StatusCode.PERMISSION_DENIED, 403, said)]
    with pytest.raises(PlatformError, match=message):
        list(opened(SOURCE))


def test_a_session_that_has_expired(fake: FakeBigQuery) -> None:
    expired = RefusalError(grpc.StatusCode.FAILED_PRECONDITION, 400, "there was an error: session expired")
    fake.failures["ReadRows"] = [expired]
    with pytest.raises(SourceError, match="session expired; run again, from the beginning"):
        list(opened(SOURCE))


def test_without_credentials_or_the_extra(fake: FakeBigQuery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.bigquery_storage_v1", None)
    with pytest.raises(SourceError, match=r"needs: pip install 'shardline\[bigquery\]'"):
        opened(SOURCE)
    monkeypatch.undo()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nowhere")
    with pytest.raises(PlatformError, match="no credentials of Google Cloud were found"):
        opened(SOURCE)
