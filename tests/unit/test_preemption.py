"""SIGTERM, in real processes."""

import signal
import subprocess
import sys

import pytest

from shardline.trainer.base.errors import EXIT_RESTART
from tests.helpers.replicas import ROOT

HEAD = """
import ctypes, sys, threading
from pathlib import Path
from shardline.trainer.checkpoint.preemption import Preemption

def deaf():
    "A call into C that holds the interpreter, as TensorFlow may: no Python handler would run."
    print("deaf", flush=True)
    ctypes.CDLL(None).pause()
"""


def start(body, head=HEAD):
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, "-c", head + body], **pipe, text=True, cwd=ROOT)


def terminate_at(process, line):
    """Sends SIGTERM when the process has written a line; returns its exit code and what it wrote after."""
    with process:
        output = ""
        for written in process.stdout:
            if written.strip() == line:
                break
            output += written
        else:
            pytest.fail(f"ended before {line!r}:\n{output}")
        process.send_signal(signal.SIGTERM)
        output = process.stdout.read()
    return process.returncode, output


def test_before_training_the_process_ends_at_once():
    process = start("with Preemption(600): deaf()")
    code, output = terminate_at(process, "deaf")

    assert code == EXIT_RESTART
    assert output == (
        "train: error: asked to stop (SIGTERM) before training began; start the same command again\n"
    )


def test_a_run_that_saves_within_the_grace_period_ends_by_itself():
    body = """
with Preemption(600) as preemption:
    preemption.ready()
    print("training", flush=True)
    while not preemption.requested:
        threading.Event().wait(0.01)
    print("saved", flush=True)
sys.exit(3)
"""
    code, output = terminate_at(start(body), "training")

    assert code == 3
    assert output.splitlines() == ["train: asked to stop (SIGTERM): saving, for at most 600 s", "saved"]


def test_a_run_that_does_not_end_within_the_grace_period_is_ended():
    process = start("with Preemption(0.2) as preemption: preemption.ready(); deaf()")
    code, output = terminate_at(process, "deaf")

    assert code == EXIT_RESTART
    assert "not done within the grace_period of 0.2 s" in output


def test_a_second_signal_changes_nothing():
    body = """
import os, signal
with Preemption(600) as preemption:
    preemption.ready()
    print("training", flush=True)
    while not preemption.requested:
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    print("saved", flush=True)
    signal.sigwait({signal.SIGTERM})
"""
    code, output = terminate_at(start(body), "training")

    assert code == 0
    assert output.splitlines()[-1] == "saved"


def test_afterwards_the_previous_signal_handling_is_restored():
    process = start("with Preemption(600) as p: p.ready()\nassert not p.requested\ndeaf()")
    assert terminate_at(process, "deaf") == (-signal.SIGTERM, "")


PROGRAM = """
import ctypes, os, signal, sys, threading
from shardline.trainer.checkpoint import preemption

def deaf():
    "Calls into C without end: Python's handler runs in between only."
    print("deaf", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # another thread takes it, as TensorFlow's do
    while True:
        ctypes.CDLL(None).pause()

preemption.handle_sigterm()
"""


def test_a_program_that_has_loaded_tensorflow_ends_at_once_before_training():
    started_before = "threading.Thread(target=threading.Event().wait, daemon=True).start()\ndeaf()"
    code, output = terminate_at(start(started_before, PROGRAM), "deaf")

    assert code == EXIT_RESTART
    assert output.startswith("train: error: asked to stop (SIGTERM) before training began;")


def test_a_program_that_has_loaded_tensorflow_is_ended_after_the_grace_period():
    """Also where TensorFlow has replaced the handler meanwhile, as when it connects the workers."""
    body = """
ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(1))
preemption.restore_handler()
preemption.current.grace_period = 0.2
preemption.current.ready()
threading.Thread(target=threading.Event().wait, daemon=True).start()
deaf()
"""
    code, output = terminate_at(start(body, PROGRAM), "deaf")

    assert code == EXIT_RESTART
    assert "not done within the grace_period of 0.2 s" in output


@pytest.mark.parametrize("is_set", ["before", "later"])
def test_a_handler_of_the_program_itself_is_kept(is_set):
    own = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))\n"
    head = own + PROGRAM if is_set == "before" else PROGRAM + own
    wait = "\nprint('here', flush=True)\nthreading.Event().wait(60)"

    assert terminate_at(start(wait, head), "here") == (9, "")


@pytest.mark.parametrize("head", [HEAD + "with Preemption(600) as preemption.current:", PROGRAM + "if True:"])
def test_sigterm_ends_a_forked_process_as_by_default(head):
    """As those of a multiprocessing pool, which it ends by SIGTERM."""
    head = "from shardline.trainer.checkpoint import preemption\n" + head
    body = """
    import os, signal
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)
"""
    with start(body, head) as process:
        assert process.stdout.read() == f"{-signal.SIGTERM}\n"


def test_a_thread_leaves_sigterm_alone():
    head = PROGRAM.replace("\npreemption.handle", "\nthread = threading.Thread(target=preemption.handle")
    head = head.replace("handle_sigterm()", "handle_sigterm)\nthread.start()\nthread.join()")
    body = "print('here', flush=True)\nthreading.Event().wait(60)"

    assert terminate_at(start(body, head), "here") == (-signal.SIGTERM, "")


def test_threads_of_tensorflow_do_not_receive_the_signal(monkeypatch):
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS")  # as many threads as TensorFlow likes
    body = """
with Preemption(0.2) as preemption:
    from shardline.trainer.keras_compat import tensorflow_internals
    tensorflow_internals.import_tensorflow()
    import tensorflow as tf
    tf.constant(range(1000)) + tf.constant(range(1000))
    list(tf.data.Dataset.range(4).map(lambda x: x, num_parallel_calls=4))
    statuses = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    blocked = [int(status.split("SigBlk:")[1].split()[0], 16) >> 14 & 1 for status in statuses]
    # The one that waits for it has it open.
    assert len(blocked) > 4 and blocked.count(0) == 1, blocked
    preemption.ready()
    deaf()
"""
    code, output = terminate_at(start(body), "deaf")

    assert code == EXIT_RESTART
    assert "continues from the newest checkpoint" in output


def test_the_program_of_a_replica_has_no_thread_before_it_waits_for_the_signal():
    """NumPy starts threads when it is imported, one of which would take the signal and do nothing with it."""
    program = """
import os, sys, shardline.trainer.task
print(len(os.listdir('/proc/self/task')), 'numpy' in sys.modules)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)

    assert done.stdout == "1 False\n"
