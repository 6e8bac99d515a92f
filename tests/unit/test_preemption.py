"""SIGTERM, in real processes."""

import signal
import subprocess
import sys

import pytest

from shardline.trainer.base.errors import EXIT_RESTART
from tests.helpers.replicas import ROOT

HEAD = """
import ctypes, os, signal, subprocess, sys, threading
from multiprocessing import shared_memory
from pathlib import Path
from shardline.trainer import preemption
from shardline.trainer.preemption import Preemption

def deaf():
    "Calls into C without end: Python's handler runs in between only."
    print("deaf", flush=True)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # another thread takes it, as TensorFlow's do
    while True:
        ctypes.CDLL(None).pause()
"""
PROGRAM = HEAD + "preemption.handle_sigterm()\n"


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
os.kill(os.getpid(), signal.SIGTERM)  # as srun tells the tasks of one that has ended
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
with Preemption(600) as preemption:
    preemption.ready()
    print("training", flush=True)
    while not preemption.requested:
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    print("saved", flush=True)
"""
    code, output = terminate_at(start(body), "training")

    assert code == 0
    assert output.splitlines()[-1] == "saved"


def test_afterwards_the_previous_signal_handling_is_restored():
    body = "with Preemption(600): pass\nprint('here', flush=True)\nsignal.pause()"
    assert terminate_at(start(body), "here") == (-signal.SIGTERM, "")


def test_a_program_that_has_loaded_tensorflow_ends_at_once_before_training():
    code, output = terminate_at(start("deaf()", PROGRAM), "deaf")

    assert code == EXIT_RESTART
    assert output.startswith("train: error: asked to stop (SIGTERM) before training began;")


def test_a_program_that_has_loaded_tensorflow_is_ended_after_the_grace_period():
    body = """
preemption.current.grace_period = 0.2
preemption.current.ready()
deaf()
"""
    code, output = terminate_at(start(body, PROGRAM), "deaf")

    assert code == EXIT_RESTART
    assert "not done within the grace_period of 0.2 s" in output


@pytest.mark.parametrize("is_set", ["before", "later"])
def test_a_handler_of_the_program_itself_is_kept(is_set):
    own = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))\n"
    head = HEAD + own + "preemption.handle_sigterm()" if is_set == "before" else PROGRAM + own
    wait = "\nprint('here', flush=True)\nthreading.Event().wait(60)"

    assert terminate_at(start(wait, head), "here") == (9, "")


STARTED = {"context": HEAD + "with Preemption(600) as preemption.current:", "call": PROGRAM + "if True:"}


@pytest.mark.parametrize("head", STARTED.values(), ids=STARTED)
def test_sigterm_ends_a_child_as_by_default(head):
    """A forked one, as of a multiprocessing pool, also before it has run; and another program."""
    body = """
    child = subprocess.Popen(["sleep", "60"])
    child.terminate()
    codes = [child.wait()]
    for _ in range(20):
        if (forked := os.fork()) == 0:
            threading.Event().wait(60)
        os.kill(forked, signal.SIGTERM)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
    print({*codes}, preemption.current.requested, flush=True)
    os._exit(0)
"""
    with start(body, head) as process:
        assert process.stdout.read() == f"{ {-int(signal.SIGTERM)} } False\n"


@pytest.mark.parametrize("head", STARTED.values(), ids=STARTED)
def test_a_program_that_shares_memory_is_told(head):
    """The process that cleans up shared memory unblocks SIGTERM in the one that starts it."""
    body = """
    memory = shared_memory.SharedMemory(create=True, size=8)
    memory.unlink()
    preemption.current.ready()
    print("training", flush=True)
    while not preemption.current.requested:
        threading.Event().wait(0.01)
    print("saved", flush=True)
    os._exit(3)
"""
    code, output = terminate_at(start(body, head), "training")

    assert code == 3
    assert output.splitlines()[-1] == "saved"


def test_a_thread_leaves_sigterm_alone():
    head = PROGRAM.replace("\npreemption.handle", "\nthread = threading.Thread(target=preemption.handle")
    head = head.replace("handle_sigterm()", "handle_sigterm)\nthread.start()\nthread.join()")
    body = "print('here', flush=True)\nthreading.Event().wait(60)"

    assert terminate_at(start(body, head), "here") == (-signal.SIGTERM, "")
