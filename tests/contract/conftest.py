"""A fake Vertex AI for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.contract.fake.vertex import FakeVertex, fake_vertex


@pytest.fixture
def vertex(tmp_path: Path) -> Iterator[FakeVertex]:
    with fake_vertex(tmp_path) as fake:
        yield fake
        assert fake.refused == []


@pytest.fixture
def vertex_environ(vertex: FakeVertex, monkeypatch: pytest.MonkeyPatch) -> FakeVertex:
    """The fake, in the environment of the test's own process: clients find it there."""
    enter(vertex.environment, monkeypatch)
    return vertex


def enter(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a fake's environment that of this process."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
