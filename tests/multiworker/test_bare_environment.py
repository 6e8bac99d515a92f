"""The commands in an environment as bare and odd as some users have: a proxy, neither HOME nor a locale."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.replicas import ROOT

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(300)]

_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")

#: Fits; its own downloads still take the proxy.
_PROGRAM = """
import os, urllib.request
import keras, numpy as np
import shardline

def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

x = np.linspace(0, 1, 64, dtype="float32").reshape(16, 4)
history = shardline.fit(build, (x, x[:, :1]), batch_size=8, epochs=2, verbose=0, checkpoint_dir="ä b")
replicas = history.model.distribute_strategy.num_replicas_in_sync
print("replicas", replicas, "proxied", not urllib.request.proxy_bypass("127.0.0.1:80"), "\\u00e4")
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Environment without HOME, with an ASCII locale and with proxies that do not answer."""
    temporary = tmp_path / "tmp ü"
    temporary.mkdir()
    proxies = {name: "http://127.0.0.1:9" for each in _PROXIES for name in (each, each.upper())}
    return {
        "PATH": os.environ["PATH"],
        "LC_ALL": "C",
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        **proxies,
    }


def test_every_command_works_in_a_bare_environment(tmp_path: Path, environ: dict[str, str]) -> None:
    directory = tmp_path / "ein Verzeichnis für uns"
    directory.mkdir()
    (directory / "program.py").write_text(_PROGRAM, encoding="utf-8")

    def shardline(*arguments: object) -> str:
        command = [sys.executable, "-c", "from shardline.pipelines.cli.main import main; main()"]
        done = subprocess.run(
            [*command, *map(str, arguments)],
            env=environ,
            cwd=directory,
            umask=0o077,
            capture_output=True,
            encoding="utf-8",
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shardline("preprocess", "digits", "out/digits", "--processes", 2)
    shardline("compile", "--settings", ROOT / "settings" / "local.toml", "--output", "pipeline.yaml")
    shardline("check", "pipeline.yaml")
    out = shardline("launch", 2, "--logs", "logs", "--", "program.py")

    assert out.count("replicas 2 proxied True ä") == 2
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (directory / "out").rglob("*")}
    assert modes == {0}  # what the user's umask asks for
    assert not list(Path(environ["TMPDIR"]).iterdir())
