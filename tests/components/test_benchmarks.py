"""The benchmark runs: its numbers mean nothing here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

REPOSITORY = Path(__file__).parents[2]


def test_without_a_gpu_the_gpu_benchmark_says_so_and_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # and nvidia-smi is nowhere
    gpu.main([str(tmp_path / "work")])
    assert "there is no NVIDIA GPU on this machine" in capsys.readouterr().out
    assert not (tmp_path / "work").exists()


def test_the_gpu_benchmark_reads_what_the_trainer_writes() -> None:
    log = "train: device: 1 GPU, Tesla T4\ntrain: m on one process: global batch 64 = 1 x 64; 10 steps"
    history = "epoch,loss,examples,seconds\n1,2.0,640,60.0\n2,1.0,640,1.5\n3,0.5,640,0.5\n"
    row = gpu.read("ResNet50", log, history)
    assert str(row) == "| ResNet50 | 1 GPU, Tesla T4 | 640 | 100.0 | below 10% |"
    assert gpu.read("ResNet50", f"{log}\ntrain: steps waited for input 42% of", history).waited == "42%"


def test_the_listing_benchmark_counts_requests() -> None:
    options = "--names 2500 --folders 3 --latency 0"
    command = [sys.executable, "-m", "benchmarks.listing", *options.split()]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ")[:2] for line in done.stdout.splitlines()[-3:]]
    assert rows == [["| fingerprint", "3"], ["| images", "4"], ["| preprocess", "2,504"]]


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


def test_the_benchmark_of_the_plan_computes_a_hundred_million(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.plan", "1000", "3000", "--workdir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [line.split(" |")[0] for line in done.stdout.splitlines()[2:]] == [
        "| 1,000", "| 3,000", "| 100,000,000 (computed)",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []
