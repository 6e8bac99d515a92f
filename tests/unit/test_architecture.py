"""docs/architecture.md shows the house as it is."""

from __future__ import annotations

import re

import pytest

from tests.helpers.tree import RINGS, ROOT, tree

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_tree_is_the_repositorys() -> None:
    shown = PAGE.partition("## The tree")[2].partition("```\n")[2].partition("\n```")[0]

    assert shown.splitlines() == tree().splitlines(), "python -m tests.helpers.tree prints what belongs there"


@pytest.mark.parametrize("path", sorted(set(re.findall(rf"`((?:{'|'.join(RINGS)})/[\w/.]*)`", PAGE))))
def test_a_file_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).exists()
