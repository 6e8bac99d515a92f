"""Messages that the documentation quotes are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.helpers.markdown import ROOT, parsed

PAGE = ROOT / "docs" / "troubleshooting.md"
#: What changes from case to case, in the documentation as in what is read from the code.
HOLE = "…"


@cache
def code_texts() -> str:
    """Returns all texts in the code, one in a line, with a hole for what is filled in."""
    files = [file for ring in ("trainer", "components", "pipelines") for file in (ROOT / ring).rglob("*.py")]
    return "\n".join(text for file in files for text in _texts(ast.parse(file.read_text())))


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else HOLE for part in node.values]
            yield re.sub(f"{HOLE}+", HOLE, "".join(map(str, parts)))


def messages() -> list[str]:
    """Returns the messages in the first column of the page's tables."""
    tokens = parsed(PAGE)
    cells = [
        tokens[index + 2]
        for index, token in enumerate(tokens)
        if token.type == "tr_open" and tokens[index + 1].type == "td_open"
    ]
    codes = [child.content for cell in cells for child in cell.children or () if child.type == "code_inline"]
    return [code for code in codes if " " in code]


@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    assert message.removesuffix(HOLE).strip() in code_texts()


def test_messages_are_found() -> None:
    assert len(messages()) > 40
    assert "no such words are in the code, nor … here" not in code_texts()
