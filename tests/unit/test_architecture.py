"""docs/architecture.md names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:trainer|components|pipelines)/[\w/.]*)`", PAGE)))
)
def test_a_file_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).exists()
