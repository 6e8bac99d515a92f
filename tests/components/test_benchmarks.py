"""The benchmark runs: its numbers mean nothing here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.matrix
def test_the_preprocessing_benchmark_measures_every_target(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.preprocess", "--quick", "--workdir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| ours") == 2
    for target in ("share of the copy", "against tutorial code", "against TFDS", "against our own 1"):
        assert target in done.stdout
    assert "Start-up: a whole `shardline preprocess` process over 100 photos takes " in done.stdout
    assert list(tmp_path.iterdir()) == []
