"""Preprocessing as Kubeflow components: in one task, or in many with the same bytes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from shardline.components.preprocess import component
from shardline.trainer import manifest as manifests
from shardline.trainer.base import progress
from shardline.trainer.base.errors import ShardlineError
from tests.helpers.preprocessing import contents, run, write_images


def _artifacts(directory: Path) -> tuple[dsl.Dataset, dsl.Metrics, dsl.HTML]:
    return (
        dsl.Dataset(uri=str(directory / "dataset")),
        dsl.Metrics(uri=str(directory / "metrics")),
        dsl.HTML(uri=str(directory / "card")),
    )


def _check(dataset: dsl.Dataset, metrics: dsl.Metrics, card: dsl.HTML) -> None:
    manifest = manifests.load(Path(dataset.path))
    records = {f"{name}_records": split.records for name, split in manifest.splits.items()}
    known = {"fingerprint": manifest.fingerprint, "labels": f"class of {len(manifest.class_names)}"}
    assert dataset.metadata == known | records
    assert metrics.metadata == records | {"rejected": 0, "duplicates": 0}
    assert Path(card.path).name == "card.html"
    assert manifest.fingerprint in Path(card.path).read_text()


def test_the_component(tmp_path: Path) -> None:
    artifacts = _artifacts(tmp_path)
    component.preprocess(*artifacts, source="digits", readers=2, options={"shards": 8.0})
    _check(*artifacts)
    # A task that is tried again finds the whole dataset of the first try.
    component.preprocess(*artifacts, source="digits", readers=2, options={"shards": 8.0})
    run("digits", tmp_path / "command", readers=2)
    assert contents(tmp_path / "dataset") == contents(tmp_path / "command")


@pytest.mark.parametrize("tasks", [1, 3, pytest.param(100, marks=pytest.mark.matrix)])
def test_many_tasks_write_the_same_bytes(tmp_path: Path, tasks: int) -> None:
    images = write_images(tmp_path / "images", each=60)
    planned = dsl.Dataset(uri=str(tmp_path / "shared"))
    parts = component.plan_shards(planned, tasks, f"images:{images}", options={"shards": 4})
    count = min(tasks, 6)
    assert parts == [f"{number}/{count}" for number in range(count)]
    for part in reversed(parts):
        component.write_shards(planned, part)
    artifacts = _artifacts(tmp_path)
    component.finish_dataset(planned, *artifacts)
    assert artifacts[0].uri == planned.uri
    _check(*artifacts)
    run(f"images:{images}", tmp_path / "one", shards=4)
    assert contents(tmp_path / "shared") == contents(tmp_path / "one")


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (component.preprocess, {"source": "digit"}, "unknown source 'digit'"),
        (
            component.plan_shards,
            {"options": {"shard": 3}},
            "did you mean options.shards?",
        ),
    ],
)
def test_the_component_ends_with_one_line(
    tmp_path: Path, events: list[progress.Event], function: Any, changes: dict[str, Any], message: str
) -> None:
    dataset, metrics, card = _artifacts(tmp_path)
    arguments = (dataset, metrics, card) if function is component.preprocess else (dataset, 2)
    with pytest.raises(SystemExit) as ended:
        function(*arguments, **{"source": "digits"} | changes)
    assert ended.value.code == ShardlineError.exit_code
    assert [(event.kind, event.topic) for event in events] == [("error", "preprocess")]
    assert message in events[0].text
    assert not (tmp_path / "dataset").exists()


@pytest.mark.parametrize(
    "function",
    [component.preprocess, component.plan_shards, component.write_shards, component.finish_dataset],
    ids=lambda function: function.__name__,
)
def test_the_component_is_self_contained(function: Callable[..., Any]) -> None:
    """KFP carries the text of the function into the container, and nothing around it."""
    namespace: dict[str, Any] = {"dsl": dsl}
    exec(inspect.getsource(function), namespace)
    names = set(namespace[function.__name__].__code__.co_names)
    assert "shardline.components.preprocess.component" in names
    # The module, and what is imported from it.
    assert len(names - {"dict", "locals"}) == 2
