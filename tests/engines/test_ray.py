"""Ray: its workers are killed, and what they leave is what no interruption leaves.

Its cluster starts where SHARDLINE_TEST_ENGINES is a Python that has Ray and Shardline (`make engines`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import keras
import psutil
import pytest

from examples.ray.train import train
from tests.helpers import ray_workers, replicas
from tests.helpers.preprocessing import contents, run

PYTHON = os.environ.get("SHARDLINE_TEST_ENGINES", "")
pytestmark = pytest.mark.timeout(300)
TRAIN = """
import json, sys
from examples.ray.train import train
print(train(json.loads(sys.argv[1])))
"""


def training(directory: Path, name: str) -> dict[str, Any]:
    return {
        "dataset": str(directory / "digits"),
        "epochs": 4,
        "learning_rate": 0.01,
        "checkpoints": str(directory / name),
        "checkpoint_steps": 10,
        "model": str(directory / f"{name}.keras"),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preprocesses and trains with examples/ray, once for all tests, and ends Ray."""
    if not PYTHON:
        pytest.skip("SHARDLINE_TEST_ENGINES names no Python with Ray")
    directory = tmp_path_factory.mktemp("ray")
    run("digits", directory / "alone")
    config = training(directory, "killed")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in config.items() if name != "dataset"]
    (directory / "train.json").write_text(json.dumps([config["dataset"], *options]))
    (directory / "preprocess.json").write_text(
        json.dumps(["digits", config["dataset"], f"--parts={ray_workers.PARTS}"])
    )
    # Sockets have names of at most 107 bytes, so Ray cannot be in a directory of pytest.
    temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    variables = {
        "PYTHONPATH": str(replicas.ROOT),
        "RAY_TEST_DIR": str(directory),
        "RAY_TMPDIR": temporary,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # else Ray writes a token to the home directory
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    with (directory / "log").open("wb") as log:
        driver = subprocess.Popen(
            [PYTHON, "-m", "tests.helpers.ray_workers"],
            env=os.environ | variables,
            cwd=replicas.ROOT,
            stdout=log,
            stderr=log,
        )
        try:
            code = driver.wait(150)
        finally:
            started = psutil.Process(driver.pid).children(recursive=True) if driver.poll() is None else []
            driver.kill()
            for process in started:
                process.kill()
            psutil.wait_procs(started, timeout=10)
            shutil.rmtree(temporary, ignore_errors=True)
    assert code == 0, (directory / "log").read_text(errors="replace")[-5000:]
    return directory


def test_parts_that_are_killed_give_the_bytes_of_one_process(directory: Path) -> None:
    assert all((directory / f"killed-part-{part}").exists() for part in ray_workers.KILLED_PARTS)
    assert contents(directory / "digits") == contents(directory / "alone")


def test_a_killed_worker_continues_exactly(directory: Path) -> None:
    """Plain processes, with the same TF_CONFIG as Ray's, train without an interruption."""
    config = training(directory, "undisturbed")
    first, _ = replicas.run(["-c", TRAIN, json.dumps(config)], 2, chief=False)
    assert [0, 0] < json.loads((directory / "resumed").read_text()) <= list(ray_workers.KILLED_AFTER)
    assert first.splitlines()[-1] in (directory / "log").read_text(errors="replace")  # the same history
    undisturbed, killed = (
        keras.saving.load_model(directory / f"{name}.keras", compile=False).get_weights()
        for name in ("undisturbed", "killed")
    )
    for expected, found in zip(undisturbed, killed, strict=True):
        assert found.tobytes() == expected.tobytes()


def test_a_mistake_is_returned_for_ray_would_only_repeat_it(tmp_path: Path) -> None:
    config = training(tmp_path, "mistaken")
    assert str(tmp_path / "digits") in train(config)
