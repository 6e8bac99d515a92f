"""Settings of a custom job that a person writes in Python, for a pipeline of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shardline.components as components
from shardline.components import Cluster, CustomJobSettings, WorkerPool
from shardline.trainer.base.errors import SettingsError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WorkerPool(machine_type="n1", replica_count="2"), "replica_count must be a whole number"),
        (
            lambda: Cluster.of(WorkerPool(machine_type="n1", replica_count=0)),
            "replica_count must be at least 1",
        ),
        (lambda: CustomJobSettings(cluster=WorkerPool(machine_type="n1")), "a Cluster, such as Cluster.of"),
    ],
)
def test_a_wrong_value_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make()


def test_an_editor_completes_the_components() -> None:
    assert {"export_validate", "preprocess", "CustomJobSettings", "with_image"} <= {*dir(components)}
