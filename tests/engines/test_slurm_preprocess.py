"""The array of docs/clusters.md on a real Slurm writes the files of one process, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardline.components.preprocess.run import preprocess
from shardline.components.preprocess.settings import PreprocessSettings
from tests.helpers.jobs import eventually
from tests.helpers.markdown import blocks
from tests.helpers.preprocessing import contents
from tests.helpers.replicas import ROOT
from tests.helpers.slurm import Slurm

pytestmark = pytest.mark.timeout(240)


def test_an_array_with_a_lost_element_is_submitted_again(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "eight"
    script, commands = (
        text.replace("/shared/digits", str(out))
        for text in blocks(ROOT / "docs" / "clusters.md", "bash")
        if "/shared/digits" in text
    )
    write = tmp_path / "write.sh"
    write.write_text(script.replace("exec", '[ "$SLURM_ARRAY_TASK_ID" = 4 ] && exit 1\nexec'))

    def submit() -> str:
        """Returns the id of the job that finishes."""
        done = subprocess.run(["bash", "-ec", commands], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    job = submit()
    eventually(lambda: slurm.job(job)["Reason"] == "DependencyNeverSatisfied", seconds=100)
    slurm.reset()
    assert not (out / "manifest.json").exists()
    write.write_text(script)
    assert slurm.wait(submit(), 100) == "COMPLETED"
    preprocess(PreprocessSettings(source="digits", processes=1), tmp_path / "one")
    assert contents(out) == contents(tmp_path / "one")
