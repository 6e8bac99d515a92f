"""Import strings: what is found, and what is said when nothing is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.trainer import plugins
from shardline.trainer.errors import ModelError, SourceError


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_of_the_working_directory_can_be_imported(working_directory: Path) -> None:
    (working_directory / "my_model.py").write_text("def build_model():\n    return 'built'\n")
    assert plugins.load("my_model:build_model", "model")() == "built"


def test_a_folder_without_init_is_a_package(working_directory: Path) -> None:
    (working_directory / "mine").mkdir()
    (working_directory / "mine" / "source.py").write_text("class Shapes: ...\n")
    assert plugins.load("mine.source:Shapes", "source", SourceError).__name__ == "Shapes"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        pytest.param(
            "mnist_cmm",
            "unknown model 'mnist_cmm': not an import string such as pkg.module:name; "
            "known: mnist_cnn, resnet50",
            id="no colon",
        ),
        pytest.param(
            "my_modle:build",
            "unknown model 'my_modle:build': no module 'my_modle', the working directory has my_model, "
            "other; known: mnist_cnn, resnet50",
            id="no such module",
        ),
        pytest.param(
            "mine.modle:build",
            "unknown model 'mine.modle:build': no module 'mine.modle', mine has model; "
            "known: mnist_cnn, resnet50",
            id="no such module in a package",
        ),
        pytest.param(
            "my_model:build",
            "unknown model 'my_model:build': my_model has no 'build', it has build_model, Settings",
            id="no such name, imported names are not offered",
        ),
        pytest.param(
            "other:x",
            "unknown model 'other:x': other has no 'x', it has nothing public",
            id="an empty module",
        ),
    ],
)
def test_what_does_not_exist(working_directory: Path, reference: str, message: str) -> None:
    (working_directory / "my_model.py").write_text(
        "from pathlib import Path\ndef build_model(): ...\ndef _helper(): ...\nclass Settings: ...\n"
    )
    (working_directory / "other.py").touch()
    (working_directory / "mine").mkdir()
    (working_directory / "mine" / "model.py").touch()
    with pytest.raises(ModelError) as caught:
        plugins.load(reference, "model", known=("mnist_cnn", "resnet50"))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param("import no_such_library", "No module named 'no_such_library'", id="missing library"),
        pytest.param("x = 1 +", r"SyntaxError: invalid syntax \(broken.py, line 1\)$", id="syntax error"),
        pytest.param("\n1 / 0", r"ZeroDivisionError: division by zero \(broken.py, line 2\)", id="any error"),
    ],
)
def test_a_module_that_fails(working_directory: Path, source: str, reason: str) -> None:
    (working_directory / "broken.py").write_text(source)
    with pytest.raises(SourceError, match=f"source 'broken:x': importing broken failed: .*{reason}"):
        plugins.load("broken:x", "source", SourceError)
