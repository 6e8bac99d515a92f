"""Formats of a column's texts: which numbers or times they all are, found batch by batch, and their values.

Numbers may have a decimal comma, groups of thousands, one currency or one unit; times may be ISO or days of
a calendar. A text is read as what all values of its column are: one value never decides for itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardline.components.preprocess.lazy import np, pa, pc
from shardline.components.preprocess.schema import NO_VALUES
from shardline.trainer.base.errors import SourceError, printable, short

# Whole numbers up to this one are exact as floats of 32 bits.
_EXACT = 1 << 24

# Texts for a missing value that are reported, unlike `NO_VALUES`.
_MARKERS = (
    "?", "??", "-", "--", "---", "\u2013", "\u2014", ".", "..", "*", "na", "NAN", "none", "None", "NONE",
    "nil", "Null", "missing", "Missing", "unknown", "Unknown", "\\N", "#N/A!", "#DIV/0!", "#VALUE!", "#REF!",
)  # fmt: skip

# Texts that a number would change: a leading zero, a plus (but +1.5 %), a prefix, and in a column of floats
# digits beyond 64 bits; and 12E4, unless there are numbers with a point (programs write 1e-05 or 1e+20).
_CODE, _POWER = r"^(\+[^%]*$|-?0[0-9xX])", r"^-?[0-9]+[eE][0-9]+$"
_LONG_CODE = rf"{_CODE}|^-?[0-9]{{19,}}$"

# A reading that misses more than this share of the values is given up after so many; up to the share `_RARE`
# of misses, or one, these are malformed values, and more may be valid text (12a).
_MISSES, _ENOUGH, _RARE = 0.1, 1000, 0.01

# So many values at the beginning say which units and formats of times are tried.
_SAMPLE = 100

_SPACE, _MINUS = "[ \u00a0\u2009\u202f]", "[-\u2212]"
_INTEGER = r"^-?[0-9]+$"
_SYMBOL = "[$€£¥₹₽₩₺₴₪₫฿₦₱₡₲₵₸]"
_CODES = "USD|EUR|GBP|JPY|CNY|CHF|INR|CAD|AUD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|RON|BRL|MXN|KRW|TRY|ZAR|HKD|SGD"
_CURRENCY = re.compile(rf"(?:US|A|C|R|HK|NZ|S)?{_SYMBOL}|[Kk]r\.?|Rs\.?|zł|Kč|Ft|{_CODES}")
_UNIT = re.compile(
    rf"[-\u2212+(]?\s?(?P<before>{_CURRENCY.pattern})?\s?{_MINUS}?[\d.,][\d.,'\s]*"
    rf"(?P<after>[^\W\d_]{{1,8}}[²³]?(?:/[^\W\d_]{{1,4}})?|[%‰°]|°[CF]|{_SYMBOL})?\)?"
)
# Texts that are numbers to a reader: digits and marks, and at most two letters at the end.
_LIKE_NUMBER = re.compile(r"[\W_]*\d[\W\d_]*[^\W\d_]{0,2}")

_ISO = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}"
_ISO_TIME = r"(?:[T ](?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,12})?)?)"
_ZONE = r"(?: ?(?:Z|UTC|[+-](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?))"
_ISO_FORMS = {"iso": rf"{_ISO}{_ISO_TIME}?$", "iso with zone": rf"{_ISO}{_ISO_TIME}{_ZONE}$"}
_CLOCK = r"(?:(?P<gap>,? +)\d{1,2}:\d\d(?P<seconds>:\d\d)?(?P<half> ?[AaPp]\.?[Mm]\.?)?)?"
_DATE = re.compile(rf"(\d{{1,4}})([/.-])\d{{1,2}}\2(\d{{1,4}}){_CLOCK}")
_NAMED_DATE = re.compile(
    rf"(?:\d{{1,2}}([ -])[A-Za-z]{{3,9}}\1|[A-Za-z]{{3,9}} \d{{1,2}}(,?) )\d{{4}}{_CLOCK}"
)

# A column of whole numbers with such a name is of times if all lie in the years 1990 to 2100.
_TIME_NAME = re.compile(r"(?i)(?:^|_)(?:at|ts)(?:$|_)|time|date|(?-i:At$)")
_EPOCH = (631_152_000, 4_102_444_800)
_EPOCH_UNITS = {"s": 10**6, "ms": 1000, "us": 1}

# Beginnings of the formats of dates of which a setting says the order.
_ORDERS = {"day-first": "%d", "month-first": "%m"}

_DATE_PARTS = {"year": "year", "month": "month", "weekday": "day_of_week"}
#: Parts of times that are features, and their functions in pyarrow.compute, by the type of the column.
TIME_PARTS = {"date": _DATE_PARTS, "time": {**_DATE_PARTS, "hour": "hour"}}


@dataclass(frozen=True)
class TextFormat:
    """What the texts of a column are.

    Attributes:
        kind: "int64", "float32", "string" or "time".
        decimal: The decimal point of numbers that Arrow does not read as they are, "." or ","; else "".
        unit: Currency or unit that stands with the numbers.
        time_format: "iso", "iso with zone", "epoch s", "epoch ms", "epoch us", or as in strptime.
        has_gaps: Whether some rows have no value.
        is_wide: Whether some whole numbers are not exact as floats of 32 bits.
        note: A line about the column for the user, or "".
        fault: Why the column, which is a string then, cannot be a feature or a label, or "". It is raised by
            the caller, who knows which columns are used.
    """

    kind: Literal["int64", "float32", "string", "time"]
    decimal: str = ""
    unit: str = ""
    time_format: str = ""
    has_gaps: bool = False
    is_wide: bool = False
    note: str = ""
    fault: str = ""

    def parse(self, text: Any) -> Any:
        """Returns the values of texts: int64, float64, string or timestamp("us"), null where there is none.

        Raises pyarrow.ArrowInvalid for a text that is not of this form.
        """
        if self.kind == "string":
            return text
        kind = pa.int64() if self.kind == "int64" else pa.float64()
        if not (self.decimal or self.time_format or self.has_gaps):
            try:
                return pc.cast(text, kind)
            except pa.ArrowInvalid:  # such as spaces around a number
                pass
        text = _present(text)
        if self.kind != "time":
            return pc.cast(_normalize(text, self.decimal, self.unit) if self.decimal else text, kind)
        times = _times(text, self.time_format)
        if times.null_count > text.null_count:
            _, value = _first(text, pc.is_null(times))
            raise pa.ArrowInvalid(f"{value!r} is no time of the form {self.time_format}")
        return times


def is_wide(least: int | None, largest: int | None) -> bool:
    """Returns whether some whole numbers between these are not exact as floats of 32 bits."""
    return max(abs(least or 0), abs(largest or 0)) > _EXACT


def time_parts(name: str, kind: str, times: Any) -> dict[str, Any]:
    """Returns the parts of times as float64, NaN where there is none; weekdays count from Monday, 0."""
    return {
        f"{name} {part}": pc.fill_null(pc.cast(getattr(pc, function)(times), pa.float64()), float("nan"))
        for part, function in TIME_PARTS[kind].items()
    }


@dataclass
class _Reading:
    """One way to read the texts of a column: its form, and what it found."""

    form: TextFormat
    misses: int = 0
    first: tuple[int, str] = (0, "")  # row and value of the first miss
    is_monthly: bool = True  # whether all times are of the first of a month

    def add(self, text: Any, row: int, *, whole: bool) -> None:
        if self.form.kind == "time":
            times = _times(text, self.form.time_format)
            missed = pc.and_(pc.is_null(times), pc.is_valid(text))
            self.is_monthly &= pc.max(pc.day(times)).as_py() == 1
        else:
            fits = pc.match_substring_regex(text, _number(self.form.decimal, self.form.unit, whole))
            missed = pc.invert(fits)
        if count := pc.sum(missed).as_py():
            self.first = self.first if self.misses else _first(text, missed, row)
            self.misses += count


class TextScan:
    """Finds the narrowest form that fits all texts of a column, batch by batch, in memory of a constant size.

    Args as of `columns.ColumnScan`.
    """

    def __init__(self, name: str, override: str) -> None:
        self.name, self.override = name, override
        self._said = override.rstrip("?")
        self._is_open = self._said != "text"
        # "int64" or "float32" while Arrow reads all values as they are, else "".
        self._kind, self._readings = "int64", [_Reading(TextFormat("float32", decimal)) for decimal in ".,"]
        self._rows = self._values = self._least = self._largest = self._marked = 0
        # Whether some texts have spaces around them, or say that there is no value.
        self._has_gaps = self._is_padded = self._like_numbers = self._has_point = False
        self._code = self._power = self._marker = ""
        self._separated = ""  # first value with a point or a comma
        self._first = (0, "")  # row and value of the first that there is
        self._other = (0, "")  # row and value of the first that is no whole number

    def add(self, text: Any) -> None:
        """Adds a batch of texts."""
        # The first rows rule out most forms for the others.
        first = max(0, _ENOUGH - self._rows)
        for part in (text[:first], text[first:]) if first < len(text) else (text,):
            self._has_gaps |= part.null_count > 0
            if self._is_open and len(part):
                self._add(part)
            self._rows += len(part)

    def finish(self) -> TextFormat:
        """Returns the form; SourceError if the override does not fit."""
        form = self._find()
        if self.override == "integer" and form.kind != "int64":
            self._refuse("whole number", self._other if self._kind else self._best().first)
        if self.override == "number" and form.kind != "float32":
            self._refuse("number", self._best().first)
        if self.override in _ORDERS and form.kind != "time":
            self._refuse(f"date, {self.override}", self._best().first if self._best().misses else self._first)
        return replace(form, has_gaps=self._has_gaps)

    def _add(self, text: Any) -> None:
        values = self._present(text) if self._is_padded else text
        kind, numbers = self._cast(values)
        if not kind and values is text:
            values = self._present(text)
            kind, numbers = self._cast(values)
        count = len(values) - values.null_count
        if not count:
            return
        if not self._values:
            self._first = _first(values, pc.is_valid(values), self._rows)
        if not kind and self._values < _ENOUGH:
            self._add_readings(pc.drop_null(values)[:_SAMPLE].to_pylist())
        if kind != "int64" and not self._other[0]:
            others = pc.invert(pc.match_substring_regex(values, _INTEGER))
            self._other = _first(values, others, self._rows)
        if kind == "int64":
            least, largest = pc.min_max(numbers).as_py().values()
            self._least = min(self._least, least) if self._values else least
            self._largest = max(self._largest, largest) if self._values else largest
        self._kind, self._values = kind, self._values + count
        self._read(values, kind)
        self._find_code(values)

    def _present(self, text: Any) -> Any:
        """Returns trimmed texts, null where they say that there is no value."""
        values, self._is_padded = _present(text), True
        self._has_gaps |= values.null_count > 0
        if values.null_count > text.null_count:
            marked = pc.index_in(pc.utf8_trim_whitespace(text), pa.array(_MARKERS, text.type)).drop_null()
            self._marked += len(marked)
            if len(marked) and not self._marker:
                self._marker = _MARKERS[marked[0].as_py()]
        return values

    def _cast(self, values: Any) -> tuple[str, Any]:
        """Returns the narrowest type in which Arrow reads all values as they are, and their numbers."""
        for kind, arrow in (("int64", pa.int64()), ("float32", pa.float64())):
            if self._kind in ("int64", kind):
                try:
                    return kind, pc.cast(values, arrow)
                except pa.ArrowInvalid:
                    continue
        return "", None

    def _read(self, values: Any, kind: str) -> None:
        """Has the readings look at values; Arrow's own numbers are of the first, whole ones of the second."""
        tried = self._readings[{"int64": 2, "float32": 1}.get(kind, 0) :]
        limit = _MISSES * self._values if self._values >= _ENOUGH else self._values
        tried = [reading for reading in tried if reading.misses <= limit]
        for reading in tried:
            reading.add(values, self._rows, whole=self.override == "integer")
        if not self._separated and any(reading.form.decimal and not reading.misses for reading in tried):
            for mark in ".,":
                if len(found := values.filter(pc.match_substring(values, mark))):
                    self._separated = found[0].as_py()
        self._is_open = bool(kind) or self._values < _ENOUGH or any(r.misses <= limit for r in self._readings)

    def _find_code(self, values: Any) -> None:
        if not self._has_point and self._kind != "int64":
            self._has_point = bool(pc.any(pc.match_substring_regex(values, "[.,]")).as_py())
        best = self._best()
        is_number = self._kind or (best.form.decimal and best.misses <= _MISSES * self._values)
        if not self.override and is_number and len(likely := _likely_codes(values)):
            pattern = _CODE if self._kind == "int64" else _LONG_CODE
            if len(codes := likely.filter(pc.match_substring_regex(likely, pattern))):
                self._code, self._is_open = codes[0].as_py(), False
            if not self._power and len(codes := likely.filter(pc.match_substring_regex(likely, _POWER))):
                self._power = codes[0].as_py()

    def _add_readings(self, sample: Sequence[str]) -> None:
        """Adds the units and the formats of times that the first values have."""
        units, formats = Counter[str](), Counter[str]()
        for value in sample:
            if found := _UNIT.fullmatch(value):
                units.update({unit for unit in (found["before"], found["after"]) if unit})
            formats.update(_time_formats(value))
        known, plain = {reading.form for reading in self._readings}, self._readings[:2]
        # Of the values before, numbers without a currency fit one with it, and nothing else is known to fit.
        missed = _Reading(TextFormat("string"), self._values, self._first)
        new = list[_Reading]()
        for unit, count in units.most_common(3):
            if (is_currency := _CURRENCY.fullmatch(unit)) or 2 * count > len(sample):
                new += [
                    replace(each if is_currency else missed, form=replace(each.form, unit=unit))
                    for each in plain
                ]
        if self._said in ("", *_ORDERS):
            first = _ORDERS.get(self._said, "")
            likely = [each for each, n in formats.items() if 2 * n > len(sample) and each.startswith(first)]
            new += [replace(missed, form=TextFormat("time", time_format=each)) for each in likely]
        self._readings += [reading for reading in new if reading.form not in known]
        self._like_numbers = sum(map(bool, map(_LIKE_NUMBER.fullmatch, sample))) > 0.9 * len(sample)

    def _best(self) -> _Reading:
        return min(self._readings, key=lambda reading: reading.misses)

    def _find(self) -> TextFormat:
        if self._said == "text" or (self._marked and not self._values and not self._said):
            return TextFormat("string")
        if code := self._code or ("" if self._has_point else self._power):
            why = f"since it has {short(code)}, which a number would change"
            instead = f"{self._option('number')} makes it a number"
            return TextFormat("string", note=f"{self._column} is text, {why}; {instead}")
        if self._kind == "int64":
            return self._whole()
        readings = [reading for reading in self._readings if not reading.misses]
        if len(readings) > 1 and (monthly := [reading for reading in readings if reading.is_monthly]):
            readings = monthly
        fitting = [reading.form for reading in readings]
        if self._kind:
            doubt = ", not as thousands" if len(fitting) > 1 and self._separated else ""
            return TextFormat("float32", note=self._note("numbers", f"decimals{doubt}" if doubt else ""))
        return self._fitting(fitting) if fitting else self._text()

    def _whole(self) -> TextFormat:
        if self._said == "number":
            return TextFormat("float32", note=self._note("numbers", ""))
        span = (self._least, self._largest)
        if not self.override and self._values and _TIME_NAME.search(self.name):
            for unit, factor in _EPOCH_UNITS.items():
                if all(_EPOCH[0] <= each * factor // 10**6 < _EPOCH[1] for each in span):
                    note = self._note("times", f"{unit} since 1970", f"{span[0]}")
                    return TextFormat("time", time_format=f"epoch {unit}", note=note)
        return TextFormat("int64", is_wide=is_wide(*span), note=self._note("numbers", ""))

    def _fitting(self, forms: Sequence[TextFormat]) -> TextFormat:
        form = forms[0]
        if form.kind == "time" and len(forms) > 1:
            dates = f"has dates such as {short(self._other[1])}"
            why = f"{dates}, where the day or the month may be first in all rows"
            instead = (
                f"write them as 2024-12-31, or say which: {self._option('day-first, month-first or text')}"
            )
            return TextFormat("string", fault=f"{self._column} {why}; {instead}")
        if form.kind == "time":
            return replace(form, note=self._note("times", _described(form.time_format)))
        doubt = len(forms) > 1 and bool(self._separated)
        # A currency has two decimals.
        if doubt and form.unit and "." in self._separated:
            form = forms[1]
        value = self._separated or self._other[1]
        read = f"{form.parse(pa.array([value]))[0].as_py():.15g}"
        if doubt:
            is_grouped = (form.decimal == ".") == ("," in self._separated)
            read += ", a mark between thousands" if is_grouped else ", a decimal point"
        if self.override == "integer":
            form = replace(form, kind="int64")
        return replace(form, note=self._note("numbers", read, value))

    def _text(self) -> TextFormat:
        best, column, keep = self._best(), self._column, self._option("text")
        row, value = best.first
        what = "times" if best.form.kind == "time" else "numbers"
        fits = f"{what} in {self._values - best.misses:,} of {self._values:,} rows"
        found = f"{column} has {short(value)} in row {row:,}, and {fits}"
        if self.override:
            return TextFormat("string")
        if best.misses <= min(max(1, _RARE * self._values), _MISSES * self._values):
            either = "correct it, or leave it empty, or if the column is text, say so"
            return TextFormat("string", fault=f"{found}; {either}: {keep}")
        if best.misses <= _MISSES * self._values:
            return TextFormat("string", note=f"warning: {found}: it is text")
        if self._like_numbers:
            why = f"since {short(self._other[1])} and the like are no numbers; write these as 1234.5"
            return TextFormat("string", note=f"warning: {column} is text, {why}, or say {keep}")
        return TextFormat("string")

    @property
    def _column(self) -> str:
        return f"column {printable(repr(self.name))}"

    def _option(self, kind: str) -> str:
        return f"--column {printable(self.name)}={kind} (columns in a pipeline)"

    def _note(self, what: str, read: str, value: str = "") -> str:
        """Returns the line about values that are read in other ways than as they are."""
        parts = []
        if read:
            parts.append(f"holds {what} such as {short(value or self._other[1])}, read as {read}")
        if self._marked:
            parts.append(f"has {self._marker!r} in {self._marked:,} of {self._rows:,} rows, read as no value")
        if not parts:
            return ""
        return f"{self._column} {', and '.join(parts)}; {self._option('text')} keeps the text"

    def _refuse(self, what: str, found: tuple[int, str]) -> None:
        row, value = found
        why = f"{self._column} has {short(value)} in row {row:,}, which is no {what}"
        raise SourceError(f"{why}; correct it, leave it empty, or correct {self._option(self.override)}")


def _first(values: Any, mask: Any, row: int = 0) -> tuple[int, str]:
    """Returns the row and the value of the first of those that a mask names; `row` is the last one before."""
    at = pc.index(mask, True).as_py()
    return (row + at + 1, values[at].as_py()) if at >= 0 else (0, "")


def _present(text: Any) -> Any:
    """Returns trimmed texts, null where they say that there is no value."""
    text = pc.utf8_trim_whitespace(text)
    return pc.if_else(pc.is_in(text, pa.array([*NO_VALUES, *_MARKERS], text.type)), None, text)


def _likely_codes(text: Any) -> Any:
    """Returns the texts that may match `_CODE`, by a look at a few bytes: faster than the pattern."""
    _, offsets, data = text.buffers()
    ends = np.frombuffer(offsets, np.int64 if pa.types.is_large_string(text.type) else np.int32)
    ends = ends[text.offset : text.offset + len(text) + 1]
    content = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
    start, end = ends[:-1] - ends[0], ends[1:] - ends[0]
    if not len(content):
        return text[:0]
    first = content.take(start, mode="clip")
    start = start + (first == ord("-"))
    zero, second = content.take(start, mode="clip"), content.take(start + 1, mode="clip")
    is_padded = (zero == ord("0")) & ((second - ord("0") < 10) | ((second | 32) == ord("x")))
    if (is_long := end - start > 18).any():
        is_long[np.searchsorted(end, np.flatnonzero(content == ord(".")), side="right")] = False
    is_likely = (first == ord("+")) | (is_padded & (end - start > 1)) | is_long
    exponents = np.flatnonzero((content | 32) == ord("e"))
    exponents = exponents[content.take(exponents + 1, mode="clip") - ord("0") < 10]
    is_likely[np.searchsorted(end, exponents, side="right")] = True
    return text.filter(pa.array(is_likely))


def _number(decimal: str, unit: str, whole: bool) -> str:
    """Returns the pattern of numbers with a decimal point and a unit."""
    group, point = (",", r"\.") if decimal == "." else (r"\.", ",")
    # Lakhs are 1,00,000; where a point groups, there are none.
    more = rf"(?:{group}[0-9]{{2,3}})*" if decimal == "." else rf"(?:{group}[0-9]{{3}})*"
    spaced = rf"[1-9][0-9]{{0,2}}(?:(?:{_SPACE}|')[0-9]{{3}})+"
    digits = rf"(?:[0-9]+|[1-9][0-9]{{0,2}}{more}{group}[0-9]{{3}}|{spaced})"
    number = rf"(?:{digits}(?:{point}[0-9]*)?|{point}[0-9]+)(?:[eE][-+]?[0-9]+)?"
    number, sign, named = digits if whole else number, "[-\u2212+]?", re.escape(unit)
    if not unit:
        return rf"^(?:{sign}{number}|\({number}\))$"
    if _CURRENCY.fullmatch(unit):
        number = rf"(?:{named}{_SPACE}?)?{_MINUS}?{number}(?:{_SPACE}?{named})?"
    else:
        number = rf"(?:{number}{_SPACE}?{named}|0)"
    return rf"^(?:{sign}{_SPACE}?{number}|\({number}\))$"


def _normalize(text: Any, decimal: str, unit: str) -> Any:
    """Returns numbers of `_number` as Arrow reads them."""
    if unit:
        text = pc.replace_substring(text, unit, "")
    text = pc.replace_substring_regex(text, rf"{_SPACE}|['+{',' if decimal == '.' else '.'}]", "")
    text = pc.replace_substring_regex(text, r"^(?:\((.*)\)|\x{2212}(.*))$", r"-\1\2")
    return pc.replace_substring(text, ",", ".")


def _time_formats(value: str) -> Sequence[str]:
    """Returns the formats of which a text may be a time."""
    if forms := [name for name, form in _ISO_FORMS.items() if re.match(form, value)]:
        return forms
    if found := _DATE.fullmatch(value):
        first, mark, last = found.group(1, 2, 3)
        if len(first) == 4 and len(last) <= 2:
            dates = [f"%Y{mark}%m{mark}%d"]
        elif (
            len(first) > 2 or len(last) not in (2, 4) or (len(last) == 2 and mark != "/" and len(first) == 1)
        ):
            return ()
        else:
            year = "%Y" if len(last) == 4 else "%y"
            dates = [f"%d{mark}%m{mark}{year}", f"%m{mark}%d{mark}{year}"][: 1 if mark == "." else 2]
    elif found := _NAMED_DATE.fullmatch(value):
        between, comma = found.group(1, 2)
        dates = [f"%b %d{comma} %Y" if between is None else f"%d{between}%b{between}%Y"]
    else:
        return ()
    clock = ""
    if found["gap"]:
        half = found["half"] or ""
        clock = f"{',' if ',' in found['gap'] else ''} {'%I' if half else '%H'}:%M"
        clock += (":%S" if found["seconds"] else "") + (" %p" if half[:1] == " " else "%p" if half else "")
    return [date + clock for date in dates]


def _described(form: str) -> str:
    names = {"%d": "day", "%m": "month", "%b": "month", "%Y": "year", "%y": "year"}
    date = "%Y-%m-%d" if form in _ISO_FORMS else re.split(r",? %[HI]", form)[0]
    return f"{re.sub('%.', lambda found: names[found[0]], date)}: year, month, weekday and hour as numbers"


def _times(text: Any, form: str) -> Any:
    """Returns texts as times in UTC, null where they are none of a format."""
    if form.startswith("epoch"):
        number = pc.cast(text, pa.int64())
        return pc.cast(pc.multiply(number, _EPOCH_UNITS[form[6:]]), pa.timestamp("us"))
    if form not in _ISO_FORMS:
        return _strptime(text, form)
    kind = pa.timestamp("us", "UTC") if form == "iso with zone" else pa.timestamp("us")
    try:
        times = pc.cast(text, kind)
    except pa.ArrowInvalid:
        fits = pc.match_substring_regex(text, _ISO_FORMS[form])
        is_date = pc.is_valid(_strptime(pc.utf8_slice_codeunits(text, 0, 10), "%Y-%m-%d"))
        text = pc.if_else(pc.and_(fits, is_date), text, None)
        text = pc.replace_substring_regex(text, r"(\.[0-9]{6})[0-9]+", r"\1")
        text = pc.replace_substring_regex(text, " ?(?:UTC|Z)$", "Z")
        times = pc.cast(pc.replace_substring_regex(text, " ([+-])", r"\1"), kind)
    return pc.cast(times, pa.timestamp("us"))


def _strptime(text: Any, form: str) -> Any:
    times = pc.strptime(text, format=form, unit="us", error_is_null=True)
    # The C library takes 31/02 for 2/3, and 24 for the year 24.
    late = pc.less_equal(pc.day(times), 3)
    pattern = re.sub("%[^d]", r"\\w+", re.escape(form).replace("%d", "(?:29|30|31)"))
    if pc.any(pc.match_substring_regex(text.filter(late), pattern)).as_py():
        times = pc.if_else(pc.and_(late, pc.match_substring_regex(text, pattern)), None, times)
    return pc.if_else(pc.less(pc.year(times), 1000), None, times)
