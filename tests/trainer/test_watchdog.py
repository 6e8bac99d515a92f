"""Watchdog: a process without progress ends itself and reports where it hangs."""

import sys

from shardline.trainer.base.errors import EXIT_FAILED
from tests.helpers import programs

PROGRAM = """
import threading
from shardline.trainer.loop import process

process._LAST_WORDS_S = 0.0
with process.Watchdog("chief-0", 0.2) as watched:
    watched.at("in step 4")
    threading.Event().wait()
"""


def test_a_process_that_stands_still_ends_and_says_where_it_waits():
    done = programs.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)

    assert done.returncode == EXIT_FAILED
    assert "chief-0 has made no progress for 0.2 s (stall_timeout), in step 4" in done.stdout + done.stderr
    assert "threading.py" in done.stderr  # the stack
