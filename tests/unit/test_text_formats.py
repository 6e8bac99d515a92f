"""Forms of a column's texts: numbers of a locale, times, codes, and what is no value."""

from __future__ import annotations

import json
import math
import random
import string
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest

from shardline.components.preprocess.sources.text_formats import TextFormat, TextScan, time_parts
from shardline.trainer.base.errors import SourceError

Texts = Sequence[str | None]


def scan(texts: Texts, override: str = "", name: str = "x", step: int = 0) -> TextFormat:
    column, step = TextScan(name, override), step or len(texts)
    for start in range(0, len(texts), step):
        # A slice, as batches of a reader may be.
        column.add(pa.array(["0012", *texts[start : start + step]], pa.string())[1:])
    return column.finish()


def values(texts: Texts, *arguments: Any, **options: Any) -> list[Any]:
    form = scan(texts, *arguments, **options)
    assert TextFormat(**json.loads(json.dumps(asdict(form)))) == form
    return form.parse(pa.array(texts, pa.string())).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("texts", "kind", "found"),
    [
        (["1", "-2", " 3 "], "int64", [1, -2, 3]),
        (["1", "2.5", "1e-05"], "float32", [1, 2.5, 1e-5]),
        (["123,45", "-1", ",5"], "float32", [123.45, -1, 0.5]),
        (["1.100,50", "2,5"], "float32", [1100.5, 2.5]),
        (["1.234", "1.100,50"], "float32", [1234, 1100.5]),  # a float, until the second
        (["1,234.50", "1,000", "1,00,000"], "float32", [1234.5, 1000, 100_000]),
        (["1 234,5", "1\u00a0234", "1\u202f234,5"], "float32", [1234.5, 1234, 1234.5]),
        (["1'234.50", "7"], "float32", [1234.5, 7]),
        (["$1,000.00", "5", "-$3", "($2.50)", "$-1"], "float32", [1000, 5, -3, -2.5, -1]),
        (["EUR 5", "EUR 1.000,50", "7 EUR"], "float32", [5, 1000.5, 7]),
        (["12 %", "+1.5%", "0"], "float32", [12, 1.5, 0]),
        (["12kg", "5 kg"], "float32", [12, 5]),
        (["\u22122,5", "1"], "float32", [-2.5, 1]),
        (["1,234", "5,678"], "float32", [1234, 5678]),  # undecided: thousands
        (["0,123", "5,678"], "float32", [0.123, 5.678]),
        (["$1.234", "$5.678"], "float32", [1234, 5678]),  # undecided: no price has three decimals
        (["5", "?", None, "NA", ""], "int64", [5, None, None, None, None]),
        (["1,5", "-", "n/a"], "float32", [1.5, None, None]),
        ([None, ""], "int64", [None, None]),
    ],
)
def test_numbers(texts: Texts, kind: str, found: Sequence[Any]) -> None:
    for step in (len(texts), 1):
        form = scan(texts, step=step)
        assert (form.kind, form.fault) == (kind, "")
        assert form.parse(pa.array(texts, pa.string())).to_pylist() == found
        assert form.has_gaps == (None in found)


def test_a_currency_may_come_after_plain_numbers_and_a_date_after_a_gap() -> None:
    assert values(["5", "1.5", "$1,000"], step=1) == [5, 1.5, 1000]
    assert scan(["5"] * 2000 + ["$6"]).fault
    assert scan([None] * 3000 + ["2024-05-06"], step=1000).kind == "time"


@pytest.mark.parametrize(
    "texts",
    [
        ["a", "1"], ["true", "false"], ["?", "-"], ["12 kg", "500 g"], ["$5", "\u20ac5"], ["1_2_3", "4_5"],
        ["12a", "13b"], ["10-20", "1.2.3"], ["12 %", "0.5"], ["1.2.3,4", "1"], ["1.234,5", "1,234.5"],
    ],
)  # fmt: skip
def test_other_texts_stay_and_those_like_numbers_are_reported(texts: list[str]) -> None:
    form = scan(texts)
    assert (form.kind, form.fault) == ("string", "")
    assert form.parse(pa.array(texts)).to_pylist() == texts
    assert form.note.startswith("warning: column 'x' is text") == any(map(str.isdigit, texts[0]))


