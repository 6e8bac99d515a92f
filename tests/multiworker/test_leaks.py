"""What a call of `fit` or `evaluate` has held is free again after it: memory, threads, sockets, data."""

from __future__ import annotations

import json

import pytest

from tests.helpers import replicas

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("count", "megabytes", "devices"), [(1, 80, 2), (2, 8, 1)], ids=["mirrored", "workers"]
)
def test_calls_hold_nothing_afterwards(count: int, megabytes: int, devices: int) -> None:
    """Arrays of 80 MB on two devices of a process, whose iterators TensorFlow would keep; and two workers."""
    for output in replicas.run(["-m", "tests.helpers.leaks", str(megabytes), str(devices)], count):
        first, *_, last = json.loads(output.splitlines()[-1])

        assert last["megabytes"] - first["megabytes"] < 100
        assert last["threads"] - first["threads"] < 5
        assert last["sockets"] - first["sockets"] < 3
        assert last["data"] == 0
