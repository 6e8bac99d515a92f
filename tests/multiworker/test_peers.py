"""What a process says about peers that are missing, gone or in the way."""

import os
import signal

import pytest

from tests.helpers import replicas

pytestmark = pytest.mark.multiworker

PROGRAM = """
import os, sys
import tensorflow as tf
from shardline.trainer import progress
from shardline.trainer.cluster import strategy
from shardline.trainer.cluster.cluster import read_cluster
from shardline.trainer.cluster.collectives import Collectives
from shardline.trainer.cluster.peers import Peers
from shardline.trainer.settings import TrainSettings

cluster = read_cluster(os.environ)
peers = Peers(cluster)
with progress.errors_end_the_process("train"):
    peers.meet(60)
    collectives = Collectives(strategy.create(TrainSettings(dataset="-", model="-"), cluster))
    collectives.barrier()
    print("together", flush=True)
    try:
        while True:
            collectives.barrier()
    except tf.errors.OpError as error:
        raise peers.explain(error) or error from error
"""


@pytest.fixture
def pair():
    """Two processes that meet in barriers without end."""
    processes = replicas.start(["-c", PROGRAM], 2)
    for process in processes:
        lines = []
        while "together\n" not in lines:
            line = process.stdout.readline()
            assert line, "".join(lines)
            lines.append(line)
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("lost", "name"), [(0, "chief-0"), (1, "worker-0")])
def test_a_peer_that_dies_or_stands_still_is_named(pair, how, lost, name):
    os.kill(pair[lost].pid, how)

    output = pair[1 - lost].communicate(timeout=60)[0]
    assert pair[1 - lost].returncode == 1
    assert f"train: error: lost {name} (127.0.0.1:" in output
    assert "Traceback" not in output
