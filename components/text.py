"""Text for people at a terminal: tables, sizes, times and durations.

Not tabulate: it takes 30 ms to load, trims cells and widens columns, and saves six lines.
"""

from __future__ import annotations

import datetime
import re
import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

Rows = Sequence[tuple[str, str]]


def reason(error: BaseException) -> str:
    """Returns the message of the operating system, or the first line of another error's."""
    message = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(message).strip().partition("\n")[0]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "lr") -> str:
    """Returns lines of columns below their titles.

    `align` has "l" or "r" for each column, the last one for all that follow.
    """
    columns = [
        [cell.ljust(width) if side == "l" else cell.rjust(width) for cell in column]
        for column, side in zip(zip(head, *rows, strict=True), align.ljust(len(head), align[-1]), strict=True)
        for width in [max(map(len, column))]
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def facts(rows: Rows) -> str:
    """Returns lines of names and their values."""
    return table(rows[0], rows[1:], align="l")


def truncate(value: object, longest: int) -> str:
    """Returns a value as text of at most `longest` characters: a longer one ends with three dots."""
    text = str(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def enumerate_names(names: Sequence[str], most: int = 20, separator: str = ", ") -> str:
    """Returns a list of at most `most` names: "a, b and 4 more"."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


#: The primary metric of regression, classification and multilabel; no label has two of them.
_PRIMARY = {"rmse": "{:,.4g}", "accuracy": "{:.4f}", "macro_f1": "{:.4f}"}


def quality(metrics: Mapping[str, float | None]) -> str:
    """Returns the primary metric of each label: "accuracy 0.9812", "a.accuracy 0.97, b.rmse 3.1"."""
    first: dict[str, str] = {}
    for metric, form in _PRIMARY.items():
        for name, value in metrics.items():
            label, _, last = name.rpartition(".")
            if last == metric and value is not None and "[" not in name:
                first.setdefault(label, f"{name} {form.format(value)}")
    labels = dict.fromkeys(name.rpartition(".")[0] for name in metrics if "[" not in name)
    return ", ".join(first[label] for label in labels if label in first)


def hide_directories(text: str) -> str:
    """Returns a text to publish: of paths of this machine only the last part, "table:…/rides.csv"."""
    text = re.sub(r"(?<![\w./])/gcs/(?=\w)", "gs://", text)  # a bucket is mounted there
    text = re.sub(r"(?<=/champions)/[^/\s]+", "", text)  # named after the source's path
    text = re.sub(r"^(\w+:)?/(?!/).*/(?=.)", r"\1…/", text)  # a whole path may have spaces
    return re.sub(r"""(?<![\w./*…])(?:file://)?/(?![/\s])(?:[^/\s"',;]+/)*(?=[^/\s])""", "…/", text)


def size(count: float) -> str:
    """Returns a number of bytes with a unit: "664.3 MB"."""
    units = ["TB", "GB", "MB", "kB", "B"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop()
    return f"{count:,.{0 if units[-1] == 'B' else 1}f} {units[-1]}"


def print_rows(rows: Rows, stream: TextIO) -> None:
    """Prints names and values in two columns; on a terminal the names are bold, and long values wrapped.

    No path or checksum is broken: they can be copied. A value without a name is a command, which can be
    pasted where it is wrapped, too. A path below the current directory is shown relative to it.
    """
    here = re.compile(rf"(?<!\S){re.escape(str(Path.cwd()))}/")
    lines = [(name, here.sub("", value)) for name, value in rows]
    print(file=stream)
    if not stream.isatty():
        print(facts(lines), file=stream, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    console, width = Console(file=stream, highlight=False), max(len(name) for name, _ in rows)
    for name, value in lines:
        shown = wrap(value, console.width - width - 2, " " * (width + 2), end="" if name else " \\")
        console.print(Text.assemble((name.ljust(width), "bold"), "  ", shown), soft_wrap=True)


def wrap(text: str, columns: int, indent: str, end: str = "") -> str:
    """Returns text in lines of `columns`, words unbroken; before a line break is `end`, after it `indent`."""
    if end:  # a command: its quoted words are not broken
        text = " ".join(shlex.quote(word).replace(" ", "\0") for word in shlex.split(text))
    lines = textwrap.wrap(text, max(20, columns - len(end)), break_long_words=False, break_on_hyphens=False)
    return f"{end}\n{indent}".join(lines).replace("\0", " ")


def fitted(text: str, stream: TextIO) -> str:
    """Returns text in lines for a terminal, words unbroken; for any other stream unchanged."""
    return wrap(text, shutil.get_terminal_size().columns - 8, "    ") if stream.isatty() else text


def timestamp(time: datetime.datetime) -> str:
    """Returns a time in UTC, RFC 3339: "2027-01-31T09:15:00Z"."""
    return time.astimezone(datetime.UTC).isoformat().replace("+00:00", "Z")


def duration(seconds: float | None) -> str:
    """Returns a duration for people: "48 s", "3 min 20 s", "2 h 05 min"; "" for None."""
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
