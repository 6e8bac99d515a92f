"""The guard that keeps tests on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests import conftest

HEAD = "import contextlib, socket, subprocess, sys, urllib.request\n"


def run(directory: Path, *bodies: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on tests, test_0 and so on, under a copy of the guard."""
    shutil.copy(conftest.__file__, directory / "conftest.py")
    tests = [f"def test_{number}():\n    {body}\n" for number, body in enumerate(bodies)]
    (directory / "test_it.py").write_text("\n\n".join([HEAD, *tests]))
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(directory)],
        **{"cwd": directory, "env": environment, "capture_output": True, "text": True, "timeout": 60},
    )


def test_reaching_another_machine_fails_the_test(tmp_path: Path) -> None:
    # 192.0.2.1 and its neighbours are documentation's own: nobody has them.
    done = run(
        tmp_path,
        "socket.create_connection(('192.0.2.1', 80), 1)",
        "with contextlib.suppress(OSError): socket.create_connection(('192.0.2.1', 80), 1)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 53))",
        "pass",
    )
    assert done.returncode == 1
    failed = re.findall(r"^(FAILED|ERROR) test_it.py::test_(\d)", done.stdout, re.MULTILINE)
    assert {number for _, number in failed} == {"0", "1", "2"}
    assert {number for kind, number in failed if kind == "ERROR"} == {"0", "1", "2"}
    assert done.stdout.count("E       AssertionError: the test has tried to reach 192.0.2.1") == 3


def test_this_machine_may_be_reached_and_a_child_asks_a_proxy_that_is_not_there(tmp_path: Path) -> None:
    program = "import urllib.request; urllib.request.urlopen('https://192.0.2.1', timeout=5)"
    done = run(
        tmp_path,
        "assert socket.create_server(('127.0.0.1', 0)).close() is None",
        "s = socket.create_server(('localhost', 0)); socket.create_connection(s.getsockname()).close()",
        f"done = subprocess.run([sys.executable, '-c', {program!r}], capture_output=True, text=True)\n"
        "    assert 'Connection refused' in done.stderr",
    )
    assert done.returncode == 0, done.stdout
