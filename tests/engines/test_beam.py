"""Beam: the program of docs/clusters.md gives the bytes of one process.

Runs where SHARDLINE_TEST_ENGINES is a Python that has Beam and Shardline (`make engines`).
"""

import os
import subprocess

import pytest

from tests.helpers.markdown import ROOT, blocks
from tests.helpers.preprocessing import contents, run

PYTHON = os.environ.get("SHARDLINE_TEST_ENGINES", "")


@pytest.mark.skipif(not PYTHON, reason="SHARDLINE_TEST_ENGINES names no Python with Beam")
def test_the_bytes_are_those_of_one_process(tmp_path):
    run("digits", tmp_path / "alone")
    (text,) = [block for block in blocks(ROOT / "docs" / "clusters.md", "python") if "apache_beam" in block]
    # The default would look for Prism, a program to download.
    runner = "beam.Pipeline('apache_beam.runners.portability.fn_api_runner.FnApiRunner')"
    program = text.replace("/shared/digits", str(tmp_path / "out")).replace("beam.Pipeline()", runner)
    done = subprocess.run(
        [PYTHON, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