@pytest.mark.parametrize(
    "code", ["00123", "0x1f", "+49", "12E4", "12345678901234567890", "-01", "007,5", "-00.5"]
)
def test_a_code_keeps_its_column_text(code: str) -> None:
    for others in (["1"], ["1"] * 3000):
        form = scan([*others, code, "1"], step=999)
        assert form.kind == "string"
        assert f"column 'x' is text, since it has {code!r}" in form.note
    assert values(["0", "-0", "0.5", "-0.5", "1.50"]) == [0, 0, 0.5, -0.5, 1.5]


def test_whole_numbers_beyond_32_bit_floats() -> None:
    assert scan(["16777217"]).is_wide
    assert not scan(["16777216", "-16777216"]).is_wide
    assert scan(["-16777217"]).is_wide


@pytest.mark.parametrize(
    ("malformed", "texts"),
    [
        ("12a", ["1"] * 299),
        ("1,5", ["1.25"] * 299),
        ("\u20ac5", ["$5"] * 299),
        ("soon", ["2024-05-06"] * 299),
    ],
)
@pytest.mark.parametrize("step", [300, 7])
def test_few_malformed_values_are_a_fault(malformed: str, texts: list[str], step: int) -> None:
    form = scan([*texts[:100], malformed, *texts[100:]], step=step)
    assert form.kind == "string"
    assert f"column 'x' has {malformed!r} in row 101, and" in form.fault
    assert "in 299 of 300 rows" in form.fault
    more = scan([malformed] * 30 + texts[:270], step=step)
    assert (more.kind, more.fault) == ("string", "")
    assert f"{malformed!r} in row 1, and" in more.note
    assert not scan([malformed] * 1100 + texts * 10).note.startswith("warning: column 'x' has")


@pytest.mark.parametrize(
    ("texts", "override", "found"),
    [
        (["007", "0x1f"], "integer", [7, 31]),
        (["1,000", "2"], "integer", [1000, 2]),
        (["12E4", "1"], "number", [120_000.0, 1.0]),
        (["123,5", "00,5"], "number", [123.5, 0.5]),
        (["1", "2"], "text", ["1", "2"]),
        (["2024-05-06"], "text", ["2024-05-06"]),
        (["1", "x"], "number?", ["1", "x"]),
        (["1", "1.5"], "integer?", [1.0, 1.5]),
        (["1700000000"], "integer", [1_700_000_000]),
    ],
)
def test_an_override(texts: list[str], override: str, found: Sequence[Any]) -> None:
    assert values(texts, override, name="time") == found
    assert type(values(texts, override, name="time")[0]) is type(found[0])


@pytest.mark.parametrize(
    ("texts", "override", "message"),
    [
        (["1", "foo"], "number", "has 'foo' in row 2, which is no number"),
        (["1", "1.5"], "integer", "has '1.5' in row 2, which is no whole number"),
        (["1,000", "1,5"], "integer", "has '1,5' in row 2, which is no whole number"),
        (["2024-05-06"], "number", "has '2024-05-06' in row 1, which is no number"),
    ],
)
def test_an_override_that_does_not_fit(texts: list[str], override: str, message: str) -> None:
    with pytest.raises(SourceError, match=f"column 'x' {message}.*--column x={override}"):
        scan(texts, override)


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["31/01/2024 10:30", "01/02/2024 23:00"], ["2024-01-31 10:30", "2024-02-01 23:00"]),
        (["01/02/2024", "01/31/2024"], ["2024-01-02", "2024-01-31"]),
        (["01/01/2024", "03/01/2024"], ["2024-01-01", "2024-03-01"]),  # months
        (["5.6.2024", "?"], ["2024-06-05", None]),
        (["1/13/24 12:05:06 AM"], ["2024-01-13 00:05:06"]),
        (["2024/01/05 7:08"], ["2024-01-05 07:08"]),
        (["05 Jan 2024", "31 Dec 1999"], ["2024-01-05", "1999-12-31"]),
        (["Jan 5, 2024"], ["2024-01-05"]),
        (["2024-01-05", "2024-02-29T10:11:12.123456789"], ["2024-01-05", "2024-02-29 10:11:12.123456"]),
        (["2024-01-05T10:00Z", "2024-01-05 10:00:00 +02:00", "2024-01-05 10:00:00 UTC"],
         ["2024-01-05 10:00", "2024-01-05 08:00", "2024-01-05 10:00"]),
    ],
)  # fmt: skip
def test_times(texts: Texts, found: Texts) -> None:
    form = scan(texts)
    assert form.kind == "time"
    assert "column 'x' holds times" in form.note
    expected = [None if text is None else datetime.fromisoformat(text) for text in found]
    assert values(texts) == expected
    with pytest.raises(pa.ArrowInvalid, match="'soon' is no time"):
        form.parse(pa.array(["soon"]))


