"""Beam: examples/beam on its own runner gives the bytes of one process, whatever became of its workers.

Runs where SHARDLINE_TEST_ENGINES is a Python that has Beam and Shardline (`make engines`).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers import replicas
from tests.helpers.preprocessing import contents, run

PYTHON = os.environ.get("SHARDLINE_TEST_ENGINES", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="SHARDLINE_TEST_ENGINES names no Python with Beam"),
    pytest.mark.timeout(120),
]
# DirectRunner would look for Prism, a program to download.
RUNNER = "--runner=apache_beam.runners.portability.fn_api_runner.FnApiRunner"
EXAMPLE = 'import runpy; runpy.run_path("examples/beam/preprocess.py", run_name="__main__")'
FAILING = f"""
from shardline.components.preprocess.write.shard_writer import ShardFile
close, closed = ShardFile.__exit__, []
def fail(self, *given):
    closed.append(self)
    if len(closed) == 3:
        raise RuntimeError("the third shard is not complete")
    close(self, *given)
ShardFile.__exit__ = fail
{EXAMPLE}
"""
TWICE = f"""
import apache_beam as beam
create = beam.Create
beam.Create = lambda parts: create([*parts, *parts])
{EXAMPLE}
"""


def start(program: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-c", program, "digits", out, "--parts=4", RUNNER, *options],
        env=os.environ | {"PYTHONPATH": str(replicas.ROOT)},
        cwd=replicas.ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("beam") / "alone"
    run("digits", out)
    return out


def test_a_part_that_fails_is_written_by_the_next_run(tmp_path: Path, alone: Path) -> None:
    """This runner of Beam does not retry: the pipeline fails, and the same command continues."""
    failed = start(FAILING, tmp_path / "out")
    assert failed.returncode != 0
    assert "the third shard is not complete" in failed.stderr
    again = start(EXAMPLE, tmp_path / "out")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "shards already done" in again.stdout
    assert contents(tmp_path / "out") == contents(alone)


def test_two_workers_each_part_twice(tmp_path: Path, alone: Path) -> None:
    """As of a runner that starts a part again although its first worker still lives."""
    done = start(TWICE, tmp_path / "out", "--direct_running_mode=multi_processing", "--direct_num_workers=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert contents(tmp_path / "out") == contents(alone)
