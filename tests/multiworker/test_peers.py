"""Peers: what a process reports when peers are missing or lost, or its port is in use."""

import contextlib
import os
import signal
import subprocess

import pytest

from shardline.trainer.base.errors import EXIT_BAD_INPUT
from tests.helpers import replicas
from tests.helpers.datasets import write_dataset

pytestmark = pytest.mark.multiworker

PROGRAM = """
import os, sys
import tensorflow as tf
from shardline.trainer.base import progress
from shardline.trainer.distribute import strategy
from shardline.trainer.cluster import read_cluster
from shardline.trainer.distribute.collectives import Collectives, make_summation
from shardline.trainer.distribute.peers import Peers, abort_when_peer_ends
from shardline.trainer.base.settings import TrainSettings

cluster = read_cluster(os.environ)
settings = TrainSettings(dataset="-", model="-", peer_timeout=float(sys.argv[1]))
peers = Peers(cluster)
with progress.exit_on_error("train"):
    peers.handshake(60)
    workers = strategy.create_strategy(settings, cluster)
    collectives, ring = Collectives(workers), make_summation(settings, workers, cluster)
    step = tf.function(lambda value: workers.run(lambda: ring([value])[0]))
    through_ring = lambda value: step(tf.constant(value))
    sum_ = through_ring if sys.argv[3] == "ring" else lambda value: collectives.total([value])[0]
    sum_(0.0)
    print("together", flush=True)
    try:
        with abort_when_peer_ends(cluster):
            while not sum_(float(os.path.exists(sys.argv[2]))):
                pass
    except tf.errors.OpError as error:
        raise peers.explain(error) or error from error
"""


@contextlib.contextmanager
def summing(count, timeout, transport, end):
    """Starts processes that sum, over TensorFlow or the ring, until there is a file `end`."""
    processes = replicas.start(["-c", PROGRAM, timeout, str(end), transport], count)
    for process in processes:
        lines = []
        while "together\n" not in lines:
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def pair(request, tmp_path):
    with summing(2, *request.param, tmp_path / "end") as processes:
        yield processes


def test_all_learn_which_one_was_killed(tmp_path):
    """Also one that does not receive from it, and that checks the chief only."""
    with summing(3, "600", "tensorflow", tmp_path / "end") as processes:
        processes[2].kill()
        outputs = [process.communicate(timeout=30)[0] for process in processes[:2]]

    assert [process.returncode for process in processes[:2]] == [1, 1]
    assert all("train: error: lost worker-1 (127.0.0.1:" in output for output in outputs), "".join(outputs)


@pytest.mark.parametrize(
    ("pair", "victim", "signum", "within"),
    [
        # At once, independent of the peer_timeout.
        (("600", "tensorflow"), 0, signal.SIGKILL, 20),
        (("600", "ring"), 1, signal.SIGKILL, 20),
        # After the time that is set, and not after TensorFlow's own 10 s.
        (("2", "tensorflow"), 0, signal.SIGSTOP, 60),
        (("1", "ring"), 1, signal.SIGSTOP, 60),
    ],
    indirect=["pair"],
)
def test_a_peer_that_is_killed_or_hangs_for_too_long_is_named(pair, victim, signum, within):
    os.kill(pair[victim].pid, signum)

    output = pair[1 - victim].communicate(timeout=within)[0]
    assert pair[1 - victim].returncode == 1
    assert f"train: error: lost {('chief-0', 'worker-0')[victim]} (127.0.0.1:" in output
    assert "Traceback" not in output


@pytest.mark.matrix  # takes seconds; that the time is the one that is set shows above
@pytest.mark.parametrize(
    ("pair", "still"),
    [(("60", "tensorflow"), 0), (("60", "tensorflow"), 1), (("60", "ring"), 1)],
    indirect=["pair"],
)
def test_a_short_pause_is_survived(pair, still, tmp_path):
    """One that is longer than TensorFlow's own 10 s."""
    os.kill(pair[still].pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        pair[1 - still].wait(timeout=15)
    os.kill(pair[still].pid, signal.SIGCONT)
    (tmp_path / "end").touch()

    assert [process.wait(timeout=60) for process in pair] == [0, 0]


def test_replicas_with_other_flags_end_before_they_train(tmp_path):
    """As a mistake, which no job is started again for."""
    write_dataset(tmp_path / "data", records={"train": 96, "validation": 25}, shards=4)
    arguments = ["-m", "shardline.trainer.task", "--dataset", tmp_path / "data", "--model", "mnist_cnn"]
    arguments += ["--model-dir", tmp_path / "out", "--per-replica-batch-size"]
    processes = [
        replicas.start_one([*map(str, arguments), size], config)
        for size, config in zip(["16", "8"], replicas.tf_configs(2), strict=True)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]

    assert [process.returncode for process in processes] == [EXIT_BAD_INPUT] * 2
    assert "worker-0 has --per-replica-batch-size 8, chief-0 has 16: all replicas take the same" in outputs[0]
    assert "chief-0 has --per-replica-batch-size 16, worker-0 has 8: all replicas take the same" in outputs[1]


def test_a_replica_without_its_accelerators_ends_at_once(tmp_path):
    """Here there is no GPU, and the other process never starts."""
    arguments = ["-m", "shardline.trainer.task", "--dataset", str(tmp_path), "--model", "mnist_cnn"]
    arguments += ["--model-dir", str(tmp_path / "out")]
    told = {"SHARDLINE_ACCELERATORS": "1 NVIDIA_TESLA_T4", "CUDA_VISIBLE_DEVICES": ""}
    process = replicas.start_one(arguments, replicas.tf_configs(2)[0], told)
    output = process.communicate(timeout=60)[0]

    assert process.returncode == EXIT_BAD_INPUT
    assert output.startswith("train: cluster: TF_CONFIG\ntrain: device: CPU, ")
    assert "error: this machine should have 1 NVIDIA_TESLA_T4, but TensorFlow sees no GPU: " in output
