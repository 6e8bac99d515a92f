"""Tables and amounts as a person reads them at a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns lines of aligned columns: the first to the left, numbers (all others) to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return "\n".join(map(line, [head, *rows]))


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Returns lines of names and their values."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def size(count: float) -> str:
    """Returns a number of bytes in the unit that suits it: "664.3 MB"."""
    units = ["TB", "GB", "MB", "kB", "B"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop()
    return f"{count:,.{0 if units[-1] == 'B' else 1}f} {units[-1]}"


def printable(text: str) -> str:
    """Returns a text from the data so that it cannot move the cursor or break the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
