"""The guard that keeps tests on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest

HEAD = "import contextlib, socket, subprocess, sys, urllib.request\n\n\ndef test_it():\n    "


def run(directory: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on one test, under a copy of the guard."""
    shutil.copy(conftest.__file__, directory / "conftest.py")
    (directory / "test_it.py").write_text(HEAD + body + "\n")
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(directory)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


# 192.0.2.1 and its neighbours are documentation's own: nobody has them.
@pytest.mark.parametrize(
    "body",
    [
        "socket.create_connection(('192.0.2.1', 80), 1)",
        "with contextlib.suppress(OSError): socket.create_connection(('192.0.2.1', 80), 1)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 53))",
    ],
)
def test_reaching_another_machine_fails_the_test(tmp_path: Path, body: str) -> None:
    done = run(tmp_path, body)
    assert done.returncode == 1
    assert "the test has tried to reach 192.0.2.1" in done.stdout


@pytest.mark.parametrize(
    "body",
    [
        "assert socket.create_server(('127.0.0.1', 0)).close() is None",
        "s = socket.create_server(('localhost', 0)); socket.create_connection(s.getsockname()).close()",
        "a, b = socket.socketpair(); a.send(b'x')",
    ],
)
def test_this_machine_may_be_reached(tmp_path: Path, body: str) -> None:
    done = run(tmp_path, body)
    assert done.returncode == 0, done.stdout


def test_a_child_asks_a_proxy_that_is_not_there(tmp_path: Path) -> None:
    program = "import urllib.request; urllib.request.urlopen('https://192.0.2.1', timeout=5)"
    done = run(
        tmp_path,
        f"done = subprocess.run([sys.executable, '-c', {program!r}], capture_output=True, text=True)\n"
        "    assert 'Connection refused' in done.stderr",
    )
    assert done.returncode == 0, done.stdout
