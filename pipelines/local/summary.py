"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

Rows = Sequence[tuple[str, str]]


def show(rows: Rows, stream: TextIO) -> None:
    """Prints names and values in two columns, the names in bold on a terminal.

    Values are never folded, since a path or a checksum must stay whole to be copied; a path below the
    current directory is shown from there.
    """
    width = max(len(name) for name, _ in rows)
    lines = [(name.ljust(width), value.removeprefix(f"{Path.cwd()}/")) for name, value in rows]
    print(file=stream)
    if not stream.isatty():
        for name, value in lines:
            print(f"{name}  {value}", file=stream, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for name, value in lines:
        console.print(Text.assemble((name, "bold"), "  ", value), soft_wrap=True)


def duration(seconds: float) -> str:
    """Returns a duration as a person says it: "48 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
