"""Plug-ins: import strings that are loaded, and the errors of those that cannot be."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardline.trainer.base import plugins
from shardline.trainer.base.errors import ModelError, SourceError


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


def test_no_module_of_the_working_directory_shadows_the_standard_library(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (working_directory / "tabnanny.py").write_text("check = 'hidden'\n")
    (working_directory / "mine.py").write_text("from tabnanny import check\n")
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    assert callable(plugins.load("mine:check", "model"))


@pytest.mark.parametrize("name", ["build", "Built", "made", "either", "given"])
def test_definitions_are_checked_without_running_the_module(working_directory: Path, name: str) -> None:
    (working_directory / "looked_at.py").write_text(
        "raise SystemExit\nfrom x import given\ndef build(): hidden = 1\nclass Built: ...\nmade = 1\n"
        "try: either = 1\nexcept E: pass\n"
    )
    plugins.check_reference(f"looked_at:{name}", "model")
    with pytest.raises(ModelError, match=r"looked_at has no 'hidden', it has .*build"):
        plugins.check_reference("looked_at:hidden", "model")


def test_a_module_that_is_missing_or_not_python_is_refused(working_directory: Path) -> None:
    (working_directory / "half.py").write_text("def build(:\n")
    (working_directory / "all_of_it.py").write_text("from half import *\n")
    plugins.check_reference("all_of_it:anything", "model")
    plugins.check_reference("shardline.trainer.models.zoo:build_mnist_cnn", "model")
    for reference, message in (
        ("halv:build", r"no module 'halv', the working directory has half"),
        ("shardline.trainer.modles:build", r"no module 'shardline.trainer.modles'"),
        ("half:build", r"half.py is not Python: SyntaxError"),
    ):
        with pytest.raises(ModelError, match=message):
            plugins.check_reference(reference, "model")


def test_a_folder_without_init_is_a_package(working_directory: Path) -> None:
    (working_directory / "mine" / "own").mkdir(parents=True)
    (working_directory / "mine" / "source.py").write_text("class Shapes: ...\n")
    (working_directory / "mine" / "own" / "model.py").write_text("def build(): ...\n")
    plugins.check_reference("mine.own.model:build", "model")
    assert plugins.load("mine.source:Shapes", "source", SourceError).__name__ == "Shapes"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("mnist_cmm", ": not an import string such as pkg.module:name; known: mnist_cnn, resnet50"),
        ("my_modle:build", ": no module 'my_modle', the working directory has my_model, other; known: "),
        ("mine.modle:build", ": no module 'mine.modle', mine has model; known: mnist_cnn, resnet50"),
        # Imported names are not offered.
        ("my_model:build", ": my_model has no 'build', it has build_model, Settings"),
        ("other:x", ": other has no 'x', it has nothing public"),
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
    assert str(caught.value).startswith(f"unknown model {reference!r}{message}")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param("import no_such_library", "No module named 'no_such_library'", id="missing library"),
        pytest.param("x = 1 +", r"SyntaxError: invalid syntax \(broken.py, line 1\)$", id="syntax error"),
        pytest.param("\nimport sys; sys.exit(0)", r"SystemExit: 0 \(broken.py, line 2\)", id="exit"),
        pytest.param("\n1 / 0", r"ZeroDivisionError: division by zero \(broken.py, line 2\)", id="any error"),
    ],
)
def test_a_module_that_fails(working_directory: Path, source: str, reason: str) -> None:
    (working_directory / "broken.py").write_text(source)
    with pytest.raises(SourceError, match=f"source 'broken:x': importing broken failed: .*{reason}"):
        plugins.load("broken:x", "source", SourceError)


def test_a_plug_in_may_shadow_a_package_but_not_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, here = tmp_path / "installed", tmp_path / "here"
    for directory in (installed, here):
        directory.mkdir()
        text = f"name = {directory.name!r}\nfrom common_to_both import other"
        (directory / "plugin_of_both.py").write_text(text)
        (directory / "common_to_both.py").write_text(f"other = {directory.name!r}")
        (directory / "this.py").write_text("s = name = 'not of Python'")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    monkeypatch.chdir(here)
    try:
        assert plugins.load("plugin_of_both:name", "model") == "here"
        assert plugins.load("plugin_of_both:other", "model") == "installed"
        assert plugins.load("this:s", "model") != "not of Python"
    finally:
        for name in ("plugin_of_both", "common_to_both", "this"):
            sys.modules.pop(name, None)


@dataclasses.dataclass
class Sizes:
    layers: tuple[int, ...] = (64, 32)


class Plain:
    def build(self) -> None:
        """Does nothing."""


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: functools.partial(plugins.load, "m", kind=1),
            "shardline.trainer.base.plugins:load('m', kind=1)",
        ),
        (lambda: functools.partial(Plain), f"{__name__}:Plain()"),
        (lambda: Plain(), f"{__name__}:Plain"),
        (lambda: Plain().build, f"{__name__}:Plain.build of {__name__}:Plain"),
        (lambda: [Plain(), None, {"b", "a"}], f"[{__name__}:Plain, None, ['a', 'b']]"),
        (lambda: Sizes(), f"{__name__}:Sizes{{'layers': [64, 32]}}"),
        (lambda: {"b": 1, "a": np.float32(2)}, "{'a': 2.0, 'b': 1}"),
        (lambda: np.arange(3, dtype=np.int8), "int8(3,) ae4b3280e56e2faf"),
        (lambda: "word " * 100, "0a477c9cf25c76e9"),
    ],
)
def test_a_function_and_its_arguments_are_identified_without_an_address(
    make: Callable[[], Any], expected: str
) -> None:
    assert plugins.identify(make()) == expected
