"""Meeting peers over real sockets: those that are missing are named, in time."""

import re
import socket
import threading

import pytest

from shardline.trainer import progress
from shardline.trainer.cluster.cluster import Cluster
from shardline.trainer.cluster.peers import Peers
from shardline.trainer.errors import ClusterError, RunError
from tests.helpers.replicas import free_ports


def clusters(ports):
    hosts = tuple(f"127.0.0.1:{port}" for port in ports)
    kinds = [("chief", 0), *(("worker", index) for index in range(len(hosts) - 1))]
    return [Cluster(kind, index, hosts) for kind, index in kinds]


def test_all_meet():
    everybody = threading.Barrier(3)

    def start(cluster):
        Peers(cluster).meet(60)
        # From here on TensorFlow answers.
        with socket.create_server(("127.0.0.1", int(cluster.addresses[cluster.name].rpartition(":")[2]))):
            everybody.wait(60)

    threads = [threading.Thread(target=start, args=(cluster,)) for cluster in clusters(free_ports(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert not everybody.broken
    assert not any(thread.is_alive() for thread in threads)


def test_names_the_host_that_is_missing():
    chief, *_ = clusters(ports := free_ports(3))
    with socket.create_server(("127.0.0.1", ports[1])):
        expected = f"within 0.1 s: no answer from worker-1 (127.0.0.1:{ports[2]})"
        with pytest.raises(RunError, match=re.escape(expected)):
            Peers(chief).meet(0.1)


def test_a_name_that_does_not_resolve_is_a_missing_host():
    cluster = Cluster("chief", 0, (f"127.0.0.1:{free_ports(1)[0]}", "no-such-host.invalid:2222"))

    with pytest.raises(RunError, match=r"no answer from worker-0 \(no-such-host.invalid:2222\)"):
        Peers(cluster).meet(0.1)


def test_the_chief_says_for_whom_it_waits(monkeypatch):
    monkeypatch.setattr("shardline.trainer.cluster.peers._PATIENCE", 0.0)
    chief, worker = clusters(free_ports(2))
    said = []
    for cluster in (chief, worker):
        with progress.sink(lambda event: said.append(event.text)), pytest.raises(RunError):
            Peers(cluster).meet(0.5)

    assert said == [f"waiting for worker-0 ({chief.hosts[1]})"]


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        chief, _ = clusters([port, *free_ports(1)])
        with pytest.raises(ClusterError, match=f"chief-0 cannot serve its address 127.0.0.1:{port}.*in use"):
            Peers(chief).meet(60)


def test_a_port_that_is_only_reserved_is_no_obstacle():
    """As the local runner reserves ports: bound, not listening."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as peer:
            chief, _ = clusters([port, peer.getsockname()[1]])
            Peers(chief).meet(60)


@pytest.mark.parametrize("cluster", [Cluster(), Cluster("evaluator", 0, ("a:1", "b:1"))])
def test_without_peers_nobody_is_waited_for(cluster):
    Peers(cluster).meet(60)

    assert Peers(cluster).explain(ValueError("no")) is None
