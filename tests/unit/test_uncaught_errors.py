"""An error of Shardline that a plain program does not catch, in real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.replicas import ROOT

MISTAKE = "shardline.TrainSettings(dataset='', model='x', epochs=-1)"
LINE = "shardline: error: epochs must not be negative, got -1\n"


def run(body: str, *options: str) -> tuple[int, str]:
    command = [sys.executable, *options, "-c", f"import sys\nimport shardline\n{body}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (MISTAKE, 2),
        ("raise shardline.trainer.base.errors.RunError('lost\\nworker-1')", 1),
        ("raise shardline.trainer.base.errors.RestartError('asked to stop')", 75),
    ],
)
def test_it_ends_the_program_with_one_line_and_its_exit_code(body: str, code: int) -> None:
    found, errors = run(f"import shardline.trainer.base.errors\nsys.stdout.write('kept')\n{body}")

    assert found == code
    assert errors.startswith("shardline: error: ")
    assert errors.count("\n") == 1


def test_all_else_goes_to_the_hook_of_the_program() -> None:
    found, errors = run("1/0")
    assert found == 1
    assert errors.startswith("Traceback")
    assert errors.endswith("ZeroDivisionError: division by zero\n")

    earlier = "def hook(*error): print('hook', error[0].__name__, file=sys.stderr)\nsys.excepthook = hook\n"
    reload = "import importlib\nimportlib.reload(shardline)\n"
    assert run(f"{earlier}{reload}1/0") == (1, "hook ZeroDivisionError\n")
    assert run(f"{earlier}{reload}{MISTAKE}") == (2, LINE)
    assert run(f"{earlier}{MISTAKE}") == (1, "hook SettingsError\n")  # set later, it decides


def test_an_interactive_session_goes_on() -> None:
    _, errors = run(MISTAKE, "-i")
    assert "Traceback" in errors


def test_a_thread_ends_alone() -> None:
    thread = f"import threading\nthread = threading.Thread(target=lambda: {MISTAKE})\n"
    found, errors = run(f"{thread}thread.start()\nthread.join()")
    assert found == 0
    assert "Exception in thread" in errors
