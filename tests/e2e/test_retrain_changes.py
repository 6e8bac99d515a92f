"""Runs of the committed pipeline that remember each other: only what has changed trains."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardline.pipelines import settings
from shardline.pipelines.compile import compile_pipeline

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
SHARDLINE = str(Path(sys.executable).with_name("shardline"))


@pytest.fixture
def photos(tmp_path):
    """Two classes of small photos, and one file that is none."""
    random = np.random.default_rng(seed=0)
    for label, name in enumerate(("dark", "it's bright")):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(30):
            pixels = random.integers(128 * label, 128 * label + 128, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "photos" / "dark" / "none.png").write_text("no image")
    return tmp_path / "photos"


def run(tmp_path, yaml="compiled/retrain.yaml", **params):
    """Runs the pipeline and returns how the command came out, and the record of the run."""
    of_all = {
        "history_uri": tmp_path / "it's history",
        "epochs": 1,
        "rules": json.dumps(["baseline: off"]),  # which four test examples cannot pass
        "preprocess_tasks": 2,
    }
    given = [part for pair in {**of_all, **params}.items() for part in ("--param", "{}={}".format(*pair))]
    before = set((tmp_path / "runs").glob("*"))
    done = subprocess.run(
        [SHARDLINE, "run", str(yaml), "--runs-dir", str(tmp_path / "runs"), "--require-blessing", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    (directory,) = set((tmp_path / "runs").glob("*-*")) - before
    return done, json.loads((directory / "run.json").read_text())


def test_a_failure_a_training_and_a_run_without_anything_to_do(photos, tmp_path):
    source = f"images:{photos}"
    failed, _ = run(tmp_path, source=source)
    assert failed.returncode == 2, failed.stdout + failed.stderr
    (photos / "dark" / "none.png").unlink()

    trained, _ = run(tmp_path, source=source)

    assert trained.returncode == 0, trained.stdout + trained.stderr
    # The run that failed has left nothing to compare with.
    assert "changes: training: no run is remembered in" in trained.stdout
    latest = json.loads((tmp_path / "it's history" / "latest.json").read_text())
    assert (latest["outcome"], latest["blessed"]) == ("trained", True)

    # The same again, compiled for people who want an e-mail.
    yaml = tmp_path / "email.yaml"
    local = settings.load(ROOT / "settings" / "local.toml")
    notify = replace(local.notify, emails=("team@example.com",))
    yaml.write_text(compile_pipeline(replace(local, notify=notify)))
    unchanged, record = run(tmp_path, yaml, source=source)

    assert unchanged.returncode == 0, unchanged.stdout + unchanged.stderr
    assert record["facts"]["state"] == "unchanged"
    assert record["facts"]["blessed"] is True
    assert "preprocess" not in unchanged.stdout
    assert f"unchanged: data (60 files, {size(photos)}), settings and code are those of {latest['run']}" in (
        unchanged.stdout
    )
    assert "a local run: no e-mail is sent; on Vertex AI team@example.com would get one" in unchanged.stdout


def size(directory):
    total = sum(path.stat().st_size for path in directory.rglob("*.png"))
    return f"{total / 1000:.3g} kB"
