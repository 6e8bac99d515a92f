"""Functions of components, called as KFP's users test theirs: a wrong value ends them with one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from shardline.components import detect_changes, exit_handler, preprocess, write_shards
from shardline.trainer.base.errors import EXIT_BAD_INPUT


def test_without_a_pipeline_there_are_no_placeholders() -> None:
    changes = detect_changes.python_func(source="digits", model_function="mnist_cnn")

    assert (changes.changed, changes.source) == (True, "digits")


def _preprocess(directory: str) -> None:
    outputs = {
        "dataset": dsl.Dataset(uri=directory),
        "metrics": dsl.Metrics(),
        "card": dsl.HTML(uri=directory),
    }
    preprocess.python_func(**outputs, source="digits", options={1: 2})


def _exit_handler(directory: str) -> None:
    status = dsl.PipelineTaskFinalStatus("SUCCEEDED", "run", "task", None, None)
    exit_handler.python_func(status=status, notify_when="sometimes")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_preprocess, "preprocess: error: unknown key options.1; the nearest are "),
        (
            lambda directory: write_shards.python_func(planned=dsl.Dataset(uri=directory), part="first"),
            "preprocess: error: part must be an output of plan_shards, such as 0/3, got 'first'",
        ),
        (
            _exit_handler,
            "exit-handler: error: notify.when must be 'failure', 'always' or 'never', got 'sometimes'",
        ),
    ],
)
def test_a_wrong_value_ends_with_one_line(
    call: Callable[[str], Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        call(str(tmp_path / "data"))

    assert end.value.code == EXIT_BAD_INPUT
    assert message in "".join(capfd.readouterr())
