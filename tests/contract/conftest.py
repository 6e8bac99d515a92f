"""A fake Vertex AI for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.fake.vertex import FakeVertex, fake_vertex


@pytest.fixture
def vertex(tmp_path: Path) -> Iterator[FakeVertex]:
    with fake_vertex(tmp_path) as fake:
        yield fake
        # google-auth asks for the account's regional boundary in the background, and does without it.
        assert set(fake.refused) <= {"CONNECT iamcredentials.googleapis.com:443"}
