"""Ray: workers of the program of docs/clusters.md are killed, and it leaves what no interruption leaves.

Its cluster starts where SHARDLINE_TEST_ENGINES is a Python that has Ray and Shardline (`make engines`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.helpers import ray_workers, replicas
from tests.helpers.markdown import blocks
from tests.helpers.preprocessing import contents, run

PYTHON = os.environ.get("SHARDLINE_TEST_ENGINES", "")
pytestmark = pytest.mark.timeout(300)
MODEL = """
import keras

def build_model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Flatten(), keras.layers.Dropout(0.1), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
TRAIN = f"""
import sys
import shardline
{MODEL}
print(shardline.fit(build_model, sys.argv[1], epochs=5, deterministic=True, verbose=0).history)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the program once for all tests, and ends Ray."""
    if not PYTHON:
        pytest.skip("SHARDLINE_TEST_ENGINES names no Python with Ray")
    directory = tmp_path_factory.mktemp("ray")
    (text,) = [
        block for block in blocks(replicas.ROOT / "docs/clusters.md", "python") if "import ray" in block
    ]
    (directory / "program.py").write_text(text.replace("/shared", str(directory)))
    (directory / "my_model.py").write_text(MODEL)
    # Sockets have names of at most 107 bytes, so Ray cannot be in a directory of pytest.
    temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    variables = {
        "PYTHONPATH": f"{replicas.ROOT}:{directory}",
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
            code = driver.wait(240)
        finally:
            started = psutil.Process(driver.pid).children(recursive=True) if driver.poll() is None else []
            driver.kill()
            driver.wait()
            for process in started:
                process.kill()
            psutil.wait_procs(started, timeout=10)
            shutil.rmtree(temporary, ignore_errors=True)
    assert code == 0, (directory / "log").read_text(errors="replace")[-5000:]
    return directory


def test_parts_that_are_killed_give_the_bytes_of_one_process(directory: Path) -> None:
    assert all((directory / f"killed-part-{part}").exists() for part in ray_workers.KILLED_PARTS)
    run("digits", directory / "alone")
    assert contents(directory / "digits") == contents(directory / "alone")


def test_a_killed_worker_continues_exactly(directory: Path) -> None:
    """Plain processes, with the same TF_CONFIG as Ray's, train without an interruption."""
    first, _ = replicas.run(["-c", TRAIN, str(directory / "digits")], 2, chief=False)
    assert [0, 0] < json.loads((directory / "resumed").read_text()) <= list(ray_workers.KILLED_AFTER)
    assert first.splitlines()[-1] in (directory / "log").read_text(errors="replace")  # the same history