@pytest.mark.parametrize("texts", [["31/02/2024"], ["2023-02-29"], ["1.10.2", "10.15.07"], ["12:30"]])
def test_texts_that_are_no_times(texts: list[str]) -> None:
    assert scan(texts).kind == "string"


def test_dates_with_the_day_or_the_month_first_in_all_rows_are_a_fault() -> None:
    form = scan(["01/02/2024", "03/04/2024"])
    assert form.kind == "string"
    assert "'01/02/2024', where the day or the month may be first" in form.fault


@pytest.mark.parametrize(("order", "month"), [("day-first", 2), ("month-first", 1)])
def test_a_setting_says_which_is_first(order: str, month: int) -> None:
    assert values(["01/02/2024", None, "01/02/2024"], order)[0] == datetime(2024, month, 3 - month)
    with pytest.raises(
        SourceError, match=f"has '{13 if month == 1 else 1}/.*no date, {order}; .*--column x={order}"
    ):
        scan(["1/2/2024", "13/2/2024", "1/13/2024"], order)
    with pytest.raises(SourceError, match=f"has '20240102' in row 1, which is no date, {order}"):
        scan(["20240102"], order)


@pytest.mark.parametrize("step", [0, 1])
def test_powers_of_ten_are_codes_only_among_whole_numbers(step: int) -> None:
    assert scan(["12E4", "3", "1e39"], step=step).kind == "string"
    assert scan(["12E4", "3", "1.5"], step=step).kind == "float32"
    assert scan(["0.5", "3", "1e39"], step=step).kind == "float32"
    assert scan(["0.5", "3", "01e39"], step=step).kind == "string"


@pytest.mark.parametrize(("factor", "name"), [(1, "created_at"), (1000, "createdAt"), (10**6, "event_time")])
def test_whole_numbers_are_times_by_name_and_range(factor: int, name: str) -> None:
    texts = [str(1_700_000_000 * factor), str(1_700_000_060 * factor)]
    assert values(texts, name=name)[1] == datetime(2023, 11, 14, 22, 14, 20)
    assert scan(texts, name="amount").kind == scan([*texts, "5"], name=name).kind == "int64"


def test_parts_of_times() -> None:
    times = pa.array([datetime(2024, 12, 30, 23, 59), None], pa.timestamp("us"))
    parts = {name: part.to_pylist() for name, part in time_parts("at", "time", times).items()}
    assert {name: part[0] for name, part in parts.items()} == {
        "at year": 2024, "at month": 12, "at weekday": 0, "at hour": 23
    }  # fmt: skip
    assert all(math.isnan(part[1]) for part in parts.values())


def test_random_numbers_and_times_are_read_as_python_reads_them() -> None:
    rng = random.Random(52)
    numbers = [round(rng.uniform(-1, 1) * 10 ** rng.randrange(8), 2) for _ in range(3000)]
    english = [f"{number:,.2f}" for number in numbers]
    german = [text.translate(str.maketrans(",.", ".,")) for text in english]
    for texts in (english, german, [f"\u20ac {text}" for text in german], [f"{text} %" for text in english]):
        assert values(texts, step=777) == numbers
    times = [datetime(1990, 1, 1) + timedelta(minutes=rng.randrange(50_000_000)) for _ in range(3000)]
    for form in (
        "%d/%m/%Y %H:%M",
        "%m/%d/%Y %I:%M %p",
        "%d.%m.%Y %H:%M:%S",
        "%Y-%m-%dT%H:%M",
        "%d-%b-%Y %H:%M",
    ):
        assert values([time.strftime(form) for time in times], step=777) == times
    zones = [time.replace(tzinfo=timezone(timedelta(hours=rng.randrange(-11, 12)))) for time in times]
    expected = [time.astimezone(UTC).replace(tzinfo=None) for time in zones]
    assert values([time.isoformat() for time in zones], step=777) == expected


def test_random_texts_are_never_changed_in_silence() -> None:
    """A text that becomes a number without a line is one that Python reads as the same number."""
    rng = random.Random(7)
    for _ in range(500):
        texts = [
            "".join(rng.choices("0123456789.,-+ %$eEx/:" + string.ascii_letters[:3], k=rng.randrange(1, 7)))
        ]
        form = scan(texts)
        if form.kind in ("int64", "float32") and not form.note and form.parse(pa.array(texts))[0].is_valid:
            assert form.parse(pa.array(texts)).to_pylist() == [float(texts[0])]
