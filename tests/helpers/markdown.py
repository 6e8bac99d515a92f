"""What the documentation says: its commands, links and headings."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
_FIRST = ("README.md", "CONTRIBUTING.md", "AGENTS.md")
PAGES = [*(ROOT / name for name in _FIRST), *sorted((ROOT / "docs").glob("*.md"))]

#: Stands before a block of commands that speak to the platform. They are parsed, and those that have
#: --dry-run are run with it.
NEEDS_PLATFORM = "<!-- needs Google Cloud -->"

#: Stands on the line before a block of sample output, which docs/outputs.py writes.
OUTPUT = re.compile(r"^ *<!-- output: (.+) -->\n", re.MULTILINE)

_COMMAND = re.compile(r"(shardline|make|python -m) ")


@dataclass(frozen=True)
class Command:
    """One command line of the documentation.

    Attributes:
        page: The file.
        line: Its line there, from 1.
        words: The program and its arguments.
        whole: Whether it stands in a block, to be typed as it is; else its arguments may be left out.
        marked: Whether `NEEDS_PLATFORM` stands before its block.
    """

    page: Path
    line: int
    words: tuple[str, ...]
    whole: bool
    marked: bool = False

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}: {shlex.join(self.words)}"


def commands() -> list[Command]:
    """Returns the commands of all pages."""
    return [command for page in PAGES for command in _commands(page)]


def _commands(page: Path) -> Iterator[Command]:
    tokens = parsed(page)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type in ("code_block", "fence") and token.info in ("", "sh", "console"):
            marked = before is not None and before.content.strip() == NEEDS_PLATFORM
            yield from _of_block(page, token, marked=marked)
        for code in token.children or ():
            if code.type == "code_inline" and _COMMAND.match(code.content):
                yield Command(page, _line(token), tuple(shlex.split(code.content)), whole=False)


def output_commands() -> Iterator[Command]:
    """Yields the commands of ours in the comments before sample output."""
    for page in PAGES:
        for token in parsed(page):
            output = OUTPUT.match(token.content) if token.type == "html_block" else None
            typed = re.sub(r"\d?>(&\d| ?\S+)", "", output[1]) if output else ""
            for part in re.split(r"&&|[|;]", typed):
                if _COMMAND.match(part.strip()):
                    yield Command(page, _line(token), tuple(shlex.split(part)), whole=True)


def message_commands() -> Iterator[Command]:
    """Yields the commands of ours in the product's messages and, not as whole ones, in its docstrings.

    What a message inserts is 1.
    """
    for file in (
        file for ring in ("trainer", "components", "pipelines") for file in (ROOT / ring).rglob("*.py")
    ):
        if "'shardline " not in (text := file.read_text(encoding="utf-8")):
            continue
        for parent in ast.walk(ast.parse(text)):
            for node in () if isinstance(parent, ast.JoinedStr) else ast.iter_child_nodes(parent):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                said = "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in parts)
                for found in re.findall(r"'(shardline [a-z][^']*)'", said):
                    whole = not isinstance(parent, ast.Expr)
                    yield Command(file, getattr(node, "lineno", 0), tuple(shlex.split(found)), whole)


def _of_block(page: Path, token: Token, *, marked: bool) -> Iterator[Command]:
    text = token.content.replace("\\\n", "  ")  # a command that goes on in the next line
    for number, line in enumerate(text.splitlines()):
        if _COMMAND.match(line):
            words = tuple(shlex.split(line, comments=True))
            yield Command(page, _line(token) + number, words, whole=True, marked=marked)


def _line(token: Token) -> int:
    return token.map[0] + 1 if token.map else 0


def parsed(page: Path) -> list[Token]:
    """Returns a page's tokens, in order."""
    return MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path, kind: str) -> list[str]:
    """Returns the blocks of a kind: the info of a fence; "sh" also for indented blocks, which are to type."""
    return [
        token.content
        for token in parsed(page)
        if (token.type, token.info) in {("fence", kind), *([("code_block", "")] if kind == "sh" else [])}
    ]


def shown_files() -> Iterator[tuple[str, str]]:
    """Yields name and text of the files that the pages show in full, below a comment with the name."""
    for page in PAGES:
        for before, token in pairwise(parsed(page)):
            name = re.fullmatch(r"<!-- file: (\S+) -->", before.content.strip())
            if token.type == "fence" and name:
                yield name[1], token.content


def own_pipeline_cells() -> list[str]:
    """Returns the code cells of the notebook of one's own pipeline, in order."""
    notebook = json.loads((ROOT / "examples" / "own_pipeline.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def links(page: Path) -> list[str]:
    """Returns where a page's links and images point to."""
    return [
        str(child.attrs.get("href") or child.attrs.get("src"))
        for token in parsed(page)
        for child in token.children or ()
        if child.type in ("link_open", "image")
    ]


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and the site make them."""
    tokens = parsed(page)
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-") for title in titles}
