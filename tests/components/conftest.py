"""What tests of components share."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.components.validate.export import signatures as golden
from shardline.components.validate.export.signatures import CleanProcess
from shardline.trainer.base import progress
from tests.helpers import programs
from tests.helpers.exports import export_small_model
from tests.helpers.jobs import eventually, marked


@pytest.fixture
def events() -> Iterator[list[progress.Event]]:
    """Collects what is reported."""
    collected: list[progress.Event] = []
    with progress.sink(collected.append):
        yield collected


@pytest.fixture
def no_orphans(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Fails the test when a process that it has started, however indirectly, is left; yields their mark."""
    mark = f"{os.getpid()}-{monkeypatch!r}"
    monkeypatch.setenv("TEST_MARK", mark)
    yield mark
    eventually(lambda: not marked(mark), 5)


@pytest.fixture(scope="session")
def forks() -> None:
    """The process from which programs are forked: not one of a test whose own must end."""
    programs.run([sys.executable, "-c", ""])


@pytest.fixture
def source_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file in the working directory in which a test writes a source of its own, as module `mine`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)


@pytest.fixture(scope="session")
def clean_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CleanProcess]:
    """A process without Shardline; TensorFlow's import is dear, so that tests share one."""
    with pytest.MonkeyPatch.context() as patch:  # a command that asks first has a directory of its own
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.getbasetemp()))
        process = CleanProcess()
    with process:
        yield process


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with random weights and its golden examples."""
    return export_small_model(tmp_path_factory.mktemp("exported"))


@pytest.fixture(autouse=True)
def validations_share_a_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations in a test's own process ask the shared clean one."""
    shared = contextlib.nullcontext
    monkeypatch.setattr(golden, "CleanProcess", lambda: shared(request.getfixturevalue("clean_process")))
